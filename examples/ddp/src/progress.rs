//! A renderer for Burn's training that prints a line for each epoch. Without a terminal
//! Burn's own renderer prints several for each step.

use std::{error::Error, time::Instant};

use burn::train::{
    LearnerSummary,
    logger::{EvaluationProgressLogger, TrainingProgressLogger},
    metric::{MetricDefinition, NumericEntry},
    renderer::{
        EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
        MetricsRendererTraining,
    },
};

/// Prints the losses of each epoch; the loss must be the only metric.
pub(crate) struct Progress {
    epochs: usize,
    train_loss: f64,
    valid_loss: f64,
    started: Instant,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self {
            epochs: 0,
            train_loss: f64::NAN,
            valid_loss: f64::NAN,
            started: Instant::now(),
        }
    }
}

/// Returns the value of a metric for a whole epoch, if `state` has it.
fn of_epoch(state: &MetricState) -> Option<f64> {
    match state {
        MetricState::Numeric(_, Some(NumericEntry::Final(value))) => Some(*value),
        _ => None,
    }
}

impl MetricsRendererTraining for Progress {
    fn update_train(&mut self, state: MetricState) {
        self.train_loss = of_epoch(&state).unwrap_or(self.train_loss);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.valid_loss = of_epoch(&state).unwrap_or(self.valid_loss);
    }

    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for Progress {
    fn start(&mut self, epochs: usize, _: usize, _: Option<usize>, _: Option<&str>) {
        self.epochs = epochs;
    }

    /// Prints the line of an epoch. Burn calls this at the epoch's end.
    fn update_epoch(&mut self, epoch: usize) {
        let seconds = self.started.elapsed().as_secs_f64();
        self.started = Instant::now();
        println!(
            "epoch {epoch:>2}/{}  loss {:.3}  validation loss {:.3}  {seconds:.1} s",
            self.epochs, self.train_loss, self.valid_loss
        );
    }

    fn start_split(&mut self, _: &str, _: usize) {}
    fn update_split(&mut self, _: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {}
    fn log_event_training(&mut self, _: String) {}
}

impl MetricsRenderer for Progress {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// Does nothing: the example does not use Burn's evaluator.
impl MetricsRendererEvaluation for Progress {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl EvaluationProgressLogger for Progress {
    fn start_global_progress(&mut self, _: usize) {}
    fn start_test(&mut self, _: &str, _: usize) {}
    fn update_test_progress(&mut self, _: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _: String) {}
}
