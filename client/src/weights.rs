//! Weights of models, from files onto leased devices and back.
//!
//! The files are those of `burn-store`: Safetensors, PyTorch's `.pt`, and burnpack (`.bpk`), in
//! which Burn saves its own records. `burn-store` alone works on leased devices, too, but then
//! Burn's remote client encodes all weights for a socket. The functions here move the bytes as
//! [`data`](crate::data) does. On any other device they have the same results, so a program can
//! use them throughout.
//!
//! ```no_run
//! # use burn::module::{Module, Param};
//! # use burn::tensor::{Device, Tensor};
//! # #[derive(Module, Debug)]
//! # struct Model { scale: Param<Tensor<1>> }
//! # impl Model {
//! #     fn new(device: &Device) -> Self {
//! #         Self { scale: Param::from_tensor(Tensor::ones([8], device)) }
//! #     }
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tensord_client::{LeaseRequest, Pool, weights};
//!
//! let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
//! let mut model = Model::new(&lease.devices()[0]);
//! weights::load(&mut model, "pretrained.safetensors")?;
//! // … train …
//! weights::save(&model, "finetuned.safetensors")?;
//! # Ok(()) }
//! ```
//!
//! A store with settings, such as a filter or other names, is loaded by [`load_from`] and
//! written by [`save_into`]:
//!
//! ```no_run
//! # use burn::module::Module;
//! use tensord_client::weights::{self, WeightsError, burn_store::PytorchStore};
//!
//! fn load_encoder(model: &mut impl Module) -> Result<(), WeightsError> {
//!     let mut store = PytorchStore::from_file("checkpoint.pt")
//!         .with_top_level_key("model_state_dict")
//!         .with_key_remapping(r"^backbone\.", "encoder.")
//!         .allow_partial(true);
//!     weights::load_from(model, &mut store)?;
//!     Ok(())
//! }
//! ```
//!
//! This module needs the feature `store`.

mod error;
mod loading;
mod saving;

use std::path::Path;

use burn::module::Module;
/// The crate with the stores, in the version that this module uses.
pub use burn_store;
use burn_store::{
    ApplyResult, BurnpackStore, ModuleSnapshot, ModuleStore, PytorchStore, SafetensorsStore,
};

pub use self::error::{WeightsError, WeightsMismatch};
use self::loading::OnHost;

/// The formats of files, by extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Safetensors,
    Pytorch,
    Burnpack,
}

impl Format {
    fn of(path: &Path) -> Result<Self, WeightsError> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let extension = extension.unwrap_or_default();
        match extension.to_ascii_lowercase().as_str() {
            "safetensors" => Ok(Self::Safetensors),
            "pt" | "pth" => Ok(Self::Pytorch),
            "bpk" => Ok(Self::Burnpack),
            _ => Err(WeightsError::UnknownFormat {
                path: path.to_owned(),
                extension: extension.to_owned(),
            }),
        }
    }
}

/// Loads the weights in a file into `module`, onto the devices that its parameters are on. The
/// format depends on the extension: `.safetensors`, `.pt` or `.pth`, or `.bpk`, which is what
/// `Module::save_file` writes. The weights of linear layers in a PyTorch file are transposed, as
/// Burn has them.
///
/// The file must have every parameter of the module, in its shape. The result names what the
/// file has in addition, in `unused`. A parameter gets the element type that the file has.
/// Parameters that were not used yet are not initialised first, so nothing is computed for them.
///
/// A Safetensors file that PyTorch has written needs [`load_from`], with
/// `SafetensorsStore::from_file(path).with_from_adapter(PyTorchToBurnAdapter)`: here its square linear
/// layers would load transposed, without an error.
///
/// Returns when the weights are queued, as [`data::from_data`](crate::data::from_data) does. It reads one
/// tensor at a time from the file; what the module has stays on its device until everything is loaded.
/// A fault of the device is reported by the first read. Quantized weights are refused on every device.
///
/// # Errors
///
/// A [`WeightsError`] that names the file, and each parameter that does not fit. The module is
/// then as it was.
pub fn load<M: Module>(
    module: &mut M,
    path: impl AsRef<Path>,
) -> Result<ApplyResult, WeightsError> {
    let path = path.as_ref();
    let origin = path.display().to_string();
    // The stores check nothing: their errors have less than `WeightsMismatch`.
    match Format::of(path)? {
        Format::Safetensors => {
            let store = SafetensorsStore::from_file(path);
            load_all(
                module,
                &mut store.validate(false).allow_partial(true),
                origin,
            )
        }
        Format::Pytorch => {
            let store = PytorchStore::from_file(path);
            load_all(
                module,
                &mut store.validate(false).allow_partial(true),
                origin,
            )
        }
        Format::Burnpack => {
            let store = BurnpackStore::from_file(path);
            load_all(
                module,
                &mut store.validate(false).allow_partial(true),
                origin,
            )
        }
    }
}

