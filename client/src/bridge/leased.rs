//! The [`Exchange`] of each leased device, by Burn's id of the device.

use std::sync::{Arc, LazyLock};

use burn::{backend::DispatchDevice, tensor::Device};
use burn_std::device::{Device as _, DeviceId};
use dashmap::DashMap;

use super::exchange::Exchange;

static EXCHANGES: LazyLock<DashMap<DeviceId, Arc<Exchange>>> = LazyLock::new(DashMap::new);

/// Returns the exchange of `device`, if `device` is leased.
pub(crate) fn leased(device: &Device) -> Option<Arc<Exchange>> {
    let DispatchDevice::Remote(remote) = device.as_dispatch() else {
        return None;
    };
    Some(EXCHANGES.get(&remote.to_id())?.clone())
}

/// Makes tensors on `device` use `exchange`; `None` removes the device's exchange.
pub(super) fn set_exchange(device: &Device, exchange: Option<&Arc<Exchange>>) {
    let DispatchDevice::Remote(remote) = device.as_dispatch() else {
        return;
    };
    match exchange {
        Some(exchange) => {
            exchange.set_burn(remote, device);
            EXCHANGES.insert(remote.to_id(), exchange.clone());
        }
        None => drop(EXCHANGES.remove(&remote.to_id())),
    }
}
