//! The benches, one file each.

mod allreduce;
mod attach;
mod attack;
mod bulk;
mod ddp;
mod durability;
mod epoch;
mod memory;
mod ops;
mod read;
mod rtt;
mod scheduler;
mod serve;
mod sharing;
mod step;
mod transfer;
mod weights;
mod wire;

use anyhow::{Result, bail};
use serde_json::{Value, from_value};

use crate::{context::Context, namespace_entry::NetworkFeatures, report::Report};

/// A bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bench {
    /// [`ops`].
    Ops,
    /// [`wire`].
    Wire,
    /// [`step`].
    Step,
    /// [`bulk`].
    Bulk,
    /// [`read`].
    Read,
    /// [`rtt`].
    Rtt,
    /// [`epoch`].
    Epoch,
    /// [`attach`].
    Attach,
    /// [`memory`].
    Memory,
    /// [`transfer`].
    Transfer,
    /// [`allreduce`].
    Allreduce,
    /// [`ddp`].
    Ddp,
    /// [`attack`].
    Attack,
    /// [`durability`].
    Durability,
    /// [`scheduler`].
    Scheduler,
    /// [`serve`].
    Serve,
    /// [`sharing`].
    Sharing,
    /// [`weights`].
    Weights,
}

impl Bench {
    /// All benches, in the order in which they run.
    pub(crate) const ALL: [Self; 18] = [
        Self::Ops,
        Self::Wire,
        Self::Step,
        Self::Bulk,
        Self::Read,
        Self::Rtt,
        Self::Epoch,
        Self::Attach,
        Self::Memory,
        Self::Transfer,
        Self::Allreduce,
        Self::Ddp,
        Self::Attack,
        Self::Durability,
        Self::Scheduler,
        Self::Serve,
        Self::Sharing,
        Self::Weights,
    ];

    /// Returns the bench's name on the command line and in JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ops => "ops",
            Self::Wire => "wire",
            Self::Step => "step",
            Self::Bulk => "bulk",
            Self::Read => "read",
            Self::Rtt => "rtt",
            Self::Epoch => "epoch",
            Self::Attach => "attach",
            Self::Memory => "memory",
            Self::Transfer => "transfer",
            Self::Allreduce => "allreduce",
            Self::Ddp => "ddp",
            Self::Attack => "attack",
            Self::Durability => "durability",
            Self::Scheduler => "scheduler",
            Self::Serve => "serve",
            Self::Sharing => "sharing",
            Self::Weights => "weights",
        }
    }

    /// Returns a short description of what the bench measures.
    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Ops => "time of a tiny op",
            Self::Wire => "bytes sent for a training step, without its batch",
            Self::Step => "time of a training step",
            Self::Bulk => "throughput of large tensors",
            Self::Read => "time of a small read",
            Self::Rtt => "step time over a network with delay",
            Self::Epoch => "bytes uploaded in each epoch",
            Self::Attach => "time from URL to first result",
            Self::Memory => "memory of a client that uploads large amounts",
            Self::Transfer => "transfer of a large tensor between workers",
            Self::Allreduce => "all-reduce between workers over slow links",
            Self::Ddp => "data-parallel training on several workers",
            Self::Attack => "training on a worker that is under attack",
            Self::Durability => "cost of snapshots, and time to go on after a process died",
            Self::Scheduler => "leases placed per second in a large pool",
            Self::Serve => "what a server of models costs, and answers at ten times its load",
            Self::Sharing => "how exactly leases share the time of a device",
            Self::Weights => "time to load the weights of a model",
        }
    }

    /// Runs the bench.
    ///
    /// # Errors
    ///
    /// If a process does not start, or a peer fails.
    pub(crate) fn run(self, context: &Context) -> Result<Report> {
        match self {
            Self::Ops => ops::run(context),
            Self::Wire => wire::run(context),
            Self::Step => step::run(context),
            Self::Bulk => bulk::run(context),
            Self::Read => read::run(context),
            Self::Rtt => rtt::run(context),
            Self::Epoch => epoch::run(context),
            Self::Attach => attach::run(context),
            Self::Memory => memory::run(context),
            Self::Transfer => transfer::run(context),
            Self::Allreduce => allreduce::run(context),
            Self::Ddp => ddp::run(context),
            Self::Attack => attack::run(context),
            Self::Durability => durability::run(context),
            Self::Scheduler => scheduler::run(context),
            Self::Serve => serve::run(context),
            Self::Sharing => sharing::run(context),
            Self::Weights => weights::run(context),
        }
    }

    /// Runs a part of the bench, in a process of its own. `facts` are the network features
    /// available there.
    ///
    /// # Errors
    ///
    /// If the part fails, or the bench has no parts.
    pub(crate) fn part(
        self,
        context: &Context,
        facts: NetworkFeatures,
        part: Value,
    ) -> Result<Value> {
        match self {
            Self::Ops => ops::turn(context, &from_value(part)?).map(Value::from),
            Self::Step => step::turn(context, &from_value(part)?),
            Self::Read => read::turn(context, &from_value(part)?).map(Value::from),
            Self::Attach => attach::turn(context, &from_value(part)?),
            Self::Memory => memory::run_client(context, &from_value(part)?),
            Self::Allreduce => allreduce::measure(context, facts, part),
            Self::Ddp => ddp::measure(context, facts, part),
            Self::Attack => attack::turn(context, &from_value(part)?),
            Self::Durability => durability::turn(context, &from_value(part)?),
            Self::Scheduler => scheduler::turn(&from_value(part)?),
            Self::Sharing => sharing::turn(context, &from_value(part)?),
            _ => bail!("the benchmark {} cannot be measured in parts", self.name()),
        }
    }

    /// Checks that `part` is one of the bench's turns.
    #[cfg(test)]
    pub(crate) fn is_valid_task(self, part: Value) -> Result<()> {
        match self {
            Self::Ops => drop(from_value::<ops::OpsTurn>(part)?),
            Self::Step => drop(from_value::<step::StepTurn>(part)?),
            Self::Read => drop(from_value::<read::ReadTurn>(part)?),
            Self::Attach => drop(from_value::<crate::peer::Address>(part)?),
            _ => bail!("the benchmark {} has no turns", self.name()),
        }
        Ok(())
    }
}
