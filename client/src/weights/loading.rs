//! Lets stores load into a module as if its parameters were on the host.
//!
//! A store makes tensors of its bytes on the device of the parameter, by Burn's
//! `Tensor::from_data`. So it gets, for each parameter, a placeholder of the same shape on a
//! local device, and what it loads into the placeholder is then uploaded by
//! [`data::from_data`]. All that stores can do (filters, names, adapters) stays theirs.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

use burn::{
    module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, Parameter},
    tensor::{Bool, DType, Device, Int, Tensor},
};

use super::WeightsError;
use crate::data::{self, Kind};

/// A module into which a store can load, parameter by parameter.
#[derive(Debug, Clone)]
pub(super) struct OnHost<M> {
    module: M,
    failed: Option<FailedParameter>,
}

/// The first parameter that could not be uploaded, and why.
#[derive(Debug, Clone)]
struct FailedParameter {
    parameter: String,
    reason: String,
}

impl<M> OnHost<M> {
    pub(super) fn new(module: M) -> Self {
        Self {
            module,
            failed: None,
        }
    }

    /// Returns the module, or an error if a parameter was loaded and could not be uploaded.
    pub(super) fn finish(self) -> Result<M, WeightsError> {
        match self.failed {
            None => Ok(self.module),
            Some(FailedParameter { parameter, reason }) => {
                Err(WeightsError::Parameter { parameter, reason })
            }
        }
    }

    fn with(self, change: impl FnOnce(M) -> M) -> Self {
        Self {
            module: change(self.module),
            failed: self.failed,
        }
    }
}

impl<M: Module> Module for OnHost<M> {
    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        let mut uploader = Uploader {
            store: mapper,
            host: Device::flex(),
            path: Vec::new(),
            failed: self.failed,
        };
        Self {
            module: self.module.map(&mut uploader),
            failed: uploader.failed,
        }
    }

    fn visit<Visitor: ModuleVisitor>(&self, visitor: &mut Visitor) {
        self.module.visit(visitor);
    }

    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|module| module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|module| module.to_device(device))
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }

    fn valid(&self) -> Self {
        self.clone().with(|module| module.valid())
    }

    fn materialize(self) -> Self {
        self.with(Module::materialize)
    }
}

/// Has the store load each parameter on the host, and uploads what it has loaded.
struct Uploader<'a, Mapper> {
    store: &'a mut Mapper,
    host: Device,
    path: Vec<String>,
    failed: Option<FailedParameter>,
}

impl<Mapper> Uploader<'_, Mapper> {
    /// A parameter on the host that is initialised only if the store loads it.
    fn placeholder<const D: usize, K: Kind>(
        &self,
        param: &Param<Tensor<D, K>>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        let shape = param.lazy_shape();
        let dims = shape.clone();
        let init = move |device: &Device, _| Tensor::empty(dims, device);
        Param::uninitialized(param.id, init, self.host.clone(), false, shape)
    }

    /// Returns `param` with what the store has loaded into its placeholder, if it has.
    fn upload<const D: usize, K: Kind>(
        &mut self,
        param: Param<Tensor<D, K>>,
        loaded: Param<Tensor<D, K>>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        if !loaded.is_initialized() || self.failed.is_some() {
            return param;
        }
        let target = param.clone();
        let upload = move || -> Result<Param<Tensor<D, K>>, String> {
            let (id, tensor, _) = loaded.consume();
            let data = tensor.try_into_data().map_err(|e| e.to_string())?;
            let dtype = data.dtype();
            if let DType::QFloat(_) = dtype {
                return Err(
                    "it is quantized; load it with burn-store on a device that is not remote"
                        .into(),
                );
            }
            let tensor = data::from_data(data, (&target.lazy_device(), dtype));
            Ok(target.transform_for_load(tensor, id))
        };
        // A panic here would have the store abort the process.
        let uploaded = catch_unwind(AssertUnwindSafe(upload));
        match uploaded.unwrap_or_else(|panic| Err(panic_text(&*panic))) {
            Ok(uploaded) => uploaded,
            Err(reason) => {
                let parameter = self.path.join(".");
                self.failed = Some(FailedParameter { parameter, reason });
                param
            }
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

macro_rules! map {
    ($map:ident, $kind:ty) => {
        fn $map<const D: usize>(
            &mut self,
            param: Param<Tensor<D, $kind>>,
        ) -> Param<Tensor<D, $kind>> {
            let placeholder = self.placeholder(&param);
            let loaded = self.store.$map(placeholder);
            self.upload(param, loaded)
        }
    };
}

impl<Mapper: ModuleMapper> ModuleMapper for Uploader<'_, Mapper> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push(name.to_owned());
        self.store.enter_module(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.path.pop();
        self.store.exit_module(name, container_type);
    }

    map!(map_float, burn::tensor::Float);
    map!(map_int, Int);
    map!(map_bool, Bool);

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.store.map_flag(flag)
    }
}
