//! Rows of a table as the numbers that a model takes.

use burn::tensor::TensorData;

use crate::table::{Checked, Values};

/// Makes inputs of rows: numbers in units of the training table's standard deviation, away from
/// its mean, and for each choice a one where it is.
#[derive(Clone, Debug)]
pub(crate) struct Encoder {
    /// The scale of each column of numbers, `None` for choices.
    scales: Vec<Option<Scale>>,
    width: usize,
}

/// The mean and the standard deviation of numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    mean: f32,
    deviation: f32,
}

impl Scale {
    pub(crate) fn of(numbers: &[f32]) -> Self {
        let count = numbers.len() as f64;
        let mean = numbers.iter().map(|n| f64::from(*n)).sum::<f64>() / count;
        let squares = numbers.iter().map(|n| (f64::from(*n) - mean).powi(2));
        let deviation = (squares.sum::<f64>() / count).sqrt() as f32;
        Self {
            mean: mean as f32,
            // A column of equal numbers has nothing to scale.
            deviation: if deviation > 0.0 { deviation } else { 1.0 },
        }
    }

    pub(crate) fn apply(self, number: f32) -> f32 {
        (number - self.mean) / self.deviation
    }

    pub(crate) fn undo(self, scaled: f32) -> f32 {
        scaled * self.deviation + self.mean
    }
}

impl Encoder {
    /// An encoder with the scales of `table`.
    pub(crate) fn of(table: &Checked) -> Self {
        let mut width = 0;
        let scale = |column: &Values| match column {
            Values::Numbers(numbers) => {
                width += 1;
                Some(Scale::of(numbers))
            }
            Values::Choices { count, .. } => {
                width += count;
                None
            }
        };
        let scales = table.columns.iter().map(scale).collect();
        Self { scales, width }
    }

    /// Numbers of a row.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Returns the inputs of `rows`, of shape `[rows, width]`.
    pub(crate) fn encode(&self, table: &Checked, rows: &[usize]) -> TensorData {
        let mut inputs = vec![0.0; rows.len() * self.width];
        for (row, input) in rows.iter().zip(inputs.chunks_exact_mut(self.width)) {
            let mut at = 0;
            for (column, scale) in table.columns.iter().zip(&self.scales) {
                match (column, scale) {
                    (Values::Numbers(numbers), Some(scale)) => {
                        input[at] = scale.apply(numbers[*row]);
                        at += 1;
                    }
                    (Values::Choices { values, count }, _) => {
                        input[at + usize::from(values[*row])] = 1.0;
                        at += count;
                    }
                    (Values::Numbers(_), None) => unreachable!("numbers have a scale"),
                }
            }
        }
        TensorData::new(inputs, [rows.len(), self.width])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_scaled_and_choices_are_ones() {
        let table = Checked {
            columns: vec![
                Values::Numbers(vec![1.0, 3.0, 5.0, 7.0]),
                Values::Choices {
                    values: vec![0, 2, 1, 0],
                    count: 3,
                },
                Values::Numbers(vec![4.0; 4]),
            ],
            rows: 4,
        };
        let encoder = Encoder::of(&table);
        let encoded = encoder.encode(&table, &[3, 1]);
        // The mean is 4, the standard deviation the square root of 5.
        let expected = [
            3.0 / 5f32.sqrt(),
            1.0,
            0.0,
            0.0,
            0.0,
            -1.0 / 5f32.sqrt(),
            0.0,
            0.0,
            1.0,
            0.0,
        ];
        assert_eq!(encoded, TensorData::new(expected.to_vec(), [2, 5]));
    }

    #[test]
    fn scaling_is_undone() {
        let scale = Scale::of(&[2.0, 4.0, 9.0]);
        assert!((scale.undo(scale.apply(7.5)) - 7.5).abs() < 1e-6);
    }
}
