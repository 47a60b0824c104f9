//! What a session's tensors cost: a storage is charged once, whatever the number of names
//! (tensor ids) that use it.
//!
//! A storage may have several users: a second name of a tensor, a slice that outlives its
//! tensor, a reply that the client has not acknowledged. The storage is charged once,
//! until its last user is gone. In addition, each name has a fixed cost, and each fault
//! costs its record and texts.
//!
//! If the backend reports which storage a tensor uses (see [`StorageInfo`]), that storage is
//! charged. Otherwise [`Account::view_of`] charges no less than a tensor may use.

use std::{collections::HashMap, mem::size_of, sync::Arc};

use tensord_backend::StorageInfo;
use tensord_proto::v1::Fault;

use super::{Refusal, out_of_memory};
use crate::memory::SessionMemory;

/// Bytes charged for a tensor in addition to its elements, whatever its rank: the
/// backend's handle with shape and strides, the storage's own records and the allocator's
/// rounding. These take 240 bytes for a matrix and 900 for the highest rank.
pub(crate) const NAME_BYTES: u64 = 1 << 10;

/// Bytes that a session's two hash tables, the dataflow table and the backend's, take for
/// each name. The charge follows the highest number of names so far, as the tables grow by
/// doubling and never shrink.
pub(super) const TABLE_BYTES: u64 = 704;

/// Number of names for which the tables are not charged. Beyond it, they are charged for as
/// many further names at a time: 5.5 MiB.
pub(super) const TABLE_NAMES: usize = 1 << 13;

/// Bytes that poisoned tensors may take while the device is full: an op that did not fit
/// leaves a fault that names the cause, and that fault must be kept.
const FAULT_RESERVE_BYTES: u64 = 1 << 20;

/// Bytes charged for a fault in addition to its texts: its record and its table entry.
const FAULT_BYTES: usize = size_of::<Fault>() + 64;

/// A storage that may have several users. Its memory is given back when the last one is
/// gone.
#[derive(Debug)]
pub(crate) struct Storage {
    /// The backend's id of the storage, or 0 if it is not known.
    id: usize,
    memory: SessionMemory,
}

impl Storage {
    /// Returns the backend's id of the storage, or 0 if it is not known.
    pub(crate) fn id(&self) -> usize {
        self.id
    }

    /// Returns the bytes that are charged for the storage.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

/// What one name holds of the account, in addition to its fixed cost.
#[derive(Debug, Default)]
pub(super) struct Holding {
    /// Bytes that are charged for this name alone.
    own_bytes: u64,
    shared: Option<Arc<Storage>>,
}

impl Holding {
    /// Creates a holding of `bytes` that were taken for one name alone.
    pub(super) fn own(bytes: u64) -> Self {
        Self {
            own_bytes: bytes,
            shared: None,
        }
    }

    /// Restores a holding from a snapshot.
    pub(super) fn restored(own_bytes: u64, shared: Option<Arc<Storage>>) -> Self {
        Self { own_bytes, shared }
    }

    /// Returns the bytes that are charged for this name alone, and the shared storage.
    pub(super) fn parts(&self) -> (u64, Option<&Arc<Storage>>) {
        (self.own_bytes, self.shared.as_ref())
    }

    /// Returns all bytes that the name keeps from being freed.
    pub(super) fn bytes(&self) -> u64 {
        let shared = self.shared.as_ref();
        self.own_bytes + shared.map_or(0, |storage| storage.memory.bytes())
    }

    /// Returns whether the storage may have other users.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Returns the shared storage, if it is known to be the one of `info`.
    fn matching_storage(&self, info: &StorageInfo) -> Option<Arc<Storage>> {
        // Both must match: a new storage may have the id of one that was freed.
        let is_it = |s: &&Arc<Storage>| s.id == info.id && s.memory.bytes() == info.bytes;
        self.shared.as_ref().filter(is_it).cloned()
    }
}

/// The device memory that a session's tensors hold.
#[derive(Debug)]
pub(super) struct Account {
    memory: SessionMemory,
    /// Number of names for which the tables are charged or free of charge.
    table_names: usize,
    /// Number of names that have each fault, by the fault's address.
    faults: HashMap<usize, usize>,
    /// Bytes charged for all poisoned names.
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

    /// Returns an empty account of the same device.
    pub(super) fn new_account(&self) -> SessionMemory {
        self.memory.new_account()
    }

    pub(super) fn take(&mut self, bytes: u64) -> Result<(), Refusal> {
        self.memory.take(bytes).map_err(out_of_memory)
    }

    /// Charges for tables with room for `names` names, as far as that is not charged yet.
    pub(super) fn make_room(&mut self, names: usize) -> Result<(), Refusal> {
        while names > self.table_names {
            self.take(TABLE_NAMES as u64 * TABLE_BYTES)?;
            self.table_names += TABLE_NAMES;
        }
        Ok(())
    }

    /// Gives back the cost of a removed name, and the bytes that it alone held.
    pub(super) fn release(&mut self, holding: &Holding) {
        self.memory.return_bytes(holding.own_bytes + NAME_BYTES);
    }

    /// Returns the number of names that fit in the tables without a further charge.
    pub(super) fn table_names(&self) -> usize {
        self.table_names
    }

