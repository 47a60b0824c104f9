//! Tables in files, read and written by Polars, and what the model needs of them, checked.

use std::{fs::File, path::Path};

use anyhow::{Context, Result, bail};
use polars::prelude::{
    AnyValue, Column, CsvReadOptions, CsvWriter, DataFrame, DataType, ParquetReader, ParquetWriter,
    SerReader, SerWriter,
};

use crate::{
    ragged,
    rides::{COLUMNS, Kind, TARGET},
};

/// A file format, which the name of a file ends with.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    Csv,
    Parquet,
}

impl Format {
    fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("csv") => Ok(Self::Csv),
            Some("parquet") => Ok(Self::Parquet),
            _ => bail!(
                "{}: the name ends with neither .csv nor .parquet, so its format is not known",
                path.display()
            ),
        }
    }
}

/// Reads a table. Columns of a CSV file are texts, so that what is wrong with a field is found
/// by [`checked`], which names its row.
pub(crate) fn read(path: &Path) -> Result<DataFrame> {
    let shown = path.display();
    let table = match Format::of(path)? {
        Format::Csv => {
            let options = CsvReadOptions::default().with_infer_schema_length(Some(0));
            let reader = options.try_into_reader_with_file_path(Some(path.into()));
            match reader.and_then(|reader| reader.finish()) {
                Ok(table) => table,
                Err(error) => match ragged::first(path) {
                    Some(row) => bail!("{shown}, {row}"),
                    None => return Err(error).with_context(|| format!("cannot read {shown}")),
                },
            }
        }
        Format::Parquet => {
            let file = File::open(path).with_context(|| format!("cannot open {shown}"))?;
            let table = ParquetReader::new(file).finish();
            table.with_context(|| format!("cannot read {shown} as Parquet"))?
        }
    };
    if table.height() == 0 {
        bail!("{shown} has no rows");
    }
    Ok(table)
}

/// Writes a table. Numbers that were read from a CSV file remain as they were written there,
/// and become numbers in a Parquet file.
pub(crate) fn write(table: &mut DataFrame, path: &Path) -> Result<()> {
    let format = Format::of(path)?;
    let shown = path.display();
    let file = File::create(path).with_context(|| format!("cannot create {shown}"))?;
    let written = match format {
        Format::Csv => CsvWriter::new(file).finish(table),
        Format::Parquet => {
            let numbers = COLUMNS.iter().filter(|(_, kind)| *kind == Kind::Number);
            let names = numbers.map(|(name, _)| *name).chain([TARGET]);
            for name in names {
                let is_text = |c: &&Column| c.dtype() == &DataType::String;
                if let Some(text) = table.column(name).ok().filter(is_text) {
                    let numbers = text.cast(&DataType::Float64)?;
                    table.with_column(numbers)?;
                }
            }
            ParquetWriter::new(file).finish(table).map(drop)
        }
    };
    written.with_context(|| format!("cannot write {shown}"))
}

/// What the model needs of a table: a value for each column and row.
#[derive(Debug)]
pub(crate) struct Checked {
    /// As in [`COLUMNS`].
    pub(crate) columns: Vec<Values>,
    pub(crate) rows: usize,
}

/// The values of a column.
#[derive(Debug, PartialEq)]
pub(crate) enum Values {
    Numbers(Vec<f32>),
    /// Each is an index into the column's texts, of which there are `count`.
    Choices {
        values: Vec<u8>,
        count: usize,
    },
}

/// Takes the model's columns out of `table`, which was read from `path`.
///
/// # Errors
///
/// The first field of the first column that is not as [`COLUMNS`] has it, with its row.
pub(crate) fn checked(table: &DataFrame, path: &Path) -> Result<Checked> {
    let columns = COLUMNS.iter().map(|(name, kind)| match kind {
        Kind::Number => numbers(table, name, path).map(Values::Numbers),
        Kind::OneOf(texts) => choices(table, name, texts, path),
    });
    Ok(Checked {
        columns: columns.collect::<Result<_>>()?,
        rows: table.height(),
    })
}

/// Returns a column of finite numbers.
pub(crate) fn numbers(table: &DataFrame, name: &str, path: &Path) -> Result<Vec<f32>> {
    let column = column(table, name, path)?;
    let cast = column.cast(&DataType::Float64);
    let cast = cast.with_context(|| {
        let dtype = column.dtype();
        format!(
            "{}: column {name} has values of type {dtype}, not numbers",
            path.display()
        )
    })?;
    let values = cast.f64()?.iter().enumerate();
    let value = |(index, value): (usize, Option<f64>)| match value {
        Some(value) if (value as f32).is_finite() => Ok(value as f32),
        _ => bail!(
            "{} is not a finite number",
            Field {
                table,
                name,
                path,
                index
            }
        ),
    };
    values.map(value).collect()
}

/// Returns a column as indices into `texts`.
fn choices(table: &DataFrame, name: &str, texts: &[&str], path: &Path) -> Result<Values> {
    let column = column(table, name, path)?;
    let Ok(values) = column.str() else {
        let dtype = column.dtype();
        bail!(
            "{}: column {name} has values of type {dtype}, not texts",
            path.display()
        );
    };
    let value = |(index, value): (usize, Option<&str>)| {
        let found = value.and_then(|value| texts.iter().position(|text| *text == value));
        let Some(found) = found else {
            let field = Field {
                table,
                name,
                path,
                index,
            };
            bail!("{field} is none of {}", texts.join(", "));
        };
        Ok(u8::try_from(found)?)
    };
    Ok(Values::Choices {
        values: values
            .iter()
            .enumerate()
            .map(value)
            .collect::<Result<_>>()?,
        count: texts.len(),
    })
}

fn column<'a>(table: &'a DataFrame, name: &str, path: &Path) -> Result<&'a Column> {
    table.column(name).ok().with_context(|| {
        let names = table.get_column_names();
        let names: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
        let (shown, names) = (path.display(), names.join(", "));
        format!("{shown} has no column {name}; its columns are {names}")
    })
}

/// A field, as errors show it.
struct Field<'a> {
    table: &'a DataFrame,
    name: &'a str,
    path: &'a Path,
    index: usize,
}

impl std::fmt::Display for Field<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (path, name) = (self.path.display(), self.name);
        let row = self.index + 1;
        write!(f, "{path}, row {row}, column {name}: ")?;
        let value = self.table.column(name).and_then(|c| c.get(self.index));
        match value {
            // Polars would put it in quotes.
            Ok(AnyValue::String(text)) => write!(f, "{text}"),
            Ok(value) if !value.is_null() => write!(f, "{value}"),
            _ => write!(f, "an empty field"),
        }
    }
}

#[cfg(test)]
mod tests;
