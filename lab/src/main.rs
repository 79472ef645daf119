//! The first process of a guest: mounts what a kernel offers, runs a scenario, prints its checks, and powers off.
//!
//! `polder-guest service CGROUP BYTES HOT` is a service: it fills BYTES of memory and goes on touching the first HOT.
#![forbid(unsafe_code)]

mod machine;
mod stripes;
mod tiers;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["service", cgroup, bytes, hot] => machine::serve(cgroup, bytes, hot),
        _ if std::process::id() != 1 => {
            eprintln!(
                "polder-guest is the first process of a guest of the lab; start the lab with: make lab"
            );
            ExitCode::FAILURE
        }
        _ => {
            machine::mount_all();
            match tiers::run().and_then(|checks| Ok(checks + stripes::run()?)) {
                Ok(checks) => println!("lab: {checks} checks passed"),
                Err(error) => println!("lab: FAILED: {error}"),
            }
            machine::power_off()
        }
    }
}
