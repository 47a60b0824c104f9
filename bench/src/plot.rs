//! `tensord-bench plot`: charts of the main figures, as SVG.
//!
//! ```text
//! files of JSON ─► figures (what is in them) ─► chart (where things stand) ─► svg (text)
//! ```

mod chart;
mod curve;
mod figures;
mod svg;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

use self::curve::Curve;

/// Writes a chart of each of the main figures in `files` to `dir`, and the losses of a
/// `tensord demo --chaos` with its kills, and returns the paths.
///
/// A file may hold more than JSON; its last line that is a JSON object counts. If several
/// files have the same bench, the last one counts.
///
/// # Errors
///
/// If a file cannot be read or holds no figures, or if a chart cannot be written.
pub(crate) fn plot(files: &[PathBuf], dir: &Path) -> Result<Vec<PathBuf>> {
    let mut all = Value::Object(Default::default());
    for file in files {
        let figures = read(file).with_context(|| format!("cannot plot {}", file.display()))?;
        for (bench, found) in figures.as_object().into_iter().flatten() {
            all[bench] = found.clone();
        }
    }
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let charts = [
        ("step.svg", figures::step(&all)),
        ("bulk.svg", figures::bulk(&all)),
        ("rtt.svg", figures::rtt(&all)),
        ("allreduce.svg", figures::allreduce(&all)),
        ("ddp.svg", figures::ddp(&all)),
    ];
    let mut written = Vec::new();
    for (name, chart) in charts {
        let Some(chart) = chart else { continue };
        written.push(write(dir, name, &chart.draw())?);
    }
    if let Some(curve) = all.get("chaos") {
        let curve = Curve::deserialize(curve).context("the losses cannot be read")?;
        written.push(write(dir, "chaos.svg", &curve.draw()?)?);
    }
    ensure!(
        !written.is_empty(),
        "the files contain no figures of step, bulk, rtt, allreduce or ddp, and are not the chaos.json of `tensord demo --chaos`"
    );
    Ok(written)
}

/// Writes a picture to a file of `dir`, and returns the file's path.
fn write(dir: &Path, name: &str, picture: &str) -> Result<PathBuf> {
    let path = dir.join(name);
    std::fs::write(&path, picture).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn read(file: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(file)?;
    let whole = serde_json::from_str(&text).ok().filter(Value::is_object);
    let object = |line: &str| serde_json::from_str(line).ok().filter(Value::is_object);
    whole
        .or_else(|| text.lines().rev().find_map(object))
        .context("the file contains no JSON object")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_json_line_is_plotted() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let first = write(
            "a",
            "step: a table\n{\"step\":{\"mlp\":{\"local_ms\":1.5}}}\n",
        );
        let second = write("b", "{\"step\":{\"mlp\":{\"local_ms\":2.5}}}");
        let written = plot(&[first, second], dir.path()).unwrap();
        assert_eq!(written, [dir.path().join("step.svg")]);
        let picture = std::fs::read_to_string(&written[0]).unwrap();
        assert!(
            picture.contains(">2.5<") && !picture.contains(">1.5<"),
            "{picture}"
        );
    }

    #[test]
    fn files_without_figures_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("empty");
        std::fs::write(&path, "no figures").unwrap();
        let error = format!(
            "{:#}",
            plot(std::slice::from_ref(&path), dir.path()).unwrap_err()
        );
        assert!(
            error.contains("empty") && error.contains("no JSON"),
            "{error}"
        );
        std::fs::write(&path, "{\"ops\":{}}").unwrap();
        assert!(plot(&[path], dir.path()).is_err());
    }
}
