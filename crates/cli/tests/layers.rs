//! Holds the table of docs/architecture.md: who may import whom, and which rooms are free of unsafe code.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

/// Each room with the rooms that it may import. Lower never knows higher.
const TABLE: &[(&str, &[&str])] = &[
    ("platform", &[]),
    ("schedule", &[]),
    ("mem", &[]),
    ("kernels", &[]),
    ("pool", &["mem", "kernels", "schedule"]),
    ("sim", &["platform", "schedule"]),
    ("ofi", &["pool", "mem", "kernels", "schedule"]),
    ("capi", &["pool", "mem", "kernels", "schedule"]),
    ("mpi", &["pool", "mem", "kernels", "schedule"]),
    ("mpi-mpich", &["mpi"]),
    ("mpi-openmpi", &["mpi"]),
    ("python", &["pool", "mem", "kernels", "schedule", "sim", "platform"]),
    ("cli", &["pool", "mem", "kernels", "schedule", "sim", "platform"]),
];

const WITHOUT_UNSAFE: &[&str] = &["platform", "schedule", "pool", "sim", "cli"];

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo metadata runs");
    serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON")
}

/// The rooms of the workspace, each with the rooms that it imports outside its tests.
fn rooms() -> BTreeMap<String, Vec<String>> {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().expect("packages");
    packages
        .iter()
        .map(|package| {
            let imports = package["dependencies"].as_array().expect("dependencies");
            let imports = imports
                .iter()
                .filter(|import| import["kind"].as_str() != Some("dev"))
                .filter_map(|import| import["name"].as_str()?.strip_prefix("polder-").map(str::to_owned))
                .collect();
            let name = package["name"].as_str().expect("name").trim_start_matches("polder-");
            (name.to_owned(), imports)
        })
        .collect()
}

#[test]
fn no_room_imports_a_room_above_it() {
    let rooms = rooms();
    assert!(rooms.len() >= TABLE.len(), "the workspace has fewer rooms than the table: {rooms:?}");
    for (room, imports) in &rooms {
        let (_, allowed) = TABLE.iter().find(|(name, _)| name == room).unwrap_or_else(|| {
            panic!("{room} is no room of the table: add it to docs/architecture.md and here")
        });
        for import in imports {
            assert!(allowed.contains(&import.as_str()), "{room} imports {import}; it may import {allowed:?}");
        }
    }
}

#[test]
fn rooms_without_unsafe_code_forbid_it() {
    for room in WITHOUT_UNSAFE {
        let root = if *room == "cli" { "main.rs" } else { "lib.rs" };
        let path = format!("{}/../{room}/src/{root}", env!("CARGO_MANIFEST_DIR"));
        let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(source.contains("#![forbid(unsafe_code)]"), "{path} does not forbid unsafe code");
    }
}
