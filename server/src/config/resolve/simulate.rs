//! The settings of `tensord simulate`.

use std::path::Path;

use tensord_scheduler::{Policy, RequestOrder, TenantLimit};

use super::{half_life, reserve_after};
use crate::{
    cli::{Order, SimulateArgs, SimulateCommand},
    config::{
        ConfigError, SimulateConfig, SimulationConfig, TenantChange, pool_file,
        values::{Kinds, Name, Period},
    },
    scheduler,
    simulate::generator::Recipe,
};

/// The error if a setting is missing that the command line requires.
const NO_TRACE: &str = "simulate: a trace and --pool are required";

pub(super) fn run(args: SimulateArgs) -> Result<SimulateConfig, ConfigError> {
    let (Some(trace), Some(pool)) = (args.trace, args.pool) else {
        return Err(ConfigError::Missing(NO_TRACE));
    };
    let orders = args.order.into_iter().map(|order| match order {
        Order::Fair => RequestOrder::Fair,
        Order::Backfill => RequestOrder::Backfill,
        Order::Fifo => RequestOrder::Fifo,
    });
    let Period(release) = args.release;
    let policy = args.policy.map(|path| policy(&path)).transpose()?;
    Ok(SimulateConfig::Run(SimulationConfig {
        trace,
        pool,
        policy: policy.unwrap_or_default(),
        orders: orders.collect(),
        half_life: half_life(args.half_life),
        reserve_after: reserve_after(args.reserve_after),
        release,
        svg: args.svg,
        json: args.json,
    }))
}

pub(super) fn generate(command: SimulateCommand) -> SimulateConfig {
    let SimulateCommand::Generate {
        load,
        seed,
        jobs,
        tenants,
        devices,
        demand,
        duration: Period(duration),
        share,
        kind,
    } = command;
    SimulateConfig::Generate(Recipe {
        load,
        seed,
        jobs: jobs as usize,
        tenants,
        devices,
        demand,
        // At least the least duration of a job.
        duration: duration.as_secs_f64().max(0.001),
        sharing: share,
        kind: kind.map(|Name(kind)| kind),
    })
}

/// Reads the tenants of the file at `path`, which must be tenants that a pool could have.
fn policy(path: &Path) -> Result<Policy, ConfigError> {
    let tenants = pool_file::read(path)?.into_iter().map(|tenant| {
        let TenantChange {
            name,
            weight,
            guaranteed,
            limit,
        } = tenant;
        let change = scheduler::TenantChange {
            weight,
            guaranteed: guaranteed.map(|Kinds(kinds)| kinds),
            limit: limit.map(|limit| TenantLimit {
                devices: limit.kinds,
                memory_bytes: limit.memory_bytes,
            }),
        };
        (name, change)
    });
    scheduler::policy_of(tenants).map_err(|(tenant, source)| ConfigError::Tenant {
        path: path.into(),
        tenant,
        source,
    })
}
