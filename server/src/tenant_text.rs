//! What a tenant has, and may have, in words.

use tensord_proto::{
    share::WHOLE_PERMILLE,
    v1::{DeviceCounts, KindCount, TenantInfo},
};

use crate::human;

/// Returns what a tenant has, in words.
pub(crate) fn has_text(tenant: &TenantInfo) -> String {
    let counts = counts_text(kinds_of(tenant.used.as_ref()));
    match counts.is_empty() {
        true => "nothing".into(),
        false => {
            let memory = human::bytes(tenant.used_memory_bytes);
            let leases = human::plural(tenant.leases as usize, "lease");
            format!("{counts} with {memory} in {leases}")
        }
    }
}

/// Returns the average of the shares that a tenant has had, such as `12 %`.
pub(crate) fn past_text(tenant: &TenantInfo) -> String {
    format!("{:.0} %", tenant.past_share * 100.0)
}

/// Returns the guarantee of a tenant, in words; empty if it has none.
pub(crate) fn guarantee_text(tenant: &TenantInfo) -> String {
    counts_text(kinds_of(tenant.guaranteed.as_ref()))
}

/// Returns what a tenant may have at most, in words; empty if that is not limited.
pub(crate) fn limit_text(tenant: &TenantInfo) -> String {
    let limit = tenant.limit.as_ref();
    let counts = counts_text(limit.map_or(&[], |limit| &limit.kinds));
    let memory = limit.and_then(|limit| limit.memory_bytes);
    let texts = [Some(counts), memory.map(human::exact_bytes)];
    let texts = texts.into_iter().flatten().filter(|text| !text.is_empty());
    texts.collect::<Vec<_>>().join(", ")
}

/// Returns numbers of devices by kind, such as `4 cuda, 1.25 flex`.
pub(crate) fn counts_text(kinds: &[KindCount]) -> String {
    let counts = kinds.iter().map(|it| {
        let count = human::thousandths(permille_of(it));
        format!("{count} {}", it.kind)
    });
    counts.collect::<Vec<_>>().join(", ")
}

/// Returns the numbers of a message.
pub(crate) fn kinds_of(counts: Option<&DeviceCounts>) -> &[KindCount] {
    counts.map_or(&[], |counts| &counts.kinds)
}

/// Returns a number of devices in thousandths.
pub(crate) fn permille_of(count: &KindCount) -> u64 {
    u64::from(WHOLE_PERMILLE) * u64::from(count.count) + u64::from(count.permille)
}
