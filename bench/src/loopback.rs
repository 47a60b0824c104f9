//! Burn's remote client and its server, both in this process: the part of tensord's path
//! that comes before any data goes to a worker.
//!
//! Reads are requested as tensord does: the tensors of several reads are the inputs of one
//! custom op, and their values come back in memory. Here the op's implementation has the
//! values at once, so the measured time is Burn's own path between the two.
//!
//! Ops go to a server that [discards them](crate::discard), in batches of the size that
//! tensord configures for Burn's client.

use std::{
    net::TcpListener,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, Result};
use burn::{
    backend::{DispatchDevice, Remote, tensor::FloatTensor},
    remote::CustomOpClient,
    tensor::{Device, Tensor, TensorData},
};
use burn_backend::{ExecutionError, ops::FloatTensorOps};
use burn_flex::{Flex, FlexDevice};
use burn_ir::{BackendIr, CustomOpIr, HandleContainer};
use burn_remote::server::{BackendServer, WebSocketTransport};
use burn_std::{config::BurnConfig, future::block_on};
use tokio::{runtime::Runtime, sync::oneshot};

use crate::{
    data::{self, Upload},
    discard::{Discard, DiscardDevice},
    remote::websocket_device_with,
};

/// Number of ops that tensord's client lets Burn's client send at once.
const BATCH_OPS: usize = 64;

/// The id of the custom op.
const READ: &str = "read";

/// The sender that completes one read.
type ReplySender = oneshot::Sender<Result<TensorData, ExecutionError>>;

/// The senders for the next op, in the order of its inputs.
type PendingReplies = Arc<Mutex<Vec<ReplySender>>>;

/// A device of a server in this process, and a tensor on it.
pub(crate) struct Loopback {
    client: CustomOpClient,
    device: Device,
    tensor: Tensor<1>,
    pending_replies: PendingReplies,
}

impl Loopback {
    /// Starts the server on `runtime`, where it runs until the runtime ends.
    ///
    /// # Errors
    ///
    /// If the server does not start.
    pub(crate) fn start(runtime: &Runtime, data: TensorData) -> Result<Self> {
        let pending_replies = PendingReplies::default();
        let waiting = pending_replies.clone();
        let server = BackendServer::<Flex>::new([FlexDevice])
            .with_custom_op(READ, move |tensors, op, _| {
                reply_to_reads(&waiting, tensors, op)
            });
        let device = serve(runtime, &server, BurnConfig::default())?;
        let DispatchDevice::Remote(remote) = device.as_dispatch() else {
            anyhow::bail!("a remote host has a device of another kind");
        };
        Ok(Self {
            client: CustomOpClient::new(remote),
            tensor: data::from_data(data, &device, Upload::Plain),
            device,
            pending_replies,
        })
    }

    /// Reads the tensor `count` times in one request.
    ///
    /// # Errors
    ///
    /// If the server fails.
    pub(crate) fn read(&self, count: usize) -> Result<()> {
        let (pending_replies, answered): (Vec<_>, Vec<_>) =
            (0..count).map(|_| oneshot::channel()).unzip();
        let inputs = (0..count).map(|_| Ok(self.handle()?.into_ir()));
        let inputs = inputs.collect::<Result<_>>()?;
        *self
            .pending_replies
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = pending_replies;
        self.client.register(CustomOpIr {
            id: READ.to_owned(),
            inputs,
            outputs: Vec::new(),
            scalars: Vec::new(),
        });
        self.device.flush().context("cannot send a read")?;
        for answer in answered {
            block_on(answer).context("the peer did not answer a read")??;
        }
        Ok(())
    }

    fn handle(&self) -> Result<FloatTensor<Remote>> {
        let primitive = self.tensor.clone().try_into_primitive::<Remote>();
        primitive.map_err(|e| anyhow::anyhow!("cannot get the remote tensor: {e:?}"))
    }
}

/// Starts a server in this process that computes nothing, and returns its device.
///
/// # Errors
///
/// If the server does not start.
pub(crate) fn discard(runtime: &Runtime) -> Result<Device> {
    let mut config = serde_json::to_value(BurnConfig::default())?;
    config["remote"]["flush_threshold"] = BATCH_OPS.into();
    let server = BackendServer::<Discard>::new([DiscardDevice::SameThread]);
    serve(runtime, &server, serde_json::from_value(config)?)
}

/// Runs `server` on `runtime`, and connects to it with Burn's configuration `config`.
fn serve<B: BackendIr>(
    runtime: &Runtime,
    server: &BackendServer<B>,
    config: BurnConfig,
) -> Result<Device> {
    let listener = TcpListener::bind("127.0.0.1:0").context("cannot bind a loopback port")?;
    let address = listener.local_addr()?;
    runtime.spawn(server.serve_async(WebSocketTransport::from_listener(listener)));
    websocket_device_with(&address.to_string(), config)
}

/// Executes the custom op. Completes the last read first, so that a reader that waits for
/// the reads in order is woken once.
fn reply_to_reads(
    pending_replies: &PendingReplies,
    tensors: &mut HandleContainer<<Flex as BackendIr>::Handle>,
    op: &CustomOpIr,
) {
    let pending_replies = std::mem::take(
        &mut *pending_replies
            .lock()
            .unwrap_or_else(PoisonError::into_inner),
    );
    for (tensor, answer) in op.inputs.iter().zip(pending_replies).rev() {
        let tensor = tensors.get_float_tensor::<Flex>(tensor);
        // If the reader is gone, it has already failed with an error of its own.
        let _ = answer.send(block_on(Flex::float_into_data(tensor)));
    }
}