/// As [`load`], from a store that the caller has set up. The store decides whether parameters
/// may be missing.
///
/// # Errors
///
/// The store's error, and as [`load`]. The module is then as it was.
pub fn load_from<M: Module, S: ModuleStore>(
    module: &mut M,
    store: &mut S,
) -> Result<ApplyResult, WeightsError> {
    let (loaded, result) = apply(module, store, "the store".to_owned())?;
    *module = loaded;
    Ok(result)
}

/// Saves the weights of `module` into a file, in the format of its extension: `.safetensors`,
/// or `.bpk`, which `Module::load_file` reads. An existing file is replaced once
/// the new one is complete.
///
/// Reads all parameters before anything is written; they are in host memory together.
///
/// # Errors
///
/// A [`WeightsError`] that names the file, or the parameter that could not be read.
pub fn save<M: Module>(module: &M, path: impl AsRef<Path>) -> Result<(), WeightsError> {
    let path = path.as_ref();
    let format = Format::of(path)?;
    let target = path.display().to_string();
    match format {
        Format::Safetensors => {
            let host = saving::to_host(module)?;
            let store = SafetensorsStore::from_file(path);
            collect(&host, &mut store.overwrite(true), target)
        }
        Format::Burnpack => {
            let host = saving::to_host(module)?;
            let store = BurnpackStore::from_file(path);
            collect(&host, &mut store.overwrite(true), target)
        }
        Format::Pytorch => Err(WeightsError::LoadOnly {
            path: path.to_owned(),
        }),
    }
}

/// As [`save`], into a store that the caller has set up. All parameters are read, also those
/// that a filter of the store leaves out.
///
/// # Errors
///
/// The store's error, or the parameter that could not be read.
pub fn save_into<M: Module, S: ModuleStore>(module: &M, store: &mut S) -> Result<(), WeightsError> {
    collect(&saving::to_host(module)?, store, "the store".to_owned())
}

/// Loads from a store that accepts everything, and accepts no parameter that is missing or does
/// not fit.
fn load_all<M: Module, S: ModuleStore>(
    module: &mut M,
    store: &mut S,
    origin: String,
) -> Result<ApplyResult, WeightsError> {
    let (loaded, result) = apply(module, store, origin.clone())?;
    if result.errors.is_empty() && result.missing.is_empty() {
        *module = loaded;
        return Ok(result);
    }
    let mismatch = WeightsMismatch::from(result);
    Err(WeightsError::Mismatch { origin, mismatch })
}

/// Returns `module` with the weights that the store has.
fn apply<M: Module, S: ModuleStore>(
    module: &M,
    store: &mut S,
    origin: String,
) -> Result<(M, ApplyResult), WeightsError> {
    // Cloned parameters share their tensors.
    let mut host = OnHost::new(module.clone());
    let result = store.apply_to(&mut host);
    let module = host.finish()?;
    let reason = |e: S::Error| WeightsError::Load {
        origin,
        reason: e.to_string(),
    };
    Ok((module, result.map_err(reason)?))
}

fn collect<M: Module, S: ModuleStore>(
    host: &M,
    store: &mut S,
    target: String,
) -> Result<(), WeightsError> {
    let saved = host.save_into(store);
    saved.map_err(|e| WeightsError::Save {
        target,
        reason: e.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_determines_the_format() {
        let table = [
            ("a/model.safetensors", Format::Safetensors),
            ("MODEL.SafeTensors", Format::Safetensors),
            ("model.pt", Format::Pytorch),
            ("model.v2.pth", Format::Pytorch),
            ("model.bpk", Format::Burnpack),
        ];
        for (path, format) in table {
            assert_eq!(Format::of(Path::new(path)).unwrap(), format, "{path}");
        }
        for (path, extension) in [("model.onnx", "\"onnx\""), ("model", "\"\"")] {
            let error = Format::of(Path::new(path)).unwrap_err().to_string();
            assert!(error.contains(path), "{error}");
            assert!(error.contains(extension), "{error}");
            assert!(error.contains(".safetensors"), "{error}");
        }
    }
}
