//! `tensord apply`: makes the tenants of a pool those of a file, and shows what changes.
//!
//! The scheduler plans the changes and shows the plan first. It carries it out if the tenants are the same
//! then, and what is in use is not concerned or the change is forced.

use serde::Serialize;
use tensord_proto::v1::{ApplyTenantsRequest, PlannedTenant, TenantInfo, TenantPlan};
use tensord_transport::PoolUrl;

use super::{
    admin::{self, error::AdminError, into_reply, with_token},
    tenants::{TermsJson, request_of, terms_json},
};
use crate::{
    config::ApplyConfig,
    failure::Failure,
    human::plural,
    stdout,
    tenant_text::{guarantee_text, limit_text},
};

/// What has come of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Its changes are made.
    Applied,
    /// Only shown, as the user wanted.
    DryRun,
    /// Nothing is changed, as the plan concerns what is in use.
    Refused,
}

/// The JSON for a plan. Programs depend on the field names.
#[derive(Serialize)]
struct PlanJson<'a> {
    applied: bool,
    changes: Vec<ChangeJson<'a>>,
    warnings: &'a [String],
    revoked_tokens: &'a [String],
    disconnected_clients: u32,
}

#[derive(Serialize)]
struct ChangeJson<'a> {
    tenant: &'a str,
    change: &'static str,
    /// `None` if it is added.
    before: Option<TermsJson<'a>>,
    /// `None` if it is removed.
    after: Option<TermsJson<'a>>,
    in_use: &'a [String],
    kept_tokens: &'a [String],
}

/// Applies the file, and prints what changes.
pub(super) async fn run(config: ApplyConfig) -> Result<(), Failure> {
    let ApplyConfig {
        admin,
        tenants,
        dry_run,
        force,
        json,
    } = config;
    let url = admin::url(admin)?;
    let request = ApplyTenantsRequest {
        tenants: tenants.into_iter().map(request_of).collect(),
        dry_run,
        force,
        ..ApplyTenantsRequest::default()
    };
    let (plan, outcome) = admin::with_deadline(&url, execute(&url, request)).await?;
    stdout::print(&match json {
        true => stdout::json(&json_of(&plan, outcome)),
        false => text_of(&plan, outcome, force),
    })?;
    match outcome {
        Outcome::Refused => Err(refusal(&plan).into()),
        Outcome::Applied | Outcome::DryRun => Ok(()),
    }
}

/// Plans the changes, and has them made unless that is not wanted, or would be refused.
async fn execute(
    url: &PoolUrl,
    request: ApplyTenantsRequest,
) -> Result<(TenantPlan, Outcome), AdminError> {
    let mut admin = admin::connect(url).await?;
    let dry_run = ApplyTenantsRequest {
        dry_run: true,
        ..request.clone()
    };
    let planned = admin.apply_tenants(with_token(dry_run, url)?).await;
    let plan = into_reply(url, planned)?;
    if request.dry_run {
        return Ok((plan, Outcome::DryRun));
    }
    if is_refused(&plan, request.force) {
        return Ok((plan, Outcome::Refused));
    }
    let apply = ApplyTenantsRequest {
        revision: plan.revision,
        ..request
    };
    let applied = admin.apply_tenants(with_token(apply, url)?).await;
    Ok((into_reply(url, applied)?, Outcome::Applied))
}

fn is_refused(plan: &TenantPlan, force: bool) -> bool {
    let mut changes = plan.changes.iter();
    changes.any(|it| !it.kept_tokens.is_empty() || (!it.in_use.is_empty() && !force))
}

/// Returns the reason why a plan is not carried out.
fn refusal(plan: &TenantPlan) -> AdminError {
    let mut changes = plan.changes.iter();
    match changes.find(|it| !it.kept_tokens.is_empty()) {
        Some(planned) => AdminError::TenantHasTokens {
            name: name_of(planned).into(),
            tokens: planned.kept_tokens.join(", "),
        },
        None => {
            let in_use = plan.changes.iter().filter(|it| !it.in_use.is_empty());
            let tenants = in_use.count();
            AdminError::TenantsInUse { tenants }
        }
    }
}

fn name_of(planned: &PlannedTenant) -> &str {
    let tenant = planned.before.as_ref().or(planned.after.as_ref());
    tenant.map_or("", |tenant| &tenant.name)
}

