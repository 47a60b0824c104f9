//! The program's part of its sessions.

use std::{fmt, time::Instant};

use tensord_client::testing::SimulatedSession;
use tensord_proto::v1::Opened;

use crate::{
    network::Link,
    program::{Program, Progress, Request, Run},
};

/// The reply to a request of a program.
#[derive(Clone, PartialEq)]
pub enum Answer {
    /// A value, as bytes.
    Value(Vec<u8>),
    /// Everything before the request is done.
    Synced,
    /// A fault, in words.
    Fault(String),
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(bytes) => {
                let shown = &bytes[..bytes.len().min(16)];
                write!(f, "{} bytes that begin with {shown:?}", bytes.len())
            }
            Self::Synced => f.write_str("\"done\""),
            Self::Fault(reason) => write!(f, "the fault {reason:?}"),
        }
    }
}

/// The program's part of a session.
pub(crate) struct Client<'a> {
    pub(crate) session: SimulatedSession,
    /// The connections of the track for ops and of that for bulk bytes, with the worker where the session
    /// is.
    pub(crate) links: [Link<Box<Opened>>; 2],
    /// How often the session was opened or resumed. The program begins with the first time.
    pub(crate) openings: u32,
    run: Run<'a>,
    /// Requests without a reply, with their numbers.
    pending: Vec<(usize, Request)>,
    pub(crate) answers: Vec<Option<Answer>>,
    /// Whether the program waits for the replies to all of its requests.
    waits: bool,
    is_over: bool,
}

impl<'a> Client<'a> {
    /// Returns the part of `program` that uses `session`, which is on the device of the lease with this
    /// number.
    pub(crate) fn new(session: SimulatedSession, program: &'a Program, device: usize) -> Self {
        Self {
            session,
            links: Default::default(),
            openings: 0,
            run: Run::new(program, device),
            pending: Vec::new(),
            answers: Vec::new(),
            waits: false,
            is_over: false,
        }
    }

    pub(crate) fn run_program(&mut self, now: Instant) {
        self.collect_answers();
        if self.waits && self.pending.is_empty() {
            self.waits = false;
        }
        if self.openings == 0 || self.waits || self.is_over || self.session.is_full() {
            return;
        }
        match self.run.step(&self.session, now) {
            Progress::Continues => {}
            Progress::Requested(request) => {
                self.pending.push((self.answers.len(), request));
                self.answers.push(None);
            }
            Progress::Waits => self.waits = true,
            Progress::Done => self.is_over = true,
        }
    }

    /// Takes the replies that have arrived.
    pub(crate) fn collect_answers(&mut self) {
        let answers = &mut self.answers;
        self.pending.retain_mut(|(number, request)| {
            let answer = match request {
                Request::Value(value) => value.try_recv().ok().map(|value| match value {
                    Ok(data) => Answer::Value(data.into_bytes().to_vec()),
                    Err(e) => Answer::Fault(e.to_string()),
                }),
                Request::Sync(synced) => synced.try_recv().ok().map(|synced| match synced {
                    Ok(()) => Answer::Synced,
                    Err(e) => Answer::Fault(e.to_string()),
                }),
            };
            let is_pending = answer.is_none();
            if answer.is_some() {
                answers[*number] = answer;
            }
            is_pending
        });
    }

    /// Returns whether the program is done, and has all replies.
    pub(crate) fn is_done(&self) -> bool {
        self.is_over && self.pending.is_empty()
    }

    /// Ends all connections.
    pub(crate) fn disconnect(&mut self) {
        self.links = Default::default();
    }
}
