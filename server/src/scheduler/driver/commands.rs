//! Events to the engine, and the commands that these lead to.

use std::collections::VecDeque;

use tensord_proto::ids::ClientId;
use tensord_scheduler::{ClientEvent, Command, Event};
use tracing::info;

use super::Driver;
use crate::scheduler::{convert, worker_commands};

/// Returns the client whose stream has ended by this event.
fn disconnected(event: &Event) -> Option<ClientId> {
    match event {
        Event::Client {
            client,
            event: ClientEvent::Disconnected,
            ..
        } => Some(*client),
        _ => None,
    }
}

impl Driver {
    /// Passes an event to the engine and carries out the resulting commands, and does the
    /// same for all follow-up events.
    pub(super) fn apply(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let disconnected = disconnected(&event);
            let commands = self.engine.handle(event, self.now());
            self.records.queue(self.engine.take_record_changes());
            for command in commands {
                events.extend(self.execute(command));
            }
            if let Some(client) = disconnected {
                self.forget_without_leases(client);
            }
        }
    }

    /// Carries out a command. Returns a follow-up event if the recipient's stream was cut off,
    /// because its queue is full or closed, or if a granted lease must be released again.
    fn execute(&mut self, command: Command) -> Option<Event> {
        match command {
            Command::Queued {
                client,
                request,
                position,
                reason,
            } => self.send_queued(client, request, position, reason),
            Command::Granted {
                client,
                request,
                lease,
                devices,
            } => self.send_granted(client, request, lease, devices),
            Command::Moved {
                client,
                lease,
                epoch,
                devices,
                load_stored,
            } => self.send_moved(client, lease, epoch, devices, &load_stored),
            Command::Interrupted {
                client,
                lease,
                reason,
            } => {
                info!(%client, %lease, "lease waits: {reason}");
                self.send(client, convert::interrupted(lease, &reason))
            }
            Command::Suspended {
                client,
                lease,
                waits_for,
                needs_all,
                cause,
            } => {
                let workers = waits_for.join(", ");
                match &cause {
                    None if waits_for.is_empty() => info!(%client, %lease, "lease is suspended"),
                    None => info!(%client, %lease, "lease waits for devices of {workers}"),
                    Some(cause) => {
                        info!(%client, %lease, "lease waits for devices of {workers}: {cause}");
                    }
                }
                self.send(
                    client,
                    convert::suspended(lease, waits_for, needs_all, cause.as_ref()),
                )
            }
            Command::KeepSnapshots {
                part,
                source,
                keeper,
                assignment,
            } => self.send_keeper(part, source, keeper, assignment),
            Command::HoldSnapshots {
                holder,
                lease,
                part,
            } => self.send_to_worker(holder, worker_commands::hold_snapshots(lease, part)),
            Command::DropSnapshots {
                keeper,
                lease,
                part,
            } => self.send_to_worker(keeper, worker_commands::drop_snapshots(lease, part)),
            Command::DropStored { worker, leases } => {
                self.send_to_worker(worker, worker_commands::drop_stored(&leases))
            }
            Command::Refused {
                client,
                request,
                reason,
            } => self.send_refused(client, request, &reason),
            Command::LeaseEnded {
                client,
                lease,
                reason,
            } => self.send_lease_ended(client, lease, &reason),
            Command::EndLease {
                worker,
                lease,
                grants,
                hold_snapshots,
            } => self.send_end_lease(worker, lease, &grants, hold_snapshots),
        }
    }
}
