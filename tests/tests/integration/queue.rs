//! What waits for devices, and why, as administrators see it.

use std::{sync::mpsc, thread::scope, time::Duration};

use serde_json::{Value, json};
use tensord_client::{LeaseEvent, LeaseRequest};
use tensord_testkit::{administrator::Administrator, cluster::Cluster};

use super::tenants::pool_of;

/// Returns what waits.
fn queue(administrator: &Administrator) -> Vec<Value> {
    let listed = administrator.run(&["queue", "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    listed["waiting"].as_array().unwrap().clone()
}

/// Returns an id in a listed lease, or in a part of what waits.
fn id(listed: &Value, key: &str) -> String {
    listed[key].as_str().unwrap().to_owned()
}

#[test]
fn administrator_learns_who_has_what_a_request_waits_for() {
    let cluster = Cluster::start(&["flex*2"]);
    let administrator = Administrator::of(&cluster);
    assert_eq!(administrator.run(&["queue"]), "nothing waits for devices\n");
    let pool = cluster.pool();
    let leased = pool.lease(LeaseRequest::devices(1)).unwrap();
    scope(|scope| {
        let waits = scope.spawn(|| pool.lease(LeaseRequest::devices(2)).unwrap());
        administrator.wait("the request", || !queue(&administrator).is_empty());
        let waiting = queue(&administrator).remove(0);
        assert_eq!(waiting["waiter"], "request");
        assert_eq!(waiting["requested"], "2 devices of any kind");
        let (free, taken) = (&waiting["needs"][0]["free"], &waiting["needs"][0]["leased"]);
        assert_eq!((free, taken), (&json!(1), &json!(1)));

        let holder = id(&administrator.leases()[0], "lease");
        let request = id(&waiting, "id");
        let text = administrator.run(&["why", &request]);
        let first =
            format!("request {request} of tenant default (token program) waits for 2 devices");
        assert!(text.starts_with(&first), "{text}");
        let has = format!("lease {holder} of tenant default (token program) has 1 device\n");
        assert!(text.contains(&has), "{text}");
        let text = administrator.run(&["why", &holder]);
        let runs = format!("lease {holder} does not wait: it has worker-0 flex:0\n");
        assert_eq!(text, runs);

        drop(leased);
        let granted = waits.join().unwrap();
        // The lease has the id that its request had.
        let text = administrator.run(&["why", &request]);
        let runs = format!("lease {request} does not wait: it has worker-0 flex:0,1\n");
        assert_eq!(text, runs);
        drop(granted);
    });
    administrator.wait("the leases to end", || administrator.leases().is_empty());
    let error = administrator
        .try_run(&["why", "00000000000000ab"])
        .unwrap_err();
    let none = "error: the pool has no lease or request 00000000000000ab;";
    assert!(error.starts_with(none), "{error}");
}

/// A program's token shows nothing of what others wait for.
#[test]
fn programs_are_not_told_what_others_wait_for() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::with_url(cluster.client_url());
    for call in [&["queue"][..], &["why", "00000000000000ab"]] {
        let error = administrator.try_run(call).unwrap_err();
        assert!(
            error.contains("an administrator needs a different token"),
            "{error}"
        );
    }
}

/// A program learns why its request waits in the words that administrators get, without what others have; and again
/// when that changes.
#[test]
fn program_learns_why_it_waits_without_the_names_of_others() {
    let cluster = Cluster::start(&["flex*3"]);
    let administrator = Administrator::of(&cluster);
    administrator.run(&["tenant", "add", "red", "--limit", "flex=2"]);
    let red = pool_of(&administrator, "red");
    let own = red.lease(LeaseRequest::devices(1)).unwrap();
    let others = cluster.pool();
    let others = [(); 2].map(|()| others.lease(LeaseRequest::devices(1)).unwrap());
    let (event, events) = mpsc::channel();
    scope(|scope| {
        let request = LeaseRequest::devices(1).kind("flex");
        let request = request.on_event(move |it| event.send(it).unwrap());
        let waits = scope.spawn(|| red.lease(request).unwrap());
        let explained = || loop {
            let event = events.recv_timeout(Duration::from_secs(30)).unwrap();
            if let LeaseEvent::Explained { explanation } = event {
                return explanation;
            }
        };
        let text = explained();
        let request = id(&queue(&administrator)[0], "id");
        let expected = format!(
            "\
request {request} waits for 1 device of kind flex
  position   1; the tenant with the least present and past use, by weight, is next; a later request that fits need not wait
"
        );
        assert!(text.starts_with(&expected), "{text}");
        let why = administrator.run(&["why", &request]);
        for line in ["  devices    ", "  may end if ", "  estimate   "] {
            let line = why.lines().find(|it| it.starts_with(line)).unwrap();
            assert!(text.contains(line), "{text}\n{why}");
        }
        let leases = administrator.leases();
        let (of_red, of_others): (Vec<_>, Vec<_>) =
            leases.iter().partition(|lease| lease["tenant"] == "red");
        assert_eq!((of_red.len(), of_others.len()), (1, 2));
        assert!(text.contains(&id(of_red[0], "lease")), "{text}");
        for lease in of_others {
            let lease = id(lease, "lease");
            assert!(why.contains(&lease) && !text.contains(&lease), "{text}");
        }
        assert!(!text.contains("default"), "{text}");

        administrator.run(&["tenant", "set", "red", "--limit", "flex=1"]);
        let text = explained();
        let limit = "\n  limit      there may be enough devices, but its tenant would have more than its limit\n";
        assert!(text.contains(limit), "{text}");
        drop(own);
        drop(waits.join().unwrap());
    });
    drop(others);
}
