//! `polder probe`: measures this machine, and writes the file that the planner reads.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use polder_measure::machine::measured;

use crate::Failure;

/// Measures this machine.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The file to write.
    #[arg(long, short, default_value = "platform.toml", value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    out: PathBuf,
    /// Replace an existing file.
    #[arg(long)]
    force: bool,
    /// Measure also the disk of this folder, as a tier for `polder.offload`.
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
    disk: Vec<PathBuf>,
    /// Measure also this dax device, as a tier for `polder.offload`. What is written there goes to bytes that no tensor has.
    #[arg(long, value_name = "DEVICE", value_hint = clap::ValueHint::FilePath)]
    dax: Vec<PathBuf>,
}

/// Measures, and writes the file.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let out = &arguments.out;
    let wrong = |error: std::io::Error| Failure(format!("{}: {error}", out.display()));
    if out.is_dir() {
        return Err(Failure(format!("{} is a folder; name a file in it with --out", out.display())));
    }
    // A link counts, also one that leads nowhere: it is the user's.
    let is_new = out.symlink_metadata().is_err();
    if !is_new && !arguments.force {
        return Err(Failure(format!("{} exists: --force replaces it, --out names another", out.display())));
    }
    // Measuring takes half a minute: what cannot be written is found before.
    fs::OpenOptions::new().append(true).create(true).open(out).map_err(wrong)?;
    if is_new {
        fs::remove_file(out).map_err(wrong)?;
    }
    let begin = Instant::now();
    let (text, noise) = measured(&arguments.disk, &arguments.dax)?;
    polder_front::replace(out, &text).map_err(wrong)?;
    let noise = noise.map_or_else(String::new, |noise| {
        format!("; half of the samples of a kernel lay within {:.1}% of their median", 100.0 * noise)
    });
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!("polder: measured in {seconds:.0} s{noise}; it is written to {}", out.display());
    Ok(())
}
