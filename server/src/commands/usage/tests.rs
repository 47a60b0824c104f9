use super::*;

const COLUMNS: [Column; 3] = [Column::Day, Column::User, Column::Lease];

fn sum(hours: u64) -> UsageSum {
    UsageSum {
        held_us: hours * 3_600_000_000,
        busy_us: hours * 1_800_000_000,
        byte_seconds: (hours * 3600) as f64 * (80_u64 << 30) as f64,
        moved_bytes: hours << 20,
        ops: hours * 1_000_000,
    }
}

fn row(user: &str, lease_id: u64, hours: u64) -> UsageRow {
    UsageRow {
        user: user.into(),
        lease_id,
        day: 20_758,
        sum: Some(sum(hours)),
        ..UsageRow::default()
    }
}

fn sums() -> UsageSums {
    UsageSums {
        rows: vec![row("ada", 0x9a, 100), row("", 0, 1)],
        other_rows: 1234,
        others: Some(sum(2)),
        total: Some(sum(103)),
        devices_busy_us: 185_400_000_000,
        since_ms: 20_758 * 24 * HOUR_MS + 5 * HOUR_MS,
        until_ms: 20_760 * 24 * HOUR_MS,
    }
}

#[test]
fn table_is_aligned_and_has_a_total() {
    let expected = "\
DAY         USER  LEASE             DEVICE TIME        BUSY  MEMORY TIME      MOVED          OPS
2026-11-01  ada   000000000000009a      4 d 4 h     2 d 2 h    7.8 TiB h  100.0 MiB  100,000,000
2026-11-01  -     -                   1 h 0 min  30 min 0 s   80.0 GiB h    1.0 MiB    1,000,000
1,234 more                            2 h 0 min   1 h 0 min  160.0 GiB h    2.0 MiB    2,000,000
total                                   4 d 7 h     2 d 3 h    8.0 TiB h  103.0 MiB  103,000,000
since 2026-11-01 05:00 UTC; busy by the devices' own count: 2 d 3 h
";
    assert_eq!(to_table(&COLUMNS, &sums()), expected);
    let none = UsageSums {
        since_ms: 5 * HOUR_MS,
        devices_busy_us: 120_000_000,
        ..UsageSums::default()
    };
    let expected = "no lease has used a device since 1970-01-01 05:00 UTC; busy by the devices' own count: 2 min 0 s\n";
    assert_eq!(to_table(&COLUMNS, &none), expected);
}

#[test]
fn csv_has_plain_numbers() {
    let text = to_csv(&COLUMNS, &sums());
    let expected = "\
day,user,lease,device_seconds,busy_seconds,memory_gib_hours,moved_bytes,ops
2026-11-01,ada,000000000000009a,360000.0,180000.0,8000.0,104857600,100000000
2026-11-01,,,3600.0,1800.0,80.0,1048576,1000000
(others),(others),(others),7200.0,3600.0,160.0,2097152,2000000
";
    assert_eq!(text, expected);
    let by_tenant = to_csv(&[Column::Tenant], &sums());
    assert!(by_tenant.contains("\n(unknown),3600.0,"), "{by_tenant}");
    assert_eq!(quoted("a,b \"c\""), "\"a,b \"\"c\"\"\"");
}

#[test]
fn json_has_null_for_what_is_not_known() {
    let value = to_json(&COLUMNS, &sums());
    let (first, second) = (&value["rows"][0], &value["rows"][1]);
    assert_eq!(first["lease"], "000000000000009a");
    assert_eq!(first["day"], "2026-11-01");
    assert!(second["lease"].is_null() && second["user"].is_null());
    assert_eq!(first["device_seconds"], 360_000.0);
    assert_eq!(value["total"]["busy_seconds"], 185_400.0);
    assert_eq!(value["devices_busy_seconds"], 185_400.0);
    assert_eq!(value["others"]["ops"], 2_000_000);
}
