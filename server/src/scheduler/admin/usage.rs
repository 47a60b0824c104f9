//! Sums up what leases have used.

use std::collections::BTreeSet;

use tensord_proto::v1::{Error, ErrorCode, SumUsageRequest, UsageColumn, UsageSums};
use tonic::{Request, Status};

use super::protocol_error;
use crate::{
    grpc_status,
    scheduler::{
        access::UnixMillis,
        service::Service,
        usage::{Query, UsageError},
    },
};

impl Service {
    /// Sums up usage by the columns of the request.
    pub(super) async fn sum_up(
        &self,
        request: Request<SumUsageRequest>,
    ) -> Result<UsageSums, Status> {
        self.0.admit_admin(&request)?;
        let request = request.into_inner();
        let by = request.by.iter().map(|column| column_of(*column));
        let query = Query {
            since: UnixMillis(request.since_ms),
            by: by.collect::<Result<BTreeSet<_>, _>>()?,
        };
        let Some(usage) = &self.0.usage else {
            return Err(protocol_error("this scheduler keeps no usage"));
        };
        let totals = usage.sum(query).await.map_err(|e| refused(&e))?;
        Ok(totals.into_reply(UnixMillis::now()))
    }
}

fn column_of(column: i32) -> Result<UsageColumn, Status> {
    let known = UsageColumn::try_from(column).ok();
    let known = known.filter(|column| *column != UsageColumn::Unspecified);
    known.ok_or_else(|| {
        protocol_error("this scheduler does not know one of the columns; update it to sum up by it")
    })
}

fn refused(error: &UsageError) -> Status {
    let code = match error {
        UsageError::Busy => ErrorCode::Limit,
        UsageError::Unreadable(_) => ErrorCode::Internal,
        UsageError::Stopping => ErrorCode::Draining,
    };
    grpc_status::status(&Error::new(code, error.to_string()))
}
