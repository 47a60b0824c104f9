//! Progress display and epoch history of a training run.
//!
//! Burn reports progress to a `MetricsRenderer`. [`Monitor`] implements it: it keeps the
//! history of the epochs and shows the training in one of three ways: Burn's own dashboard
//! on a terminal, one line per epoch elsewhere, or nothing.
//!
//! With several devices, each reports its own batches, so one step makes as many reports as
//! there are devices. Only the first device reports splits and epochs, and it does not wait
//! for the others: their last batch may be reported after its split, or even its epoch, has
//! ended. The step of such a batch still counts, but Burn adds its loss to the mean of the
//! next epoch.

use std::collections::HashMap;
use std::error::Error;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId, MetricName, NumericEntry};
use burn::train::renderer::tui::TuiMetricsRendererWrapper;
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use burn::train::{Interrupter, LearnerSummary};

use crate::losses::Losses;
use crate::outcome::Epoch;

/// How to show a training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Burn's terminal dashboard. It takes over the terminal: `q` stops the training,
    /// Ctrl+C does not.
    Dashboard,
    /// One line per epoch on standard output.
    Lines,
    /// Nothing.
    Quiet,
}

impl View {
    /// Returns the dashboard if standard input and output are terminals, else lines.
    pub fn detect() -> Self {
        match std::io::stdout().is_terminal() && std::io::stdin().is_terminal() {
            true => Self::Dashboard,
            false => Self::Lines,
        }
    }
}

/// The record that a [`Monitor`] writes. Clones share one record, so that the caller can read
/// it: Burn returns the monitor only as a `dyn MetricsRenderer`.
#[derive(Clone, Debug, Default)]
pub(crate) struct History(Arc<Mutex<Record>>);

/// The results of a training run so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Record {
    /// The epochs that ran to their end.
    pub(crate) epochs: Vec<Epoch>,
    /// The number of steps, including those of an interrupted epoch.
    pub(crate) steps: usize,
}

