//! `polder probe`: what a machine is measured to take, as a file.

use std::process::{Command, Output};

use polder_mem::testing::Scratch;
use polder_platform::Platform;

fn polder(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polder"));
    command.env("POLDER_CONFIG", "/dev/null").args(arguments).output().unwrap()
}

fn stdout_of(arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = polder(arguments);
    assert!(status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = polder(arguments);
    assert!(!status.success(), "{arguments:?}");
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

#[test]
fn probe_writes_a_machine_that_the_planner_reads_and_replaces_none() {
    let scratch = Scratch::new();
    let out = scratch.path().join("platform.toml");
    let path = out.to_str().unwrap();
    let disk = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let card = scratch.path().join("card");
    std::fs::File::create(&card).unwrap().set_len(64 << 20).unwrap();
    let card = card.to_str().unwrap();
    let written = stdout_of(&["probe", "--out", path, "--disk", disk.to_str().unwrap(), "--dax", card]);
    assert_eq!(written, "", "the file says it all");
    let tiers = Platform::load(path).unwrap().local_tiers;
    assert!(tiers["dram"].node.is_some() && tiers["dram"].device.is_none());
    assert_eq!((tiers["card"].node, tiers["card"].device.as_deref()), (None, Some(card)));
    assert_eq!(tiers["card"].capacity.value(), f64::from(64 << 20));
    for tier in tiers.values() {
        let (read, write) = tier.rates(None);
        assert!(tier.latency.value() > 0.0 && read.value() > 0.0 && write.value() > 0.0);
        assert_eq!(tier.threads[0].threads, 1);
    }
    let sharing = Platform::load(path).unwrap().sharing.unwrap();
    let names: Vec<_> = sharing.exchange.keys().map(String::as_str).collect();
    assert_eq!(names, ["coherent", "loopback", "software"]);
    let cores = Platform::load(path).unwrap().rack.into_values().next();
    // Python is not beside a test's binary, so products may be missing; what is there can be computed with.
    assert!(cores.is_none_or(|rack| rack.accelerator.compute.fp32.is_some()));
    assert!(sharing.exchange["software"].write.is_some() && sharing.exchange["coherent"].write.is_none());
    let measured = &Platform::load(path).unwrap().disk["tmp"];
    assert_eq!(std::path::Path::new(&measured.folder), disk.canonicalize().unwrap());
    let said = refused(&["probe", "--out", path]);
    assert!(said.contains("exists: --force replaces it"), "{said}");
    let said = refused(&["probe", "--out", path, "--force", "--disk", "/dev/shm"]);
    assert!(said.contains("/dev/shm: this folder lies in memory (tmpfs)"), "{said}");
}

#[test]
fn a_folder_and_a_link_that_leads_nowhere_are_no_file_to_write() {
    let scratch = Scratch::new();
    let folder = scratch.path().to_str().unwrap();
    let said = refused(&["probe", "--force", "--out", folder]);
    assert!(said.contains(&format!("{folder} is a folder; name a file in it with --out")), "{said}");
    let link = scratch.path().join("platform.toml");
    std::os::unix::fs::symlink(scratch.path().join("nowhere"), &link).unwrap();
    let said = refused(&["probe", "--out", link.to_str().unwrap()]);
    assert!(said.contains("exists: --force replaces it") && link.is_symlink(), "{said}");
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 1);
}
