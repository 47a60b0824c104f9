//! What a session's tensors cost: storages are counted, not names.
//!
//! Several tensors may use one storage: a second name, a slice that outlives its
//! tensor, an answer on its way to the client. The storage is charged once, until the
//! last of them is gone. On top of it each name has a fixed cost, and so has a fault.
//!
//! A backend that can tell which storage a tensor uses is asked (see
//! [`StorageInfo`]); for others [`Holding::view_of`] counts no less than they may use.

use std::{collections::HashMap, mem::size_of, sync::Arc};

use tensord_proto::v1::Fault;

use super::{Refusal, out_of_memory};
use crate::{backend::StorageInfo, memory::SessionMemory};

/// What a tensor costs beside its elements, whatever its rank: the backend's handle with
/// its shape and strides, the storage's own records and the allocator's rounding, 240
/// bytes for a matrix and 900 for the highest rank.
pub(crate) const NAME_BYTES: u64 = 1 << 10;

/// What the two tables of a session, ours and the backend's, take for each name that
/// they ever had at once: they grow by doubling and never shrink.
pub(super) const TABLE_BYTES: u64 = 704;

/// Names whose place in the tables is within what a session costs anyway, and the steps
/// in which further ones are paid for: 5.5 MiB.
pub(super) const TABLE_NAMES: usize = 1 << 13;

/// What the tensors without a value may take where the device is full: an op that did
/// not fit leaves a fault that names the cause, and that has to be kept somewhere.
const FAULT_RESERVE_BYTES: u64 = 1 << 20;

/// What a fault costs beside its texts: its record and its place among the faults.
const FAULT_BYTES: usize = size_of::<Fault>() + 64;

/// A storage that is used more than once. Its memory is given back with the last use.
#[derive(Debug)]
pub(crate) struct Storage {
    /// As the backend names it; 0 where it does not.
    id: usize,
    memory: SessionMemory,
}

/// What one name has of the account, beside its fixed cost.
#[derive(Debug, Default)]
pub(super) struct Holding {
    /// Bytes that no other name pays for.
    own_bytes: u64,
    shared: Option<Arc<Storage>>,
}

impl Holding {
    /// Of `bytes` that were taken for it alone.
    pub(super) fn own(bytes: u64) -> Self {
        Self {
            own_bytes: bytes,
            shared: None,
        }
    }

    /// All that it keeps from being freed.
    pub(super) fn bytes(&self) -> u64 {
        let shared = self.shared.as_ref();
        self.own_bytes + shared.map_or(0, |storage| storage.memory.bytes())
    }

    /// Whether other names may use the same storage.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// The storage, if it is known to be the one of `info`.
    fn known_as(&self, info: &StorageInfo) -> Option<Arc<Storage>> {
        // Both must be the same: a storage that was freed may leave its id to another.
        let is_it = |s: &&Arc<Storage>| s.id == info.id && s.memory.bytes() == info.bytes;
        self.shared.as_ref().filter(is_it).cloned()
    }
}

/// What a session's tensors hold of its device.
#[derive(Debug)]
pub(super) struct Account {
    memory: SessionMemory,
    /// Names that the tables were paid for.
    table_names: usize,
    /// Names that hold each fault, by its address.
    faults: HashMap<usize, usize>,
    /// What all names without a value cost.
    fault_bytes: u64,
}

impl Account {
    pub(super) fn new(memory: SessionMemory) -> Self {
        Self {
            memory,
            table_names: TABLE_NAMES,
            faults: HashMap::new(),
            fault_bytes: 0,
        }
    }

    /// An account of the same device with nothing in it.
    pub(super) fn beside(&self) -> SessionMemory {
        self.memory.beside()
    }

    pub(super) fn take(&mut self, bytes: u64) -> Result<(), Refusal> {
        self.memory.take(bytes).map_err(out_of_memory)
    }

    /// Pays for tables with room for `names`.
    pub(super) fn make_room(&mut self, names: usize) -> Result<(), Refusal> {
        while names > self.table_names {
            self.take(TABLE_NAMES as u64 * TABLE_BYTES)?;
            self.table_names += TABLE_NAMES;
        }
        Ok(())
    }

    /// A name is gone, with what it had.
    pub(super) fn release(&mut self, holding: &Holding) {
        self.memory.give_back(holding.own_bytes + NAME_BYTES);
    }

    /// Takes over what `held` has, for a tensor and its name.
    pub(super) fn adopt(&mut self, held: SessionMemory) -> Holding {
        let bytes = self.memory.adopt(held);
        Holding::own(bytes.saturating_sub(NAME_BYTES))
    }