impl History {
    /// Returns the record and leaves an empty one.
    pub(crate) fn take(&self) -> Record {
        std::mem::take(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Renderer that records a training run's progress and shows it.
pub(crate) struct Monitor {
    screen: Screen,
    history: History,
    losses: Losses,
    names: HashMap<MetricId, MetricName>,
    /// The number of devices that train.
    devices: usize,
    /// The number of epochs requested.
    epochs: usize,
    /// The current epoch.
    current: Epoch,
    started: Instant,
    /// The current split.
    split: Split,
    /// The split of the latest report.
    reported: Split,
    /// Training batches reported so far, over all devices.
    batches: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Split {
    Train,
    Test,
}

enum Screen {
    Dashboard(Box<dyn MetricsRenderer>),
    Lines(Box<dyn Write + Send + Sync>),
    Quiet,
}

impl Monitor {
    /// Creates a monitor of a training run on `devices` devices that shows `view` and adds
    /// to `history` and `losses`. The dashboard stops `interrupter` when the user presses `q`.
    pub(crate) fn new(
        view: View,
        devices: usize,
        history: History,
        losses: Losses,
        interrupter: Interrupter,
    ) -> Self {
        let screen = match view {
            View::Dashboard => {
                Screen::Dashboard(Box::new(TuiMetricsRendererWrapper::new(interrupter, None)))
            }
            View::Lines => Screen::Lines(Box::new(std::io::stdout())),
            View::Quiet => Screen::Quiet,
        };
        Self::with_screen(screen, devices, history, losses)
    }

    fn with_screen(screen: Screen, devices: usize, history: History, losses: Losses) -> Self {
        Self {
            screen,
            history,
            losses,
            names: HashMap::new(),
            devices,
            epochs: 0,
            current: Epoch::default(),
            started: Instant::now(),
            split: Split::Train,
            reported: Split::Train,
            batches: 0,
        }
    }

    /// Passes an event on to the dashboard, if there is one.
    fn show(&mut self, event: impl FnOnce(&mut dyn MetricsRenderer)) {
        if let Screen::Dashboard(dashboard) = &mut self.screen {
            event(dashboard.as_mut());
        }
    }

    /// Stores a metric's value for a whole epoch in one of the fields that
    /// `loss_and_accuracy` returns.
    fn store_epoch_value(
        &mut self,
        state: &MetricState,
        loss_and_accuracy: fn(&mut Epoch) -> [&mut f64; 2],
    ) {
        let MetricState::Numeric(entry, Some(NumericEntry::Final(value))) = state else {
            return;
        };
        let [loss, accuracy] = loss_and_accuracy(&mut self.current);
        match self.names.get(&entry.metric_id).map(|name| name.as_str()) {
            Some("Loss") => *loss = *value,
            Some("Accuracy") => *accuracy = *value,
            _ => {}
        }
    }

    /// Adds the loss of a batch, if `state` is one.
    fn store_loss(&mut self, state: &MetricState) {
        let MetricState::Numeric(entry, Some(value)) = state else {
            return;
        };
        let name = self.names.get(&entry.metric_id).map(|name| name.as_str());
        let is_of_epoch = matches!(value, NumericEntry::Final(_));
        if name == Some("Loss") && !is_of_epoch {
            self.losses.push(value.current());
        }
    }

    fn end_epoch(&mut self, number: usize) {
        let mut epoch = std::mem::take(&mut self.current);
        epoch.number = number;
        epoch.seconds = self.started.elapsed().as_secs_f64();
        let mut record = self.history.lock();
        epoch.steps = record.steps - record.epochs.iter().map(|e| e.steps).sum::<usize>();
        if let Screen::Lines(out) = &mut self.screen {
            // The training continues if nothing reads standard output any more.
            let _ = writeln!(out, "{}", epoch.line(self.epochs)).and_then(|()| out.flush());
        }
        record.epochs.push(epoch);
    }
}

impl MetricsRenderer for Monitor {
    fn manual_close(&mut self) {
        self.show(|dashboard| dashboard.manual_close());
    }

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names
            .insert(definition.metric_id.clone(), definition.name.clone());
        self.show(|dashboard| dashboard.register_metric(definition));
    }
}

impl MetricsRendererTraining for Monitor {
    fn update_train(&mut self, state: MetricState) {
        self.reported = Split::Train;
        self.store_loss(&state);
        self.store_epoch_value(&state, |epoch| [&mut epoch.loss, &mut epoch.accuracy]);
        self.show(|dashboard| dashboard.update_train(state));
    }

    fn update_valid(&mut self, state: MetricState) {
        self.reported = Split::Test;
        self.store_epoch_value(&state, |epoch| {
            [&mut epoch.test_loss, &mut epoch.test_accuracy]
        });
        self.show(|dashboard| dashboard.update_valid(state));
    }

    /// Does not pass the event on: the dashboard would reset the interrupter, and so lose
    /// the error or the stop request that ended the training.
    fn on_train_end(&mut self, _summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for Monitor {
    fn start(&mut self, epochs: usize, first: usize, items: Option<usize>, label: Option<&str>) {
        self.epochs = epochs;
        self.show(|dashboard| dashboard.start(epochs, first, items, label));
    }

    fn start_split(&mut self, split: &str, items: usize) {
        self.split = match split {
            "train" => Split::Train,
            _ => Split::Test,
        };
        if self.split == Split::Train {
            self.current = Epoch::default();
            self.started = Instant::now();
        }
        self.show(|dashboard| dashboard.start_split(split, items));
    }

    fn update_split(&mut self, items: usize) {
        if self.reported == Split::Train {
            self.batches += 1;
            self.history.lock().steps = self.batches.div_ceil(self.devices);
        }
        if self.reported == self.split {
            self.show(|dashboard| dashboard.update_split(items));
        }
    }

    fn end_split(&mut self) {
        self.show(|dashboard| dashboard.end_split());
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.end_epoch(epoch);
        self.show(|dashboard| dashboard.update_epoch(epoch));
    }

    fn end(&mut self) {
        self.show(|dashboard| dashboard.end());
    }

    /// Passes on one event per step. Burn logs one per batch, so one per device and step.
    fn log_event_training(&mut self, event: String) {
        if self.reported == Split::Train && !self.batches.is_multiple_of(self.devices) {
            return;
        }
        self.show(|dashboard| dashboard.log_event_training(event));
    }
}

/// Does nothing: the demo does not use Burn's evaluator.
impl MetricsRendererEvaluation for Monitor {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
}

impl EvaluationProgressLogger for Monitor {
    fn start_global_progress(&mut self, _tests: usize) {}
    fn start_test(&mut self, _name: &str, _items: usize) {}
    fn update_test_progress(&mut self, _items: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _event: String) {}
}

#[cfg(test)]
mod tests {
    use burn::train::metric::{AccuracyMetric, LossMetric, Metric, MetricEntry, SerializedEntry};

    use super::*;

    /// A standard output that the test can read.
    #[derive(Clone, Default)]
    struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

    impl Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn state<M: Metric>(metric: &M, value: NumericEntry) -> MetricState {
        let entry = SerializedEntry::new(String::new(), value.serialize());
        let entry = MetricEntry::new(MetricId::new(metric.name()), entry);
        MetricState::Numeric(entry, Some(value))
    }

    /// Reports a training batch of one device.
    fn play_batch(monitor: &mut Monitor, items: usize) {
        monitor.update_train(state(&LossMetric::new(), NumericEntry::Value(9.0)));
        monitor.update_split(items);
    }

    /// Plays the events of one epoch of two steps on two devices, in the order Burn sends
    /// them. The last batch comes in its split, in the next one, or in the next epoch.
    fn play_epoch(monitor: &mut Monitor, number: usize) {
        let (loss, accuracy) = (LossMetric::new(), AccuracyMetric::new());
        monitor.start_split("train", 128);
        if number == 3 {
            play_batch(monitor, 128); // The last batch of the second epoch.
        }
        for items in [64, 64, 128] {
            play_batch(monitor, items);
        }
        if number == 3 {
            play_batch(monitor, 128);
        }
        monitor.update_train(state(&loss, NumericEntry::Final(0.5)));
        monitor.update_train(state(&accuracy, NumericEntry::Final(87.5)));
        monitor.end_split();
        monitor.start_split("valid", 64);
        if number == 1 {
            play_batch(monitor, 128);
        }
        monitor.update_valid(state(&loss, NumericEntry::Value(9.0)));
        monitor.update_split(64);
        monitor.update_valid(state(&loss, NumericEntry::Final(0.25)));
        monitor.update_valid(state(&accuracy, NumericEntry::Final(93.75)));
        monitor.end_split();
        monitor.update_epoch(number);
    }

    #[test]
    fn an_epoch_becomes_a_line_and_a_record() {
        let (paper, history) = (SharedBuffer::default(), History::default());
        let screen = Screen::Lines(Box::new(paper.clone()));
        let losses = Losses::default();
        let mut monitor = Monitor::with_screen(screen, 2, history.clone(), losses.clone());
        let (loss, accuracy) = (LossMetric::new(), AccuracyMetric::new());
        monitor.register_metric(MetricDefinition::new(MetricId::new(loss.name()), &loss));
        monitor.register_metric(MetricDefinition::new(
            MetricId::new(accuracy.name()),
            &accuracy,
        ));
        monitor.start(3, 1, None, None);
        for number in 1..=3 {
            play_epoch(&mut monitor, number);
        }

        let Record { epochs, steps } = history.take();
        assert_eq!(steps, 6);
        // One for each device and step, and none for the tests and the whole epochs.
        assert_eq!(losses.values(), [9.0; 12]);
        let numbers: Vec<_> = epochs.iter().map(|e| e.number).collect();
        assert_eq!(numbers, [1, 2, 3]);
        for epoch in &epochs {
            assert_eq!((epoch.loss, epoch.accuracy), (0.5, 87.5));
            assert_eq!((epoch.test_loss, epoch.test_accuracy), (0.25, 93.75));
            assert_eq!(epoch.steps, 2);
        }
        let printed = String::from_utf8(paper.0.lock().unwrap().clone()).unwrap();
        let expected: String = epochs.iter().map(|e| e.line(3) + "\n").collect();
        assert_eq!(printed, expected);
    }
}
