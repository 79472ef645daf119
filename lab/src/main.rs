//! The first process of a guest: mounts what a kernel offers, runs a scenario, prints its checks, and powers off.
//!
//! `polder-guest service CGROUP BYTES HOT` is a service: it fills BYTES of memory and goes on touching the first HOT.
//! `polder-guest act WORDS...` is a process in a pool, and `polder-guest rsh HOST WORDS...` starts one on another host of a rack.
//! `polder-guest unbind WHAT` takes the dax device away from a range.
#![forbid(unsafe_code)]

mod acts;
mod health;
mod host;
mod large;
mod machine;
mod slow;
mod sockets;
mod stripes;
mod tiers;
mod unbind;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["service", cgroup, bytes, hot] => machine::serve(cgroup, bytes, hot),
        ["act", ref words @ ..] => acts::run(words),
        ["rsh", ref words @ ..] => host::rsh(words),
        ["unbind", what] => unbind::run(what),
        _ if std::process::id() != 1 => {
            eprintln!(
                "polder-guest is the first process of a guest of the lab; start the lab with: make lab"
            );
            ExitCode::FAILURE
        }
        _ => {
            machine::mount_all();
            // The kernel hands the words of its command line that it does not know to its first process.
            if let Ok(number) = std::env::var("rack") {
                let served =
                    number.parse().map_err(|error| format!("rack={number}: {error}")).and_then(host::serve);
                println!("lab: FAILED: {served:?}");
                return machine::power_off();
            }
            match scenarios() {
                Ok(checks) => println!("lab: {checks} checks passed"),
                Err(error) => println!("lab: FAILED: {error}"),
            }
            machine::power_off()
        }
    }
}

/// What is run in a guest that is no host of a rack.
fn scenarios() -> Result<u32, polder_lab::check::Failed> {
    if std::env::var_os("sockets").is_some() {
        return sockets::run();
    }
    if std::env::var_os("large").is_some() {
        return large::run();
    }
    let Ok(kind) = std::env::var("slow") else { return Ok(tiers::run(false)? + stripes::run()?) };
    slow::bring(&kind)?;
    match kind.as_str() {
        // Each access to it is emulated, which takes long.
        "cxl" => Ok(health::run()? + tiers::run(true)?),
        _ => tiers::run(false),
    }
}
