//! What leases use is counted, also while processes are killed.

use burn::tensor::{Device, Tensor};
use serde_json::Value;
use tensord_client::{Durability, Lease, LeaseRequest, Pool};
use tensord_testkit::{administrator::Administrator, cluster::Cluster};

const TENANTS: [&str; 2] = ["red", "blue"];

/// Makes a token of a tenant for its user, and returns a program's connection.
fn pool_of(administrator: &Administrator, tenant: &str) -> Pool {
    let user = format!("{tenant}-user");
    let url = administrator.create_token(&["--tenant", tenant, "--user", &user]);
    Pool::connect(&url).unwrap()
}

/// Has a device compute for some time.
pub(crate) fn work(device: &Device) {
    let factor = Tensor::<2>::ones([256, 256], device) / 256.0;
    let mut product = Tensor::<2>::ones([256, 256], device);
    for _ in 0..200 {
        product = product.matmul(factor.clone());
    }
    let sum = product.sum().into_scalar::<f32>();
    assert!((sum - 65536.0).abs() < 1.0, "{sum}");
}

pub(crate) fn usage(administrator: &Administrator, by: &str) -> Value {
    let text = administrator.run(&["usage", "--since", "1d", "--by", by, "--json"]);
    serde_json::from_str(&text).unwrap()
}

/// Returns the ops of a tenant's leases, as an account has them.
fn ops_of(administrator: &Administrator, tenant: &str) -> u64 {
    let sums = usage(administrator, "tenant");
    let mut rows = sums["rows"].as_array().unwrap().iter();
    let row = rows.find(|row| row["tenant"] == tenant);
    row.map_or(0, |row| row["ops"].as_u64().unwrap())
}

/// Returns the ops of a tenant's leases, as their workers have counted them.
fn ops_by_workers(pool: &Pool) -> u64 {
    let status = pool.status();
    let workers = status.iter().flat_map(|status| &status.workers);
    let devices = workers.flat_map(|worker| &worker.devices);
    devices.map(|device| device.ops_executed).sum()
}

/// Waits until the workers have released all devices, and so have reported all that was used.
pub(crate) fn wait_for_release(cluster: &Cluster) {
    let pool = cluster.pool();
    cluster.wait("the release of all devices", || {
        let status = pool.status();
        let workers = status.iter().flat_map(|status| &status.workers);
        let mut devices = workers.flat_map(|worker| &worker.devices);
        status.is_ok() && devices.all(|device| !device.leased && !device.ending)
    });
}

/// Checks that leases, all of which are released, have used what the devices have counted by themselves.
fn check_against_devices(sums: &Value) {
    assert!(agrees_with_devices(sums), "{sums:#}");
}

/// Returns whether leases have used what the devices have counted by themselves.
pub(crate) fn agrees_with_devices(sums: &Value) -> bool {
    let seconds = |value: &Value| value.as_f64().unwrap();
    let by_leases = seconds(&sums["total"]["busy_seconds"]);
    let by_devices = seconds(&sums["devices_busy_seconds"]);
    let excess = (by_leases - by_devices).abs() / by_devices;
    println!("{by_leases} s by leases, {by_devices} s by devices: {excess:e} apart");
    by_devices > 0.0 && excess <= 0.005
}

/// Checks that leases of whole devices have not used these for longer than they had them.
fn check_against_time(sums: &Value) {
    let seconds = |field: &str| sums["total"][field].as_f64().unwrap();
    assert!(
        seconds("device_seconds") >= seconds("busy_seconds"),
        "{sums:#}"
    );
}

#[test]
fn usage_is_neither_lost_nor_counted_twice_when_the_scheduler_is_killed() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let administrator = Administrator::of(&cluster);
    for tenant in TENANTS {
        administrator.run(&["tenant", "add", tenant]);
    }
    let pools = TENANTS.map(|tenant| pool_of(&administrator, tenant));
    let lease = |pool: &Pool| pool.lease(LeaseRequest::devices(1)).unwrap();
    let leases = pools.each_ref().map(lease);
    let work_on_all = || leases.iter().for_each(|it: &Lease| work(&it.devices()[0]));
    let is_counted = || {
        let mut tenants = TENANTS.iter().zip(&pools);
        tenants.all(|(tenant, pool)| {
            let ops = ops_by_workers(pool);
            ops > 0 && ops == ops_of(&administrator, tenant)
        })
    };
    work_on_all();
    cluster.wait("the first reports", is_counted);
    let before = TENANTS.map(|tenant| ops_of(&administrator, tenant));
    cluster.without_scheduler(|_| work_on_all());
    work_on_all();
    // All three times count, as far as drops of tensors do not come later.
    cluster.wait("the reports after the restart", || {
        let after = TENANTS.map(|tenant| ops_of(&administrator, tenant));
        before
            .iter()
            .zip(after)
            .all(|(before, after)| 2 * after >= 5 * before)
            && is_counted()
    });
    cluster.wait("snapshots of both leases to count", || {
        let sums = usage(&administrator, "tenant,kind");
        let rows = sums["rows"].as_array().unwrap().iter();
        rows.filter(|row| row["kind"] == "snapshots").count() == 2
    });
    drop(leases);
    wait_for_release(&cluster);
    let sums = usage(&administrator, "tenant,user,kind");
    check_against_devices(&sums);
    check_against_time(&sums);
    let rows = sums["rows"].as_array().unwrap();
    let (snapshots, rows): (Vec<_>, Vec<_>) =
        rows.iter().partition(|row| row["kind"] == "snapshots");
    assert_eq!((rows.len(), snapshots.len()), (2, 2), "{sums:#}");
    for row in rows {
        let tenant = row["tenant"].as_str().unwrap();
        assert_eq!(row["user"], format!("{tenant}-user"));
        assert_eq!(row["kind"], "flex");
        assert!(row["moved_bytes"].as_u64() > Some(0), "{row}");
        assert!(row["memory_gib_hours"].as_f64() > Some(0.0), "{row}");
    }
    // Another scheduler knows the same, and the workers' reports add nothing.
    cluster.restart_scheduler_with(&[]);
    cluster.wait_for_workers(2);
    assert_eq!(
        usage(&administrator, "tenant,user,kind")["total"],
        sums["total"]
    );
}

