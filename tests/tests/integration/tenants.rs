//! Tenants: their limits, guarantees and shares, as programs and administrators meet them.

use std::{
    sync::mpsc,
    thread::{Scope, ScopedJoinHandle, scope},
    time::Duration,
};

use serde_json::{Value, json};
use tensord_client::{Durability, Lease, LeaseError, LeaseRequest, Pool, RefusalKind};
use tensord_testkit::{administrator::Administrator, cluster::Cluster};

/// Makes a token of a tenant for a program, and returns the program's connection.
pub(crate) fn pool_of(administrator: &Administrator, tenant: &str) -> Pool {
    let url = administrator.create_token(&["--tenant", tenant]);
    Pool::connect(&url).unwrap()
}

fn shown(administrator: &Administrator, tenant: &str) -> Value {
    let shown = administrator.run(&["tenant", "show", tenant, "--json"]);
    serde_json::from_str(&shown).unwrap()
}

/// Requests a device in a thread of its own, which sends `name` once it has it.
fn wait_for_device<'scope>(
    scope: &'scope Scope<'scope, '_>,
    pool: &'scope Pool,
    name: &'static str,
    granted: &mpsc::Sender<&'static str>,
) -> ScopedJoinHandle<'scope, Lease> {
    let granted = granted.clone();
    scope.spawn(move || {
        let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
        granted.send(name).unwrap();
        lease
    })
}

fn waiting(administrator: &Administrator) -> Vec<Value> {
    let listed = administrator.run(&["queue", "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    listed["waiting"].as_array().unwrap().clone()
}

#[test]
fn a_tenant_waits_at_its_limit_until_it_is_raised() {
    let cluster = Cluster::start(&["flex*3"]);
    let administrator = Administrator::of(&cluster);
    let text = administrator.run(&["tenant", "add", "red", "--limit", "flex=1"]);
    assert!(text.starts_with("tenant red\n  weight     1\n"), "{text}");
    let pool = pool_of(&administrator, "red");
    let first = pool.lease(LeaseRequest::devices(1)).unwrap();
    let refused = pool.lease(LeaseRequest::devices(2)).unwrap_err();
    let words = "requested 2 devices of any kind; the limit of the tenant is 1 flex";
    assert!(refused.to_string().contains(words), "{refused}");
    scope(|scope| {
        let (granted, grants) = mpsc::channel();
        let second = wait_for_device(scope, &pool, "second", &granted);
        administrator.wait("the request", || !waiting(&administrator).is_empty());
        let request = waiting(&administrator).remove(0);
        assert_eq!(request["at_limit"], true);
        assert_eq!(request["needs"][0]["free"], 2);
        let why = administrator.run(&["why", request["id"].as_str().unwrap()]);
        assert!(
            why.contains("its tenant would have more than its limit"),
            "{why}"
        );
        let red = shown(&administrator, "red");
        assert_eq!((&red["leases"], &red["waiting"]), (&json!(1), &json!(1)));
        assert_eq!(red["used"], json!({ "flex": 1 }));
        // Others are not held up.
        drop(cluster.pool().lease(LeaseRequest::devices(2)).unwrap());
        assert!(grants.try_recv().is_err());
        administrator.run(&["tenant", "set", "red", "--limit", "none"]);
        drop((first, second.join().unwrap()));
    });
}

/// `red` and `green` have a device each, and `green` has a larger weight; `blue` has none, and is guaranteed two.
#[test]
fn a_guarantee_and_then_the_weights_decide_who_is_next() {
    let cluster = Cluster::start(&["flex*5"]);
    let administrator = Administrator::of(&cluster);
    administrator.run(&["tenant", "add", "red"]);
    administrator.run(&["tenant", "add", "green", "--weight", "3"]);
    administrator.run(&["tenant", "add", "blue", "--guarantee", "flex=2"]);
    let pools = ["red", "green", "blue"].map(|tenant| pool_of(&administrator, tenant));
    let [red, green, blue] = &pools;
    // They are not suspended for `blue`.
    let request = || LeaseRequest::devices(1).durable(Durability::Off);
    let lease = |pool: &Pool| pool.lease(request()).unwrap();
    let kept = (lease(red), lease(green));
    let others = cluster.pool();
    let held = [lease(&others), lease(&others), lease(&others)];
    let mut order = Vec::new();
    scope(|scope| {
        let (granted, grants) = mpsc::channel();
        let waiters = [("red", red), ("green", green), ("blue", blue)];
        let waiters = waiters.map(|(name, pool)| {
            let count = waiting(&administrator).len();
            let waiter = wait_for_device(scope, pool, name, &granted);
            administrator.wait("the request", || waiting(&administrator).len() > count);
            waiter
        });
        let tenants = waiting(&administrator);
        let tenants = tenants.iter().map(|it| it["tenant"].as_str().unwrap());
        assert_eq!(tenants.collect::<Vec<_>>(), ["blue", "green", "red"]);
        for lease in held {
            drop(lease);
            let name = grants.recv_timeout(Duration::from_secs(20)).unwrap();
            order.push(name);
        }
        for waiter in waiters {
            drop(waiter.join().unwrap());
        }
    });
    assert_eq!(order, ["blue", "green", "red"]);
    drop(kept);
}

/// A higher priority is before an earlier request of the same tenant.
#[test]
fn a_priority_orders_the_requests_of_a_tenant() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::of(&cluster);
    let pool = cluster.pool();
    let held = pool.lease(LeaseRequest::devices(1)).unwrap();
    scope(|scope| {
        let request = |priority| {
            let pool = &pool;
            let count = waiting(&administrator).len();
            let request = LeaseRequest::devices(1).priority(priority);
            let waiter = scope.spawn(move || pool.lease(request).unwrap());
            administrator.wait("the request", || waiting(&administrator).len() > count);
            waiter
        };
        let (early, urgent) = (request(0), request(5));
        let listed = waiting(&administrator);
        let priorities = listed.iter().map(|it| it["priority"].as_i64());
        assert_eq!(priorities.collect::<Vec<_>>(), [Some(5), Some(0)]);
        // An administrator may decide otherwise.
        let id = listed[1]["id"].as_str().unwrap();
        let text = administrator.run(&["lease", "priority", id, "7"]);
        let first = format!("request {id} has priority 7, and is at position 1\n");
        assert_eq!(text, first);
        administrator.run(&["lease", "priority", id, "-7"]);
        drop(held);
        drop(urgent.join().unwrap());
        drop(early.join().unwrap());
    });
}

#[test]
fn tenants_survive_a_killed_scheduler() {
    let mut cluster = Cluster::start(&["flex"]);
    Administrator::of(&cluster).run(&["tenant", "add", "red", "--weight", "7"]);
    cluster.without_scheduler(|_| {});
    cluster.wait_for_workers(1);
    let administrator = Administrator::of(&cluster);
    assert_eq!(shown(&administrator, "red")["weight"], 7);
    let error = administrator.try_run(&["token", "create", "--tenant", "blue"]);
    let error = error.unwrap_err();
    assert!(error.contains("there is no tenant \"blue\""), "{error}");
}

#[test]
fn an_administrator_ends_leases_and_requests() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::of(&cluster);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    scope(|scope| {
        let refused = scope.spawn(|| pool.lease(LeaseRequest::devices(1)).unwrap_err());
        administrator.wait("the request", || !waiting(&administrator).is_empty());
        let request = waiting(&administrator).remove(0);
        let request = request["id"].as_str().unwrap().to_owned();
        let text = administrator.run(&["lease", "end", &request]);
        assert_eq!(text, format!("request {request} is refused\n"));
        let refused = refused.join().unwrap().to_string();
        let words = "an administrator of the pool has ended the request";
        assert!(refused.contains(words), "{refused}");
    });
    let id = administrator.leases()[0]["lease"]
        .as_str()
        .unwrap()
        .to_owned();
    let text = administrator.run(&["lease", "end", &id]);
    assert_eq!(text, format!("lease {id} is ended\n"));
    let ended = lease
        .wait_ended(Duration::from_secs(20))
        .expect("it has ended");
    let words = "an administrator of the pool has ended the lease";
    assert!(ended.contains(words), "{ended}");
    let error = administrator.try_run(&["lease", "end", &id]).unwrap_err();
    let words = format!("the pool has no lease or request {id};");
    assert!(error.contains(&words), "{error}");
}

