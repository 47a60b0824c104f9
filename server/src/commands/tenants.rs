//! `tensord tenant`: adds, changes, lists and removes the tenants of a running pool.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Number;
use tensord_proto::v1::{
    ChangeTenantRequest, DeviceCounts, KindCount, ListTenantsRequest, RemoveTenantRequest,
    TenantInfo, TenantLimit,
};
use tensord_transport::PoolUrl;

use super::admin::{self, error::AdminError, into_reply, with_token};
use crate::{
    config::{TenantChange, TenantsAction, TenantsConfig},
    failure::Failure,
    human, stdout, table,
    tenant_text::{
        counts_text, guarantee_text, has_text, kinds_of, limit_text, past_text, permille_of,
    },
};

const HEADER: [&str; 9] = [
    "TENANT",
    "WEIGHT",
    "GUARANTEED",
    "LIMIT",
    "HAS",
    "PAST",
    "LEASES",
    "WAITING",
    "TOKENS",
];

/// Columns of numbers, which are aligned right.
const RIGHT: [usize; 4] = [1, 5, 6, 7];

/// The JSON for a tenant. Programs depend on the field names.
#[derive(Serialize)]
pub(super) struct TenantJson<'a> {
    name: &'a str,
    created_ms: u64,
    #[serde(flatten)]
    terms: TermsJson<'a>,
    /// Not whole numbers where it has shares of devices.
    used: BTreeMap<&'a str, Number>,
    used_memory_bytes: u64,
    /// Those that have devices.
    leases: u32,
    suspended: u32,
    waiting: u32,
    past_share: f64,
    tokens: &'a [String],
    warnings: &'a [String],
}

/// The JSON for what a tenant may have, and what counts in whose request is next.
#[derive(Serialize)]
pub(super) struct TermsJson<'a> {
    weight: u32,
    guaranteed: BTreeMap<&'a str, u32>,
    limit: BTreeMap<&'a str, u32>,
    limit_memory_bytes: Option<u64>,
}

/// Makes one call and prints its result.
pub(super) async fn run(config: TenantsConfig) -> Result<(), Failure> {
    let url = admin::url(config.admin)?;
    let text = admin::with_deadline(&url, execute(&url, config.action, config.json)).await?;
    stdout::print(&text)
}

/// Carries out the action, and returns the text to print.
async fn execute(url: &PoolUrl, action: TenantsAction, json: bool) -> Result<String, AdminError> {
    let mut admin = admin::connect(url).await?;
    let shown = |tenant: &TenantInfo| match json {
        true => stdout::json(&json_of(tenant)),
        false => text_of(tenant),
    };
    match action {
        TenantsAction::Add(change) => {
            let added = admin.add_tenant(with_token(request_of(change), url)?).await;
            Ok(shown(&into_reply(url, added)?))
        }
        TenantsAction::Set(change) => {
            let set = admin.set_tenant(with_token(request_of(change), url)?).await;
            Ok(shown(&into_reply(url, set)?))
        }
        TenantsAction::List => {
            let request = ListTenantsRequest::default();
            let listed = admin.list_tenants(with_token(request, url)?).await;
            let tenants = into_reply(url, listed)?.tenants;
            Ok(match json {
                true => {
                    let tenants: Vec<_> = tenants.iter().map(json_of).collect();
                    stdout::json(&serde_json::json!({ "tenants": tenants }))
                }
                false => table::text(HEADER, &RIGHT, tenants.iter().map(row)),
            })
        }
        TenantsAction::Show(name) => {
            let request = ListTenantsRequest { name };
            let listed = admin.list_tenants(with_token(request, url)?).await;
            let tenants = into_reply(url, listed)?.tenants;
            Ok(tenants.iter().map(shown).collect())
        }
        TenantsAction::Remove(name) => {
            let request = RemoveTenantRequest { name: name.clone() };
            let removed = admin.remove_tenant(with_token(request, url)?).await;
            into_reply(url, removed)?;
            Ok(match json {
                true => stdout::json(&serde_json::json!({ "removed": name })),
                false => format!("tenant {name} is removed\n"),
            })
        }
    }
}

