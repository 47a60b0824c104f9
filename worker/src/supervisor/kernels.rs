//! The directories of compiled kernels, one for each tenant.

use std::{
    ffi::OsStr,
    fs::DirBuilder,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::DirBuilderExt,
    },
    path::Path,
};

use tensord_proto::content::hash;
use tracing::warn;

/// Makes the directory for a tenant's compiled kernels under `root`. Each tenant has its own, as
/// a program that has taken its process over could leave kernels that read its successors'
/// tensors. Returns `None`, with a line in the log, if the system refuses.
pub(super) fn tenant_kernels(root: &[u8], tenant: &str) -> Option<Vec<u8>> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let name = match !tenant.is_empty() && tenant.len() <= 64 && tenant.chars().all(is_plain) {
        true => tenant.to_owned(),
        // No plain name has a dot.
        false => format!(
            "tenant.{:032x}",
            u128::from_le_bytes(hash(tenant.as_bytes()))
        ),
    };
    let path = Path::new(OsStr::from_bytes(root)).join(name);
    match DirBuilder::new().recursive(true).mode(0o700).create(&path) {
        Ok(()) => Some(path.into_os_string().into_vec()),
        Err(e) => {
            warn!(
                "compiled kernels are not kept, as {} cannot be made: {e}",
                path.display()
            );
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn each_tenant_has_a_directory_of_its_own() {
        let root = tempfile::tempdir().unwrap();
        let bytes = root.path().as_os_str().as_bytes();
        let tenants = [
            "default",
            "team-1",
            "..",
            "a/b",
            "a.b",
            "tenant.a",
            "",
            &"x".repeat(99),
        ];
        let mut made: Vec<_> = tenants
            .iter()
            .map(|tenant| tenant_kernels(bytes, tenant).unwrap())
            .collect();
        assert_eq!(made[0], root.path().join("default").as_os_str().as_bytes());
        for path in &made {
            let path = Path::new(OsStr::from_bytes(path));
            assert_eq!(path.parent(), Some(root.path()));
            let mode = path.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700);
        }
        made.sort();
        made.dedup();
        assert_eq!(made.len(), tenants.len());
        assert_eq!(tenant_kernels(b"/proc/none", "default"), None);
    }
}