    /// The holding uses the storage of `info` alone.
    pub(super) fn resize(&mut self, holding: &mut Holding, info: &StorageInfo) {
        let (was, is) = (holding.own_bytes, info.bytes);
        if is > was {
            // The backend has it already.
            self.memory.take_beyond(is - was);
        } else {
            self.memory.give_back(was - is);
        }
        holding.own_bytes = is;
    }

    /// The holding uses `storage` in the place of what was taken for it.
    pub(super) fn join(&mut self, holding: &mut Holding, storage: Arc<Storage>) {
        self.memory.give_back(holding.own_bytes);
        *holding = Holding {
            own_bytes: 0,
            shared: Some(storage),
        };
    }

    /// The storage of `holding`, if it is the one of `info`, for another to use; `look`
    /// asks the backend what it uses.
    pub(super) fn find(
        &mut self,
        holding: &mut Holding,
        info: &StorageInfo,
        look: impl FnOnce() -> Option<StorageInfo>,
    ) -> Option<Arc<Storage>> {
        if holding.is_shared() {
            return holding.known_as(info);
        }
        let its = look().filter(|its| its.id == info.id)?;
        self.resize(holding, &its);
        Some(self.share(holding, its.id))
    }

    /// The storage of `holding`, for another to use, too. Names it `id`.
    pub(super) fn share(&mut self, holding: &mut Holding, id: usize) -> Arc<Storage> {
        if let Some(storage) = &holding.shared {
            return storage.clone();
        }
        let memory = self.memory.split(std::mem::take(&mut holding.own_bytes));
        let storage = Arc::new(Storage { id, memory });
        holding.shared = Some(storage.clone());
        storage
    }

    /// A second name for all that `source` has.
    pub(super) fn alias(&mut self, source: &mut Holding, id: usize) -> Result<Holding, Refusal> {
        // What a holding has beside a shared storage is counted again.
        let own_bytes = match source.is_shared() {
            true => source.own_bytes,
            false => 0,
        };
        self.take(own_bytes + NAME_BYTES)?;
        Ok(Holding {
            own_bytes,
            shared: Some(self.share(source, id)),
        })
    }

    /// Makes `out`, for which memory of its own was taken, hold whatever it may use of
    /// `source` as well. For backends that do not say whether a view shares memory with
    /// its source: it may be a copy, or keep all of it.
    pub(super) fn view_of(&mut self, out: &mut Holding, source: &mut Holding, is_last_use: bool) {
        if is_last_use || source.is_shared() || out.own_bytes >= source.own_bytes {
            // One of the two storages is left in the end: the larger counts.
            let missing = source.own_bytes.saturating_sub(out.own_bytes);
            self.memory.take_beyond(missing);
            out.own_bytes += missing;
            out.shared.clone_from(&source.shared);
        } else {
            out.shared = Some(self.share(source, 0));
        }
    }

    /// Takes what one more tensor costs that has `fault` in the place of a value.
    pub(super) fn take_fault(&mut self, fault: &Arc<Fault>) -> Result<(), Refusal> {
        let cost = self.fault_cost(fault) + NAME_BYTES;
        if let Err(refusal) = self.take(cost) {
            if self.fault_bytes + cost > FAULT_RESERVE_BYTES {
                return Err(refusal);
            }
            self.memory.take_beyond(cost);
        }
        self.fault_bytes += cost;
        *self.faults.entry(address(fault)).or_default() += 1;
        Ok(())
    }

    /// Such a tensor is gone.
    pub(super) fn release_fault(&mut self, fault: &Arc<Fault>) {
        if let Some(names) = self.faults.get_mut(&address(fault)) {
            *names -= 1;
            if *names == 0 {
                self.faults.remove(&address(fault));
            }
        }
        let cost = self.fault_cost(fault) + NAME_BYTES;
        self.fault_bytes -= cost;
        self.memory.give_back(cost);
    }

    /// What a fault costs, once however many tensors have it.
    fn fault_cost(&self, fault: &Arc<Fault>) -> u64 {
        if self.faults.contains_key(&address(fault)) {
            return 0;
        }
        let texts = [&fault.op_name, &fault.worker, &fault.reason];
        let texts: usize = texts.iter().map(|text| text.capacity()).sum();
        (FAULT_BYTES + texts) as u64
    }
}

fn address(fault: &Arc<Fault>) -> usize {
    Arc::as_ptr(fault) as usize
}
