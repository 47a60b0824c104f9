//! Errors of loading and saving weights.

use std::{fmt, path::PathBuf};

use burn_store::{ApplyError, ApplyResult};

/// Most names that an error lists of each kind.
const LISTED: usize = 16;

/// Why weights could not be loaded or saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The extension of a file names no format.
    #[error(
        "cannot determine the format of {}: its extension {extension:?} is none of .safetensors, .bpk, \
         and, for loading, .pt and .pth; rename the file, or use a store of its format by `load_from` or `save_into`",
        .path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// The extension, without its dot.
        extension: String,
    },
    /// The format can only be loaded.
    #[error(
        "cannot save {}: PyTorch's format can only be loaded; save as .safetensors, which other \
         frameworks read, too",
        .path.display()
    )]
    LoadOnly {
        /// The file.
        path: PathBuf,
    },
    /// The weights could not be read, or their store refuses them.
    #[error("cannot load the weights in {origin}: {reason}")]
    Load {
        /// The file, or the store.
        origin: String,
        /// The store's error.
        reason: String,
    },
    /// The weights have other parameters than the module.
    #[error("the weights in {origin} do not fit the module: {mismatch}")]
    Mismatch {
        /// The file.
        origin: String,
        /// Which parameters.
        mismatch: WeightsMismatch,
    },
    /// The weights could not be written.
    #[error("cannot save the weights in {target}: {reason}")]
    Save {
        /// The file, or the store.
        target: String,
        /// The store's error.
        reason: String,
    },
    /// A parameter could not be sent to its device, or read from it.
    #[error("cannot move the parameter {parameter}: {reason}")]
    Parameter {
        /// The parameter's name in the module.
        parameter: String,
        /// Why.
        reason: String,
    },
}

/// The parameters in which weights differ from a module, by name. It prints the first of each
/// kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct WeightsMismatch {
    /// Parameters that do not fit: of each, its name, and what differs.
    pub unfit: Vec<(String, String)>,
    /// Parameters of the module that the weights do not have.
    pub missing: Vec<String>,
    /// What the weights have, and the module does not. That alone is no error.
    pub unexpected: Vec<String>,
}

impl From<ApplyResult> for WeightsMismatch {
    fn from(result: ApplyResult) -> Self {
        Self {
            unfit: result.errors.into_iter().map(unfit).collect(),
            missing: result.missing.into_iter().map(|(path, _)| path).collect(),
            unexpected: result.unused,
        }
    }
}

fn unfit(error: ApplyError) -> (String, String) {
    match error {
        ApplyError::ShapeMismatch {
            path,
            expected,
            found,
        } => {
            let why = format!(
                "the module has the shape {:?}, the file {:?}",
                expected.as_slice(),
                found.as_slice()
            );
            (path, why)
        }
        ApplyError::DTypeMismatch {
            path,
            expected,
            found,
        } => {
            let (expected, found) = (expected.name(), found.name());
            (path, format!("the module has {expected}, the file {found}"))
        }
        ApplyError::AdapterError { path, message } | ApplyError::LoadError { path, message } => {
            (path, message)
        }
    }
}

impl fmt::Display for WeightsMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unfit = self
            .unfit
            .iter()
            .map(|(name, why)| format!("{name}: {why}"));
        let parts = [
            listed("", "; ", unfit),
            listed("missing: ", ", ", self.missing.iter().cloned()),
            listed("not in the module: ", ", ", self.unexpected.iter().cloned()),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join("; "))
    }
}

/// Returns a list of at most [`LISTED`] items, or `None` for an empty one.
fn listed(
    title: &str,
    separator: &str,
    items: impl ExactSizeIterator<Item = String>,
) -> Option<String> {
    let more = items.len().saturating_sub(LISTED);
    let items: Vec<_> = items.take(LISTED).collect();
    let end = match more {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!items.is_empty()).then(|| format!("{title}{}{end}", items.join(separator)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_names_each_parameter() {
        let result = ApplyResult {
            applied: vec!["fine".into()],
            skipped: Vec::new(),
            missing: vec![("head.bias".into(), "Struct:Linear".into())],
            unused: vec!["head.offset".into()],
            errors: vec![
                ApplyError::ShapeMismatch {
                    path: "a.weight".into(),
                    expected: [2, 3].into(),
                    found: [3, 2].into(),
                },
                ApplyError::LoadError {
                    path: "b.weight".into(),
                    message: "cut short".into(),
                },
            ],
        };
        let expected = "a.weight: the module has the shape [2, 3], the file [3, 2]; \
                        b.weight: cut short; missing: head.bias; not in the module: head.offset";
        assert_eq!(WeightsMismatch::from(result).to_string(), expected);
    }

    #[test]
    fn long_lists_are_cut() {
        let missing: Vec<_> = (0..LISTED + 3).map(|i| format!("p{i}")).collect();
        let mismatch = WeightsMismatch {
            missing,
            ..WeightsMismatch::default()
        };
        let text = mismatch.to_string();
        assert!(text.starts_with("missing: p0, p1, "), "{text}");
        assert!(text.ends_with("p15 and 3 more"), "{text}");
    }
}
