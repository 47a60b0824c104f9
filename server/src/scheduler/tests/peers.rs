//! Clients and workers that tests play, each with its stream to the scheduler.

use super::*;

/// A client's stream.
#[derive(Debug)]
pub(super) struct TestClient {
    pub(super) outbound: mpsc::Sender<ClientMessage>,
    pub(super) inbound: Streaming<PoolMessage>,
    pub(super) hello: PoolHello,
}

impl TestClient {
    pub(super) async fn send(&self, body: client_message::Body) {
        self.outbound
            .send(ClientMessage { body: Some(body) })
            .await
            .unwrap();
    }

    pub(super) async fn request(&self, request_id: u64, devices: u32) {
        let request = LeaseRequest {
            request_id,
            devices,
            ..LeaseRequest::default()
        };
        self.send(client_message::Body::Request(request)).await;
    }

    pub(super) async fn release(&self, lease: &Granted) {
        let lease_id = lease.lease_id;
        self.send(client_message::Body::Release(ReleaseLease { lease_id }))
            .await;
    }

    /// Ends the outgoing stream and waits for the other end, so that earlier messages are
    /// handled.
    pub(super) async fn close(mut self) {
        drop(self.outbound);
        while let Ok(Some(_)) = with_timeout("end", self.inbound.message()).await {}
    }

    /// Returns the next message that is neither a beat nor a renewed token.
    pub(super) async fn recv(&mut self) -> Result<pool_message::Body, Status> {
        with_timeout("message but beats", async {
            loop {
                match self.recv_any().await? {
                    Some(pool_message::Body::Beat(_) | pool_message::Body::Renewed(_)) => {}
                    Some(body) => return Ok(body),
                    None => panic!("the stream ended"),
                }
            }
        })
        .await
    }

    /// Returns the next message, or `None` at the end of the stream.
    pub(super) async fn recv_any(&mut self) -> Result<Option<pool_message::Body>, Status> {
        let message = with_timeout("message", self.inbound.message()).await?;
        Ok(message.map(|message| message.body.expect("no message is empty")))
    }

    pub(super) async fn granted(&mut self) -> Granted {
        match self.recv().await.unwrap() {
            pool_message::Body::Granted(granted) => granted,
            other => panic!("{other:?} is no grant"),
        }
    }

    /// Returns the next renewed token of a lease.
    pub(super) async fn renewed(&mut self, lease: u64) -> bytes::Bytes {
        loop {
            match self.recv_any().await.unwrap() {
                Some(pool_message::Body::Beat(_)) => {}
                Some(pool_message::Body::Renewed(renewed)) if renewed.lease_id == lease => {
                    return renewed.token;
                }
                other => panic!("{other:?} is no token of lease {lease}"),
            }
        }
    }

    /// Returns the queue position from the next message, which must be about this request.
    pub(super) async fn queued(&mut self, request: u64) -> u32 {
        match self.recv().await.unwrap() {
            pool_message::Body::Queued(queued) if queued.request_id == request => queued.position,
            other => panic!("{other:?} is no position of request {request}"),
        }
    }

    /// Returns the error from the next message, which must refuse this request.
    pub(super) async fn refused(&mut self, request: u64) -> Error {
        match self.recv().await.unwrap() {
            pool_message::Body::Refused(refused) if refused.request_id == request => {
                refused.error.unwrap()
            }
            other => panic!("{other:?} is no refusal of request {request}"),
        }
    }

    /// Returns the error from the next message, which must end this lease.
    pub(super) async fn ended(&mut self, lease: u64) -> Error {
        match self.recv().await.unwrap() {
            pool_message::Body::Ended(ended) if ended.lease_id == lease => ended.error.unwrap(),
            other => panic!("{other:?} is no end of lease {lease}"),
        }
    }

    /// Returns the error with which the scheduler ends the stream.
    pub(super) async fn recv_stream_error(&mut self) -> Error {
        let status = self.recv().await.unwrap_err();
        grpc_status::error(&status).unwrap_or_else(|| panic!("{status:?} carries no error of ours"))
    }
}

/// A worker's stream.
#[derive(Debug)]
pub(super) struct TestWorker {
    pub(super) outbound: mpsc::Sender<WorkerMessage>,
    pub(super) inbound: Streaming<WorkerCommand>,
    pub(super) registered: Registered,
}

impl TestWorker {
    pub(super) async fn send(&self, body: worker_message::Body) {
        self.outbound
            .send(WorkerMessage { body: Some(body) })
            .await
            .unwrap();
    }

    /// Returns the next command that is neither the time nor a grant.
    pub(super) async fn recv(&mut self) -> Result<worker_command::Body, Status> {
        loop {
            match self.recv_any().await? {
                worker_command::Body::Time(_) | worker_command::Body::Granted(_) => {}
                body => return Ok(body),
            }
        }
    }

    pub(super) async fn recv_any(&mut self) -> Result<worker_command::Body, Status> {
        let command = with_timeout("command", self.inbound.message()).await?;
        Ok(command
            .and_then(|command| command.body)
            .expect("no end, and no empty command"))
    }

    /// Ends the outgoing stream and waits for the other end, so that earlier messages are
    /// handled.
    pub(super) async fn close(mut self) {
        drop(self.outbound);
        while let Ok(Some(_)) = with_timeout("end", self.inbound.message()).await {}
    }

    /// Waits for the command to end a lease, reports the lease as released, and returns its
    /// id.
    pub(super) async fn end_lease(&mut self) -> u64 {
        let lease_id = self.recv_end_lease().await;
        self.released(lease_id, &[]).await;
        lease_id
    }

    /// Waits for the command to end a lease and returns the lease's id.
    pub(super) async fn recv_end_lease(&mut self) -> u64 {
        match self.recv().await.unwrap() {
            worker_command::Body::EndLease(end) => end.lease_id,
            other => panic!("{other:?} ends no lease"),
        }
    }

    /// Reports that a lease has left all devices but the busy ones.
    pub(super) async fn released(&self, lease_id: u64, busy: &[u32]) {
        let released = Released {
            lease_id,
            busy_devices: busy.to_vec(),
        };
        self.send(worker_message::Body::Released(released)).await;
    }
}