#[test]
fn snapshots_count_while_their_lease_runs_and_while_it_is_suspended() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let administrator = Administrator::of(&cluster);
    administrator.run(&["tenant", "add", "red"]);
    let pool = pool_of(&administrator, "red");
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let ones = Tensor::<1>::ones([1 << 20], &lease.devices()[0]);
    let counted = || {
        let sums = usage(&administrator, "tenant,kind");
        let mut rows = sums["rows"].as_array().unwrap().iter();
        let row = rows.find(|row| row["kind"] == "snapshots");
        row.map_or(0.0, |row| {
            assert_eq!(row["tenant"], "red");
            assert_eq!(row["device_seconds"], 0.0);
            row["memory_gib_hours"].as_f64().unwrap()
        })
    };
    assert_eq!(ones.clone().sum().into_scalar::<f32>(), (1 << 20) as f32);
    cluster.wait("snapshots to count", || counted() > 0.0);
    cluster.wait_for_copy(cluster.worker_of_lease().unwrap());
    administrator.suspend_running();
    cluster.wait("the process to end", || cluster.worker_of_lease().is_none());
    let before = counted();
    cluster.wait("snapshots of a suspended lease to count", || {
        // 4 MiB for a second.
        counted() > before + 1.0 / 256.0 / 3600.0
    });
}

/// What a process has used since its last report, a quarter of a second ago at most, is lost with it, by both
/// counts.
#[test]
fn killed_process_keeps_leases_and_devices_in_agreement() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::of(&cluster);
    let pool = cluster.pool();
    let request = LeaseRequest::devices(1).durable(Durability::Off);
    let lease = pool.lease(request).unwrap();
    work(&lease.devices()[0]);
    cluster.wait("a report", || ops_of(&administrator, "default") > 0);
    let counted = ops_of(&administrator, "default");
    let processes = cluster.workers[0].processes_of_leases();
    let id = processes.first().unwrap().to_string();
    let killed = std::process::Command::new("kill")
        .args(["-KILL", &id])
        .status();
    assert!(killed.unwrap().success());
    cluster.wait("the end of the process", || {
        cluster.workers[0].processes_of_leases().is_empty()
    });
    drop(lease);
    wait_for_release(&cluster);
    let sums = usage(&administrator, "lease");
    check_against_devices(&sums);
    check_against_time(&sums);
    assert!(ops_of(&administrator, "default") >= counted);
}

#[test]
fn usage_takes_an_administrator_and_known_columns() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::of(&cluster);
    let text = administrator.run(&["usage"]);
    assert!(
        text.starts_with("no lease has used a device since "),
        "{text}"
    );
    let text = administrator.run(&["usage", "--by", "day,lease", "--csv"]);
    let header = "day,lease,device_seconds,busy_seconds,memory_gib_hours,moved_bytes,ops\n";
    assert_eq!(text, header);
    let program = Administrator::with_url(cluster.client_url());
    let refused = program.try_run(&["usage"]).unwrap_err();
    assert!(refused.contains("needs a different token"), "{refused}");
    for (args, words) in [
        (
            ["--by", "device"],
            "\"device\" is no column of usage; choose from tenant, user, lease, kind, day",
        ),
        (
            ["--since", "yesterday"],
            "\"yesterday\" is neither a duration, such as 12h or 7d, nor a date, such as 2026-11-01",
        ),
        (
            ["--since", "2999-01-01"],
            "2999-01-01 is in the future; give the date of today or an earlier one, in UTC",
        ),
    ] {
        let refused = administrator
            .try_run(&[&["usage"], &args[..]].concat())
            .unwrap_err();
        assert!(refused.contains(words), "{refused}");
        assert_eq!(refused.lines().count(), 1, "{refused}");
    }
}