/// Returns the message for a change of a tenant, or for a new one.
pub(super) fn request_of(change: TenantChange) -> ChangeTenantRequest {
    let TenantChange {
        name,
        weight,
        guaranteed,
        limit,
    } = change;
    let kinds = |kinds: BTreeMap<String, u32>| {
        let kinds = kinds.into_iter();
        kinds
            .map(|(kind, count)| KindCount {
                kind,
                count,
                permille: 0,
            })
            .collect()
    };
    ChangeTenantRequest {
        name,
        weight,
        guaranteed: guaranteed.map(|it| DeviceCounts { kinds: kinds(it.0) }),
        limit: limit.map(|it| TenantLimit {
            kinds: kinds(it.kinds),
            memory_bytes: it.memory_bytes,
        }),
    }
}

pub(super) fn json_of(tenant: &TenantInfo) -> TenantJson<'_> {
    TenantJson {
        name: &tenant.name,
        created_ms: tenant.created_ms,
        terms: terms_json(tenant),
        used: fractions_by_kind(kinds_of(tenant.used.as_ref())),
        used_memory_bytes: tenant.used_memory_bytes,
        leases: tenant.leases,
        suspended: tenant.suspended,
        waiting: tenant.waiting,
        past_share: tenant.past_share,
        tokens: &tenant.tokens,
        warnings: &tenant.warnings,
    }
}

pub(super) fn terms_json(tenant: &TenantInfo) -> TermsJson<'_> {
    let limit = tenant.limit.as_ref();
    TermsJson {
        weight: tenant.weight,
        guaranteed: by_kind(kinds_of(tenant.guaranteed.as_ref())),
        limit: by_kind(limit.map_or(&[], |limit| &limit.kinds)),
        limit_memory_bytes: limit.and_then(|limit| limit.memory_bytes),
    }
}

/// Returns numbers of devices by kind.
fn by_kind(kinds: &[KindCount]) -> BTreeMap<&str, u32> {
    kinds.iter().map(|it| (&*it.kind, it.count)).collect()
}

/// Returns numbers of devices by kind, with the shares of devices that are among them.
fn fractions_by_kind(kinds: &[KindCount]) -> BTreeMap<&str, Number> {
    kinds
        .iter()
        .map(|it| (&*it.kind, stdout::thousandths(permille_of(it))))
        .collect()
}

fn row(tenant: &TenantInfo) -> [String; 9] {
    let or_dash = |text: String| if text.is_empty() { "-".into() } else { text };
    [
        tenant.name.clone(),
        tenant.weight.to_string(),
        or_dash(guarantee_text(tenant)),
        or_dash(limit_text(tenant)),
        or_dash(counts_text(kinds_of(tenant.used.as_ref()))),
        past_text(tenant),
        human::count(tenant.leases.into()),
        human::count(tenant.waiting.into()),
        or_dash(tenant.tokens.join(", ")),
    ]
}