/// Returns a plan in lines of text.
fn text_of(plan: &TenantPlan, outcome: Outcome, force: bool) -> String {
    let names = plan.changes.iter().map(name_of);
    let width = names.map(str::len).max().unwrap_or_default();
    let mut lines = Vec::new();
    for planned in &plan.changes {
        let (sign, what) = match (&planned.before, &planned.after) {
            (None, Some(after)) => ('+', terms_text(after)),
            (Some(before), None) => ('-', terms_text(before)),
            (Some(before), Some(after)) => ('~', difference(before, after)),
            (None, None) => continue,
        };
        let line = format!("{sign} tenant {:width$}  {what}", name_of(planned));
        lines.push(line.trim_end().to_owned());
        let in_use = planned.in_use.iter();
        lines.extend(in_use.map(|what| format!("    in use: {what}")));
        if !planned.kept_tokens.is_empty() {
            let tokens = planned.kept_tokens.join(", ");
            lines.push(format!("    has admin or worker tokens: {tokens}"));
        }
    }
    let warnings = plan.warnings.iter();
    lines.extend(warnings.map(|warning| format!("warning: {warning}")));
    lines.push(closing_line(plan, outcome, force));
    lines.join("\n") + "\n"
}

fn closing_line(plan: &TenantPlan, outcome: Outcome, force: bool) -> String {
    if plan.changes.is_empty() {
        return "nothing to change".into();
    }
    let changes = plural(plan.changes.len(), "change");
    match outcome {
        Outcome::Applied if plan.revoked_tokens.is_empty() => format!("{changes} applied"),
        Outcome::Applied => {
            let tokens = plural(plan.revoked_tokens.len(), "token");
            let clients = plural(plan.disconnected_clients as usize, "client");
            format!("{changes} applied; {tokens} revoked, {clients} disconnected")
        }
        Outcome::DryRun if is_refused(plan, true) => {
            format!("{changes}, nothing applied (--dry-run); they would be refused")
        }
        Outcome::DryRun if is_refused(plan, force) => {
            format!("{changes}, nothing applied (--dry-run); they need --force")
        }
        Outcome::DryRun => format!("{changes}, nothing applied (--dry-run)"),
        Outcome::Refused => format!("{changes}, nothing applied"),
    }
}

/// Returns the weight, the guarantee and the limit of a tenant, in words.
fn terms(tenant: &TenantInfo) -> [(&'static str, String); 3] {
    let or_none = |text: String| if text.is_empty() { "none".into() } else { text };
    [
        ("weight", tenant.weight.to_string()),
        ("guarantee", or_none(guarantee_text(tenant))),
        ("limit", or_none(limit_text(tenant))),
    ]
}

/// Returns which terms of a tenant are not those of a new one, in words.
fn terms_text(tenant: &TenantInfo) -> String {
    let new = TenantInfo {
        weight: 1,
        ..TenantInfo::default()
    };
    let terms = terms(tenant).into_iter().zip(terms(&new));
    let own = terms.filter(|(own, new)| own != new);
    let own = own.map(|((name, value), _)| format!("{name} {value}"));
    own.collect::<Vec<_>>().join("; ")
}

/// Returns which terms of a tenant change, in words.
fn difference(before: &TenantInfo, after: &TenantInfo) -> String {
    let both = terms(before).into_iter().zip(terms(after));
    let changed = both.filter(|(before, after)| before != after);
    let changed = changed.map(|((name, before), (_, after))| format!("{name} {before} -> {after}"));
    changed.collect::<Vec<_>>().join("; ")
}

fn json_of(plan: &TenantPlan, outcome: Outcome) -> PlanJson<'_> {
    let changes = plan.changes.iter().map(|planned| ChangeJson {
        tenant: name_of(planned),
        change: match (&planned.before, &planned.after) {
            (None, _) => "add",
            (_, None) => "remove",
            _ => "change",
        },
        before: planned.before.as_ref().map(terms_json),
        after: planned.after.as_ref().map(terms_json),
        in_use: &planned.in_use,
        kept_tokens: &planned.kept_tokens,
    });
    PlanJson {
        applied: outcome == Outcome::Applied,
        changes: changes.collect(),
        warnings: &plan.warnings,
        revoked_tokens: &plan.revoked_tokens,
        disconnected_clients: plan.disconnected_clients,
    }
}

#[cfg(test)]
mod tests;
