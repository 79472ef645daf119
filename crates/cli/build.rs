//! Tells the command which commit it was built from, and the linker to keep one of equal functions.

use std::process::Command;

fn main() {
    if std::env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        // Of a generic function, the instances for several types are often the same code. rust-lld is the linker of this target.
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
    }
    let git = |words: &[&str]| {
        let output =
            Command::new("git").args(words).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=POLDER_COMMIT={commit}");
    // It grows with each commit, and each checkout of one.
    match git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
        Some(log) => println!("cargo::rerun-if-changed={log}"),
        None => println!("cargo::rerun-if-changed=build.rs"),
    }
}
