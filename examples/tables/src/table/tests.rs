use std::{fs, path::PathBuf};

use super::*;
use crate::rides;

const HEADER: &str = "distance_km,hour,passengers,weekday,weather,minutes\n";

/// A file that is removed in the end.
struct TestFile(PathBuf);

impl TestFile {
    fn new(name: &str) -> Self {
        let name = format!("tensord-tables-{}-{name}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Reads a table and takes out what the model needs.
fn load(path: &Path) -> Result<(Checked, Vec<f32>)> {
    let table = read(path)?;
    Ok((checked(&table, path)?, numbers(&table, TARGET, path)?))
}

#[test]
fn both_formats_have_the_same_rides() {
    let made = rides::make(50, 7).unwrap();
    let tables = ["rides.csv", "rides.parquet"].map(|name| {
        let file = TestFile::new(name);
        write(&mut made.clone(), &file.0).unwrap();
        load(&file.0).unwrap()
    });
    let [(csv, csv_minutes), (parquet, parquet_minutes)] = tables;
    assert_eq!(csv.rows, 50);
    assert_eq!(csv.columns, parquet.columns);
    assert_eq!(csv_minutes, parquet_minutes);
    let minutes = made.column(TARGET).unwrap();
    assert!(minutes.f32().unwrap().into_no_null_iter().eq(csv_minutes));
}

#[test]
fn a_broken_row_of_a_csv_file_is_named() {
    let cases = [
        (
            "far,8,1,mon,dry,5",
            "row 2, column distance_km: far is not a finite number",
        ),
        (
            "NaN,8,1,mon,dry,5",
            "row 2, column distance_km: NaN is not a finite number",
        ),
        (
            "1e99,8,1,mon,dry,5",
            "row 2, column distance_km: 1e99 is not a finite number",
        ),
        (
            "1.5,8,,mon,dry,5",
            "row 2, column passengers: an empty field is not a finite number",
        ),
        (
            "1.5,8,1,monday,dry,5",
            "row 2, column weekday: monday is none of mon, tue",
        ),
        (
            "1.5,8,1",
            "row 2, column weekday: an empty field is none of mon",
        ),
        (
            "1.5,8,1,mon,dry,-",
            "row 2, column minutes: - is not a finite number",
        ),
        (
            "1,5,8,1,mon,dry,5",
            "row 2, column 7: the row has 7 fields, but the header has 6",
        ),
    ];
    let file = TestFile::new("broken.csv");
    for (row, expected) in cases {
        let text = format!("{HEADER}2.5,9,2,tue,rain,12\n{row}\n3.5,9,2,tue,rain,12\n");
        fs::write(&file.0, text).unwrap();
        let error = load(&file.0).unwrap_err().to_string();
        let expected = format!("{}, {expected}", file.0.display());
        assert!(error.starts_with(&expected), "{row}: {error}");
    }
}

#[test]
fn a_broken_row_of_a_parquet_file_is_named() {
    let replaced = |name: &str, column: Column, expected: &str| {
        let file = TestFile::new(name);
        let mut table = rides::make(3, 7).unwrap();
        table.with_column(column).unwrap();
        write(&mut table, &file.0).unwrap();
        let error = load(&file.0).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    replaced(
        "empty.parquet",
        Column::new("hour".into(), [Some(8), Some(9), None]),
        "row 3, column hour: an empty field is not a finite number",
    );
    replaced(
        "infinite.parquet",
        Column::new("distance_km".into(), [1.0, f64::INFINITY, 2.0]),
        "row 2, column distance_km: inf is not a finite number",
    );
    replaced(
        "weather.parquet",
        Column::new("weather".into(), ["hail", "dry", "snow"]),
        "row 1, column weather: hail is none of dry, rain, snow",
    );
    replaced(
        "weekday.parquet",
        Column::new("weekday".into(), [1, 2, 3]),
        "column weekday has values of type i32, not texts",
    );
}

#[test]
fn a_file_that_is_no_table_is_refused() {
    let cases: [(&str, &[u8], &str); 5] = [
        ("no.parquet", b"PAR1", "as Parquet"),
        ("empty.csv", b"", "cannot read"),
        ("header.csv", HEADER.as_bytes(), "has no rows"),
        (
            "names.csv",
            b"km,hour\n1,2\n",
            "has no column distance_km; its columns are km, hour",
        ),
        ("rides.xlsx", b"", "ends with neither .csv nor .parquet"),
    ];
    for (name, bytes, expected) in cases {
        let file = TestFile::new(name);
        fs::write(&file.0, bytes).unwrap();
        let error = format!("{:#}", load(&file.0).unwrap_err());
        assert!(error.contains(expected), "{name}: {error}");
    }
    let error = format!("{:#}", load(Path::new("/missing.csv")).unwrap_err());
    assert!(error.contains("/missing.csv"), "{error}");
}