/// Returns a tenant in lines of text.
fn text_of(tenant: &TenantInfo) -> String {
    let mut text = format!("tenant {}\n", tenant.name);
    let mut line = |name: &str, value: &str| table::push_line(&mut text, name, value);
    let or_none = |text: String| if text.is_empty() { "none".into() } else { text };
    line("weight", &tenant.weight.to_string());
    line("guaranteed", &or_none(guarantee_text(tenant)));
    line("limit", &or_none(limit_text(tenant)));
    line("has", &has_text(tenant));
    line("past use", &format!("{} of the pool", past_text(tenant)));
    if tenant.suspended > 0 {
        line(
            "suspended",
            &human::plural(tenant.suspended as usize, "lease"),
        );
    }
    line(
        "waiting",
        &human::plural(tenant.waiting as usize, "request"),
    );
    line("tokens", &or_none(tenant.tokens.join(", ")));
    for warning in &tenant.warnings {
        line("warning", warning);
    }
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn kinds(kinds: &[(&str, u32)]) -> Vec<KindCount> {
        let kinds = kinds.iter().map(|(kind, count)| KindCount {
            kind: (*kind).into(),
            count: *count,
            permille: 0,
        });
        kinds.collect()
    }

    pub(crate) fn research() -> TenantInfo {
        TenantInfo {
            name: "research".into(),
            weight: 2,
            guaranteed: Some(DeviceCounts {
                kinds: kinds(&[("cuda", 4)]),
            }),
            limit: Some(TenantLimit {
                kinds: kinds(&[("cuda", 8), ("flex", 2)]),
                memory_bytes: Some(640 << 30),
            }),
            used: Some(DeviceCounts {
                kinds: kinds(&[("cuda", 3)]),
            }),
            used_memory_bytes: 240 << 30,
            leases: 2,
            suspended: 1,
            waiting: 1,
            past_share: 0.124,
            tokens: vec!["ci".into(), "night".into()],
            warnings: vec!["tenants are guaranteed 4 cuda in all, and the pool has 3 now".into()],
            ..TenantInfo::default()
        }
    }

    #[test]
    fn a_tenant_is_shown_in_lines() {
        let expected = "\
tenant research
  weight     2
  guaranteed 4 cuda
  limit      8 cuda, 2 flex, 640 GiB
  has        3 cuda with 240.0 GiB in 2 leases
  past use   12 % of the pool
  suspended  1 lease
  waiting    1 request
  tokens     ci, night
  warning    tenants are guaranteed 4 cuda in all, and the pool has 3 now
";
        assert_eq!(text_of(&research()), expected);
        let new = TenantInfo {
            name: "new".into(),
            weight: 1,
            ..TenantInfo::default()
        };
        let expected = "\
tenant new
  weight     1
  guaranteed none
  limit      none
  has        nothing
  past use   0 % of the pool
  waiting    0 requests
  tokens     none
";
        assert_eq!(text_of(&new), expected);
    }

    #[test]
    fn shares_of_devices_are_fractions() {
        let mut tenant = research();
        let used = tenant.used.as_mut().unwrap();
        used.kinds.extend(kinds(&[("flex", 0)]));
        (used.kinds[0].permille, used.kinds[1].permille) = (250, 500);
        assert_eq!(
            has_text(&tenant),
            "3.25 cuda, 0.5 flex with 240.0 GiB in 2 leases"
        );
        let json = serde_json::to_value(json_of(&tenant)).unwrap();
        assert_eq!(
            json["used"],
            serde_json::json!({ "cuda": 3.25, "flex": 0.5 })
        );
    }

    #[test]
    fn tenants_are_listed_in_columns_and_as_json() {
        let new = TenantInfo {
            name: "new".into(),
            weight: 1,
            ..TenantInfo::default()
        };
        let listed = table::text(HEADER, &RIGHT, [research(), new].iter().map(row));
        let expected = "\
TENANT    WEIGHT  GUARANTEED  LIMIT                    HAS     PAST  LEASES  WAITING  TOKENS
research       2  4 cuda      8 cuda, 2 flex, 640 GiB  3 cuda  12 %       2        1  ci, night
new            1  -           -                        -        0 %       0        0  -
";
        assert_eq!(listed, expected);
        let json = serde_json::to_value(json_of(&research())).unwrap();
        assert_eq!(json["guaranteed"]["cuda"], 4);
        assert_eq!(json["limit"]["flex"], 2);
        assert_eq!(json["limit_memory_bytes"], 640_u64 << 30);
        assert_eq!(json["used"], serde_json::json!({ "cuda": 3 }));
    }
}
