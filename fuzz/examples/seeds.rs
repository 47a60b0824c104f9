//! Writes the seeds of all targets to `corpus/`, where `cargo fuzz` looks.

use std::{fs, io, path::Path};

fn main() -> io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (target, _) in tensord_fuzz::TARGETS {
        let folder = corpus.join(target);
        fs::create_dir_all(&folder)?;
        let seeds = tensord_fuzz::seeds::of(target);
        for (i, seed) in seeds.iter().enumerate() {
            fs::write(folder.join(format!("seed-{i:03}")), seed)?;
        }
        println!("{target}: {} seeds", seeds.len());
    }
    Ok(())
}