    /// Creates a shared storage of `bytes`, with the backend's id `id`, for a snapshot's tensors.
    pub(super) fn restore_storage(
        &mut self,
        id: usize,
        bytes: u64,
    ) -> Result<Arc<Storage>, Refusal> {
        self.take(bytes)?;
        let memory = self.memory.split(bytes);
        Ok(Arc::new(Storage { id, memory }))
    }

    /// Takes over the bytes in `held`, which were taken for a tensor and its name.
    pub(super) fn merge(&mut self, held: SessionMemory) -> Holding {
        let bytes = self.memory.merge(held);
        Holding::own(bytes.saturating_sub(NAME_BYTES))
    }

    /// Charges `holding` for the storage of `info`, of which it is the only user.
    pub(super) fn resize(&mut self, holding: &mut Holding, info: &StorageInfo) {
        let (was, is) = (holding.own_bytes, info.bytes);
        if is > was {
            // Charged even over the capacity, as the backend has allocated it already.
            self.memory.take_over_capacity(is - was);
        } else {
            self.memory.return_bytes(was - is);
        }
        holding.own_bytes = is;
    }

    /// Makes `holding` a user of `storage`, and gives back the bytes taken for `holding` alone.
    pub(super) fn join(&mut self, holding: &mut Holding, storage: Arc<Storage>) {
        self.memory.return_bytes(holding.own_bytes);
        *holding = Holding {
            own_bytes: 0,
            shared: Some(storage),
        };
    }

    /// Returns the storage of `holding` for one more user, if it is the one of `info`.
    /// `lookup` returns the storage of the holding's tensor, if the backend reports it.
    pub(super) fn find(
        &mut self,
        holding: &mut Holding,
        info: &StorageInfo,
        lookup: impl FnOnce() -> Option<StorageInfo>,
    ) -> Option<Arc<Storage>> {
        if holding.is_shared() {
            return holding.matching_storage(info);
        }
        let its = lookup().filter(|its| its.id == info.id)?;
        self.resize(holding, &its);
        Some(self.share(holding, its.id))
    }

    /// Returns the storage of `holding` for one more user. A storage that was not shared
    /// gets the id `id`.
    pub(super) fn share(&mut self, holding: &mut Holding, id: usize) -> Arc<Storage> {
        if let Some(storage) = &holding.shared {
            return storage.clone();
        }
        let memory = self.memory.split(std::mem::take(&mut holding.own_bytes));
        let storage = Arc::new(Storage { id, memory });
        holding.shared = Some(storage.clone());
        storage
    }

    /// Creates the holding of a second name for the tensor of `source`.
    pub(super) fn alias(&mut self, source: &mut Holding, id: usize) -> Result<Holding, Refusal> {
        // Bytes that a holding has in addition to a shared storage are charged again.
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

    /// Makes `out`, for which memory of its own was taken, also hold what it may use of
    /// `source`, which the op consumed if `is_last_use` is true. For backends that do not
    /// report whether a view shares memory with its source: the view may be a copy, or keep
    /// all of the source's storage.
    pub(super) fn view_of(&mut self, out: &mut Holding, source: &mut Holding, is_last_use: bool) {
        if is_last_use || source.is_shared() || out.own_bytes >= source.own_bytes {
            // When `source` is gone, at most one of the two own storages is left, so `out` is
            // charged for the larger.
            let missing = source.own_bytes.saturating_sub(out.own_bytes);
            self.memory.take_over_capacity(missing);
            out.own_bytes += missing;
            out.shared.clone_from(&source.shared);
        } else {
            out.shared = Some(self.share(source, 0));
        }
    }

    /// Charges for one more tensor that is poisoned with `fault`.
    pub(super) fn take_fault(&mut self, fault: &Arc<Fault>) -> Result<(), Refusal> {
        let cost = self.fault_cost(fault) + NAME_BYTES;
        if let Err(refusal) = self.take(cost) {
            if self.fault_bytes + cost > FAULT_RESERVE_BYTES {
                return Err(refusal);
            }
            self.memory.take_over_capacity(cost);
        }
        self.fault_bytes += cost;
        *self.faults.entry(address(fault)).or_default() += 1;
        Ok(())
    }

    /// Gives back what a tensor cost that was poisoned with `fault`.
    pub(super) fn release_fault(&mut self, fault: &Arc<Fault>) {
        if let Some(names) = self.faults.get_mut(&address(fault)) {
            *names -= 1;
            if *names == 0 {
                self.faults.remove(&address(fault));
            }
        }
        let cost = self.fault_cost(fault) + NAME_BYTES;
        self.fault_bytes -= cost;
        self.memory.return_bytes(cost);
    }

    /// Returns the bytes to charge for a fault: 0 if it is charged already, as a fault is
    /// charged once for all tensors that have it.
    fn fault_cost(&self, fault: &Arc<Fault>) -> u64 {
        if self.faults.contains_key(&address(fault)) {
            return 0;
        }
        let texts = [&fault.op_name, &fault.worker, &fault.reason];
        let texts: usize = texts.iter().map(|text| text.len()).sum();
        (FAULT_BYTES + texts) as u64
    }
}

fn address(fault: &Arc<Fault>) -> usize {
    Arc::as_ptr(fault) as usize
}
