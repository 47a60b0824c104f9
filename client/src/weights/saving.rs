//! Copies the parameters of a module to the host.

use std::{collections::VecDeque, pin::Pin};

use burn::{
    backend::ExecutionError,
    module::{Module, ModuleMapper, ModuleVisitor, Param, Parameter},
    tensor::{Bool, Device, Float, Int, Tensor, TensorData},
};

use super::WeightsError;
use crate::{
    backend::block_on,
    data::{self, Kind},
};

/// Bytes that are requested before the first of them has arrived.
const MAX_REQUESTED_BYTES: usize = 64 << 20;

/// Parameters that are requested before the first of them has arrived.
const MAX_REQUESTED: usize = 128;

/// Returns a module whose parameters are those of `module` as they are saved, on the host.
///
/// # Errors
///
/// The first parameter that cannot be read.
pub(super) fn to_host<M: Module>(module: &M) -> Result<M, WeightsError> {
    let mut reader = Reader::default();
    module.visit(&mut reader);
    let values = reader.finish()?;
    let mut placer = Placer {
        values: values.into_iter(),
        host: Device::flex(),
        path: Vec::new(),
        failed: None,
    };
    let host = module.clone().map(&mut placer);
    match placer.failed {
        None => Ok(host),
        Some(parameter) => Err(WeightsError::Parameter {
            parameter,
            reason: "the module shows other parameters when it is mapped than when it is visited"
                .into(),
        }),
    }
}

type Reading = Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>>;

/// Reads the parameters of a module in order, many at a time.
#[derive(Default)]
struct Reader {
    path: Vec<String>,
    requested: VecDeque<Requested>,
    requested_bytes: usize,
    values: Vec<TensorData>,
    failed: Option<WeightsError>,
}

struct Requested {
    parameter: String,
    bytes: usize,
    reading: Reading,
}

impl Reader {
    fn request<const D: usize, K: Kind>(&mut self, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        if self.failed.is_some() {
            return;
        }
        let tensor = param.transform_for_save().val();
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        self.requested.push_back(Requested {
            parameter: self.path.join("."),
            bytes,
            reading: Box::pin(data::into_data_async(tensor)),
        });
        self.requested_bytes += bytes;
        while self.requested_bytes > MAX_REQUESTED_BYTES || self.requested.len() > MAX_REQUESTED {
            self.receive();
        }
    }

    /// Waits for the parameter that was requested first.
    fn receive(&mut self) {
        let Some(first) = self.requested.pop_front() else {
            return;
        };
        self.requested_bytes -= first.bytes;
        match block_on(first.reading) {
            Ok(data) => self.values.push(data),
            Err(e) => {
                self.failed.get_or_insert(WeightsError::Parameter {
                    parameter: first.parameter,
                    reason: e.reason().to_owned(),
                });
            }
        }
    }

    fn finish(mut self) -> Result<Vec<TensorData>, WeightsError> {
        while self.failed.is_none() && !self.requested.is_empty() {
            self.receive();
        }
        match self.failed {
            None => Ok(self.values),
            Some(error) => Err(error),
        }
    }
}

impl ModuleVisitor for Reader {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.request(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.request(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.request(param);
    }
}

/// Replaces the parameters of a module by tensors on the host, in order.
struct Placer {
    values: std::vec::IntoIter<TensorData>,
    host: Device,
    path: Vec<String>,
    /// The first parameter that the values do not fit.
    failed: Option<String>,
}

impl Placer {
    fn place<const D: usize, K: Kind>(&mut self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        let value = self
            .values
            .next()
            .filter(|data| data.shape().num_dims() == D);
        let Some(data) = value else {
            self.failed.get_or_insert_with(|| self.path.join("."));
            return param;
        };
        let dtype = data.dtype();
        let tensor = Tensor::from_data(data, (&self.host, dtype));
        Param::initialized(param.id, tensor)
    }
}

impl ModuleMapper for Placer {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Float>>,
    ) -> Param<Tensor<D, Float>> {
        self.place(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.place(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.place(param)
    }
}
