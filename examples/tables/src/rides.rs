//! The columns of the example's tables: taxi rides, and how many minutes they took.
//!
//! `tables make` writes such a table. For one of your own, change [`COLUMNS`] and [`TARGET`].

use std::f32::consts::TAU;

use polars::prelude::{Column, DataFrame, PolarsResult};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// What a column has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Finite numbers.
    Number,
    /// One of these texts.
    OneOf(&'static [&'static str]),
}

/// Columns of which the model makes its predictions.
pub(crate) const COLUMNS: &[(&str, Kind)] = &[
    ("distance_km", Kind::Number),
    ("hour", Kind::Number),
    ("passengers", Kind::Number),
    ("weekday", Kind::OneOf(WEEKDAYS)),
    ("weather", Kind::OneOf(WEATHERS)),
];

/// The column that the model predicts.
pub(crate) const TARGET: &str = "minutes";

const WEEKDAYS: &[&str] = &["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
const WEATHERS: &[&str] = &["dry", "rain", "snow"];

/// Makes a table of rides. The same seed makes the same table.
pub(crate) fn make(rows: usize, seed: u64) -> PolarsResult<DataFrame> {
    let mut random = StdRng::seed_from_u64(seed);
    let rides: Vec<Ride> = (0..rows).map(|_| Ride::random(&mut random)).collect();
    fn column<T>(rides: &[Ride], of: impl Fn(&Ride) -> T) -> Vec<T> {
        rides.iter().map(of).collect()
    }
    let weekday = |ride: &Ride| WEEKDAYS[ride.weekday];
    let weather = |ride: &Ride| WEATHERS[ride.weather];
    DataFrame::new(
        rows,
        vec![
            Column::new("distance_km".into(), column(&rides, |r| r.distance_km)),
            Column::new("hour".into(), column(&rides, |r| r.hour)),
            Column::new("passengers".into(), column(&rides, |r| r.passengers)),
            Column::new("weekday".into(), column(&rides, weekday)),
            Column::new("weather".into(), column(&rides, weather)),
            Column::new(TARGET.into(), column(&rides, |r| r.minutes)),
        ],
    )
}

struct Ride {
    distance_km: f32,
    hour: i32,
    passengers: i32,
    weekday: usize,
    weather: usize,
    minutes: f32,
}

impl Ride {
    fn random(random: &mut StdRng) -> Self {
        let mut ride = Self {
            distance_km: random.random_range(0.5..20.0f32),
            hour: random.random_range(0..24),
            passengers: random.random_range(1..5),
            weekday: random.random_range(0..WEEKDAYS.len()),
            weather: random.random_range(0..WEATHERS.len()),
            minutes: 0.0,
        };
        // Of the mean absolute error of a model, this noise is half a minute.
        ride.minutes = ride.usual_minutes() + random.random_range(-1.0..1.0f32);
        ride
    }

    /// Minutes without chance: slow on mornings and evenings of working days, and in snow.
    fn usual_minutes(&self) -> f32 {
        let is_working_day = self.weekday < 5;
        // Twice a day, about at 8 and at 20 o'clock, this is near 1.
        let rush = 0.5 - 0.5 * (TAU * (self.hour as f32 - 2.0) / 12.0).cos();
        let slower = 1.0 + if is_working_day { rush } else { 0.0 };
        let weather = [1.0, 1.15, 1.6][self.weather];
        3.0 + self.passengers as f32 * 0.5 + self.distance_km * 1.5 * slower * weather
    }
}
