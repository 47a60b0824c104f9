use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use serde_json::{Value, json};

use super::*;

fn settings(directory: &Path, file_bytes: u64, files: u32) -> Settings {
    Settings {
        directory: directory.into(),
        file_bytes,
        files,
    }
}

/// Returns a log without the thread that writes entries, and what that thread would read.
fn queue(capacity: usize) -> (Audit, Arc<Shared>, Receiver<Entry>) {
    let (sender, entries) = sync_channel(capacity);
    let shared = Arc::<Shared>::default();
    let audit = Audit(Some(Arc::new(Inner {
        entries: Some(sender),
        shared: shared.clone(),
        writer: None,
    })));
    (audit, shared, entries)
}

/// Returns the lines of a file, without their times.
fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let line = |line: &str| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        let time = line.as_object_mut().unwrap().remove("time_ms").unwrap();
        assert!(time.as_u64().unwrap() > 1_600_000_000_000);
        line
    };
    text.lines().map(line).collect()
}

#[test]
fn entry_omits_fields_that_do_not_apply() {
    let dir = tempfile::tempdir().unwrap();
    let audit = Audit::open(settings(dir.path(), 1 << 20, 2)).unwrap();
    let address = "10.0.0.7:5000".parse().unwrap();
    let granted = Entry::new(EntryKind::Granted)
        .token("team-a", "program", "a")
        .client(7)
        .address(address)
        .lease("00ff")
        .devices(2);
    audit.record(granted);
    let worker = Entry::new(EntryKind::Ended)
        .worker(9, "gpu\n1")
        .reason("x".repeat(5000));
    audit.clone().record(worker);
    audit.deny("call refused", || {
        Entry::new(EntryKind::Denied)
            .role("worker")
            .address(address)
    });
    drop(audit);
    let path = dir.path().join("audit.jsonl");
    let reason = format!("{}…", "x".repeat(MESSAGE_CHARS));
    let expected = [
        json!({
            "event": "granted", "token": "team-a", "role": "program", "tenant": "a",
            "client": "7", "address": "10.0.0.7:5000", "lease": "00ff", "devices": 2,
        }),
        json!({"event": "ended", "worker": "9", "name": "gpu\\n1", "reason": reason}),
        json!({"event": "denied", "role": "worker", "address": "10.0.0.7:5000"}),
    ];
    assert_eq!(lines(&path), expected);
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn frequent_denials_of_one_cause_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let audit = Audit::open(settings(dir.path(), 1 << 20, 2)).unwrap();
    for number in 0..5000 {
        audit.deny("call refused", || {
            Entry::new(EntryKind::Denied).client(number)
        });
    }
    audit.deny("worker refused", || {
        Entry::new(EntryKind::Denied).worker(1, "w")
    });
    drop(audit);
    let lines = lines(&dir.path().join("audit.jsonl"));
    // On a slow machine the denials may span more than a second.
    assert!((12..100).contains(&lines.len()), "{lines:?}");
    let of = |line: &Value| line["count"].as_u64().unwrap_or(1);
    assert_eq!(lines.iter().map(of).sum::<u64>(), 5001);
    let counted = lines.iter().find(|line| line.get("count").is_some());
    assert_eq!(counted.unwrap()["reason"], "call refused");
}

#[test]
fn flood_of_one_tenant_is_counted_and_leaves_room_for_others() {
    const FLOOD: u64 = 5000;
    let (audit, shared, entries) = queue(FLOOD as usize);
    let of = |tenant| Entry::new(EntryKind::Admitted).token("t", "program", tenant);
    (0..FLOOD).for_each(|_| audit.record(of("a")));
    audit.record(of("b"));
    audit.record(Entry::new(EntryKind::Revoked).token("t", "program", "a"));
    drop(audit);
    let dir = tempfile::tempdir().unwrap();
    let mut files = Files::open(settings(dir.path(), 1 << 24, 2)).unwrap();
    write(&entries, &shared, &mut files);
    let lines = lines(&dir.path().join("audit.jsonl"));
    let of = |event: &str, tenant: &str| {
        let is_it = |line: &&Value| line["event"] == event && line["tenant"] == tenant;
        let counts = lines.iter().filter(is_it);
        let counts = counts.map(|line| line["count"].as_u64().unwrap_or(1));
        counts.sum::<u64>()
    };
    let written = of("admitted", "a");
    // On a slow machine the entries may span several seconds.
    assert!((2000..FLOOD).contains(&written), "{written}");
    assert_eq!(written + of("lost", "a"), FLOOD);
    assert_eq!((of("admitted", "b"), of("revoked", "a")), (1, 1));
}

#[test]
fn entry_after_a_torn_line_has_a_line_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    std::fs::write(&path, "{\"event\":\"adm").unwrap();
    for _ in 0..2 {
        let mut files = Files::open(settings(dir.path(), 1 << 20, 2)).unwrap();
        files.put(&Entry::new(EntryKind::Admitted)).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!((lines.len(), lines[0]), (3, "{\"event\":\"adm"), "{text}");
    for line in &lines[1..] {
        let entry: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(entry["event"], "admitted");
    }
}

#[test]
fn full_queue_drops_and_counts_entries() {
    let (audit, shared, entries) = queue(2);
    for _ in 0..5 {
        audit.record(Entry::new(EntryKind::Admitted));
    }
    drop(audit);
    let dir = tempfile::tempdir().unwrap();
    let mut files = Files::open(settings(dir.path(), 1 << 20, 2)).unwrap();
    write(&entries, &shared, &mut files);
    let admitted = json!({"event": "admitted"});
    let lost = json!({"event": "lost", "count": 3});
    let expected = [admitted.clone(), admitted, lost];
    assert_eq!(lines(&dir.path().join("audit.jsonl")), expected);
}

#[test]
fn files_rotate_and_the_oldest_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let fill = |files| {
        let mut log = Files::open(settings(dir.path(), 300, files)).unwrap();
        for number in 0..40 {
            log.put(&Entry::new(EntryKind::Admitted).client(number))
                .unwrap();
        }
    };
    fill(3);
    let mut sizes = Vec::new();
    for name in ["audit.2.jsonl", "audit.1.jsonl", "audit.jsonl"] {
        let path = dir.path().join(name);
        sizes.push(fs::metadata(&path).unwrap().len());
        assert!(!lines(&path).is_empty());
    }
    assert!(sizes.iter().all(|size| *size <= 300), "{sizes:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    let last = lines(&dir.path().join("audit.jsonl")).pop().unwrap();
    assert_eq!(last["client"], "39");
    // Continues in the existing file, also with fewer files.
    fill(1);
    let newest = lines(&dir.path().join("audit.jsonl"));
    assert!(newest.len() < 8);
}

#[test]
fn zero_size_disables_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let audit = Audit::open(settings(dir.path(), 0, 2)).unwrap();
    audit.record(Entry::new(EntryKind::Admitted));
    audit.deny("x", || unreachable!("nothing is made for no log"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
