//! What the user sees while the model trains.
//!
//! Burn reports a training to a `MetricsRenderer`. [`Monitor`] is ours: it keeps the history of
//! the epochs and shows the training in one of three ways: Burn's own dashboard on a terminal, a
//! line an epoch elsewhere, or nothing.
//!
//! Of several devices each reports its own batches, so a step is as many reports as there are
//! devices. The first device alone tells of splits and epochs, and does not wait for the others:
//! their last batch may come when its split, or even its epoch, has ended. Its step is counted all
//! the same, but its loss goes into Burn's mean for the next epoch.

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

use super::outcome::Epoch;

/// How to show a training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    /// Burn's terminal dashboard. It owns the terminal: `q` stops the training, Ctrl+C does not.
    Dashboard,
    /// One line an epoch on standard output.
    Lines,
    /// Nothing.
    Quiet,
}

impl View {
    /// The dashboard where someone can see and leave it, lines where not.
    pub(crate) fn detect() -> Self {
        match std::io::stdout().is_terminal() && std::io::stdin().is_terminal() {
            true => Self::Dashboard,
            false => Self::Lines,
        }
    }
}

/// What a [`Monitor`] has seen. Clones share it, since Burn keeps the monitor to itself.
#[derive(Clone, Debug, Default)]
pub(super) struct History(Arc<Mutex<Record>>);

/// The part of a training that is worth keeping.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Record {
    /// The epochs that ran to their end.
    pub(super) epochs: Vec<Epoch>,
    /// All steps, those of an epoch that was cut short included.
    pub(super) steps: usize,
}

impl History {
    /// Takes the record out.
    pub(super) fn take(&self) -> Record {
        std::mem::take(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows a training from event to event.
pub(super) struct Monitor {
    screen: Screen,
    history: History,
    names: HashMap<MetricId, MetricName>,
    /// How many devices train.
    devices: usize,
    /// How many epochs the run is to have.
    epochs: usize,
    /// The epoch that runs.
    current: Epoch,
    started: Instant,
    /// The split that runs.
    split: Split,
    /// The split that the latest report belongs to.
    reported: Split,
    /// Batches trained on so far, those of all devices.
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
    /// A monitor of a training on `devices` devices that shows `view` and adds to `history`;
    /// `interrupter` is what the dashboard pulls when the user asks it to stop.
    pub(super) fn new(
        view: View,
        devices: usize,
        history: History,
        interrupter: Interrupter,
    ) -> Self {
        let screen = match view {
            View::Dashboard => {
                Screen::Dashboard(Box::new(TuiMetricsRendererWrapper::new(interrupter, None)))
            }
            View::Lines => Screen::Lines(Box::new(std::io::stdout())),
            View::Quiet => Screen::Quiet,
        };
        Self::with_screen(screen, devices, history)
    }

    fn with_screen(screen: Screen, devices: usize, history: History) -> Self {
        Self {
            screen,
            history,
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

    /// Keeps the value a metric has for a whole epoch; `loss_and_accuracy` says where.
    fn keep(&mut self, state: &MetricState, loss_and_accuracy: fn(&mut Epoch) -> [&mut f64; 2]) {
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

    fn end_epoch(&mut self, number: usize) {
        let mut epoch = std::mem::take(&mut self.current);
        epoch.number = number;
        epoch.seconds = self.started.elapsed().as_secs_f64();
        let mut record = self.history.lock();
        epoch.steps = record.steps - record.epochs.iter().map(|e| e.steps).sum::<usize>();
        if let Screen::Lines(out) = &mut self.screen {
            // A reader that has gone away is no reason to stop training.
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
        self.keep(&state, |epoch| [&mut epoch.loss, &mut epoch.accuracy]);
        self.show(|dashboard| dashboard.update_train(state));
    }

    fn update_valid(&mut self, state: MetricState) {
        self.reported = Split::Test;
        self.keep(&state, |epoch| {
            [&mut epoch.test_loss, &mut epoch.test_accuracy]
        });
        self.show(|dashboard| dashboard.update_valid(state));
    }

    /// Not passed on: the dashboard would reset the interrupter, and with it the error or the
    /// stop that ended the training.
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

    /// An iteration, of which the dashboard is to count one a step.
    fn log_event_training(&mut self, event: String) {
        if self.reported == Split::Train && !self.batches.is_multiple_of(self.devices) {
            return;
        }
        self.show(|dashboard| dashboard.log_event_training(event));
    }
}

/// Burn's evaluator is not used: the final test is one forward pass.
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

    /// A standard output to look at.
    #[derive(Clone, Default)]
    struct Paper(Arc<Mutex<Vec<u8>>>);

    impl Write for Paper {
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

    /// A device's report of a batch that it trained on.
    fn play_batch(monitor: &mut Monitor, items: usize) {
        monitor.update_train(state(&LossMetric::new(), NumericEntry::Value(9.0)));
        monitor.update_split(items);
    }

    /// The events of one epoch of two steps on two devices, in the order Burn sends them. The
    /// last batch comes early, late or very late, which is not up to us.
    fn play_epoch(monitor: &mut Monitor, number: usize) {
        let (loss, accuracy) = (LossMetric::new(), AccuracyMetric::new());
        monitor.start_split("train", 128);
        if number == 3 {
            play_batch(monitor, 128); // Of the second epoch.
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
        let (paper, history) = (Paper::default(), History::default());
        let screen = Screen::Lines(Box::new(paper.clone()));
        let mut monitor = Monitor::with_screen(screen, 2, history.clone());
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