#[test]
fn a_file_without_a_tenant_ends_its_leases_by_force_only() {
    let cluster = Cluster::start(&["flex*2"]);
    let administrator = Administrator::of(&cluster);
    let file = cluster.path("pool.toml");
    let apply = |text: &str, flags: &[&str]| {
        std::fs::write(&file, text).unwrap();
        administrator.try_run(&[&["apply", file.to_str().unwrap()], flags].concat())
    };
    let both = "[tenants.default]\n[tenants.red]\nlimit = { flex = 1 }\n";
    assert_eq!(
        apply(both, &[]).unwrap(),
        "+ tenant red  limit 1 flex\n1 change applied\n"
    );
    let pool = pool_of(&administrator, "red");
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let kept = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let without = "[tenants.default]\n";
    let refused = apply(without, &[]).unwrap_err();
    assert!(refused.contains("1 tenant is in use"), "{refused}");
    assert_eq!(shown(&administrator, "red")["leases"], 1);
    let forced = apply(without, &["--force"]).unwrap();
    let expected = "\
- tenant red  limit 1 flex
    in use: valid token program-1
    in use: 1 lease
1 change applied; 1 token revoked, 1 client disconnected
";
    assert_eq!(forced, expected);
    let ended = lease
        .wait_ended(Duration::from_secs(20))
        .expect("it has ended");
    assert!(ended.contains("revoked"), "{ended}");
    let leases = administrator.leases();
    assert_eq!(leases.len(), 1, "{leases:?}");
    // The pool does not let the client in again, so its requests must not wait.
    let refused = pool.lease(LeaseRequest::devices(1)).unwrap_err();
    let kind = match &refused {
        LeaseError::Refused { kind, .. } => Some(*kind),
        _ => None,
    };
    assert_eq!(kind, Some(RefusalKind::Token), "{refused}");
    assert!(
        refused.to_string().contains("did not accept the token"),
        "{refused}"
    );
    drop(kept);
}
