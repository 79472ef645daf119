//! Holds the table of docs/architecture.md: who may import whom, and which rooms are free of unsafe code.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Each room with the rooms that it may import. Lower never knows higher.
const TABLE: &[(&str, &[&str])] = &[
    ("platform", &[]),
    ("schedule", &[]),
    ("mem", &[]),
    ("kernels", &[]),
    ("place", &["platform"]),
    ("linux", &["platform"]),
    ("agent", &["linux", "place", "platform"]),
    ("pool", &["mem", "kernels", "schedule", "platform"]),
    ("offload", &["mem", "kernels"]),
    ("sim", &["platform", "schedule", "place"]),
    ("attach", &["pool", "mem", "kernels", "schedule", "linux", "platform"]),
    ("ofi", &["attach", "pool", "mem", "kernels", "schedule"]),
    ("capi", &["attach", "pool", "mem", "kernels", "schedule"]),
    ("mpi", &["attach", "pool", "mem", "kernels", "schedule"]),
    ("mpi-mpich", &["mpi"]),
    ("mpi-openmpi", &["mpi"]),
    (
        "python",
        &["attach", "offload", "linux", "pool", "mem", "kernels", "schedule", "place", "sim", "platform"],
    ),
    ("lab", &["attach", "pool", "mem", "kernels", "linux"]),
    (
        "cli",
        &[
            "agent", "attach", "linux", "place", "offload", "pool", "mem", "kernels", "schedule", "sim",
            "platform",
        ],
    ),
];

const WITHOUT_UNSAFE: &[&str] =
    &["platform", "schedule", "place", "linux", "agent", "attach", "pool", "sim", "cli"];

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

/// The imports of the table that do not follow from others, as arrows of the picture.
fn arrows() -> BTreeSet<(&'static str, &'static str)> {
    let of = |room: &str| TABLE.iter().find(|(name, _)| *name == room).expect("a room of the table").1;
    let arrow = |&(room, imports): &(&'static str, &'static [&'static str])| {
        let follows = |import: &str| imports.iter().any(|other| of(other).contains(&import));
        imports.iter().filter(|import| !follows(import)).map(|import| (room, *import)).collect::<Vec<_>>()
    };
    TABLE.iter().flat_map(arrow).collect()
}

#[test]
fn the_picture_of_the_rooms_is_the_table() {
    let page = include_str!("../../../docs/architecture.md");
    let (_, rest) =
        page.split_once("```mermaid\nflowchart TD\n").expect("docs/architecture.md has a picture");
    let lines = rest.lines().take_while(|line| *line != "```");
    let drawn: BTreeSet<_> = lines
        .flat_map(|line| {
            let (from, to) = line.trim().split_once(" --> ").expect("an arrow");
            from.split(" & ").flat_map(|from| to.split(" & ").map(move |to| (from, to))).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(drawn, arrows());
}

/// The crates that a build of `packages` takes, as one invocation unifies their features.
fn crates_of(packages: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO"));
    command.args(["tree", "--offline", "--edges=normal", "--prefix=none", "--format={p}"]);
    command.args(packages.iter().map(|package| format!("--package=polder-{package}")));
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo tree runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("cargo tree prints text")
}

/// The builds of `scripts/dist.sh`, one a line.
#[test]
fn the_model_is_in_the_command_and_in_no_library_that_users_load() {
    let has_model = |packages: &[&str]| crates_of(packages).contains("corosensei");
    assert!(has_model(&["cli"]), "`polder verify` needs the model");
    let dist = include_str!("../../../scripts/dist.sh");
    // The simulator is built with them, for the Python module.
    let libraries = ["ofi", "capi", "mpi-mpich", "mpi-openmpi", "sim"];
    let together = libraries.map(|library| format!("-p polder-{library}")).join(" ");
    assert!(
        dist.contains(&format!("cargo build --release {together}\n")),
        "dist.sh builds other libraries together"
    );
    assert!(!has_model(&libraries), "{libraries:?}");
    assert!(!has_model(&["python"]), "polder._core");
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

/// Which module of a crate imports which others, by the `crate::` paths in its files; children count as their parent.
fn imports(sources: &std::path::Path) -> BTreeMap<String, BTreeSet<String>> {
    let files = |folder: &std::path::Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let stem = |file: &std::path::Path| file.file_stem().unwrap().to_str().unwrap().to_owned();
    let modules: BTreeSet<_> = files(sources).iter().map(|file| stem(file)).collect();
    let mut imports: BTreeMap<_, _> = modules.iter().map(|name| (name.clone(), BTreeSet::new())).collect();
    for file in files(sources) {
        let module = stem(&file);
        let texts = if file.is_dir() { files(&file) } else { vec![file] };
        for text in texts.iter().map(|file| std::fs::read_to_string(file).unwrap()) {
            let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            for path in code.split("crate::").skip(1) {
                let names = match path.strip_prefix('{') {
                    Some(list) => list[..list.find('}').unwrap_or(0)].split(',').collect(),
                    None => vec![path],
                };
                let first = |name: &str| {
                    let name = name.trim_start();
                    let end = name.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
                    name[..end.unwrap_or(name.len())].to_owned()
                };
                let used =
                    names.into_iter().map(first).filter(|name| modules.contains(name) && *name != module);
                imports.entry(module.clone()).or_default().extend(used);
            }
        }
    }
    imports
}

#[test]
fn no_modules_of_the_provider_import_each_other_in_a_ring() {
    let sources = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../ofi/src");
    let mut imports = imports(&sources);
    assert!(imports.values().map(BTreeSet::len).sum::<usize>() > 50);
    imports.remove("tests");
    // Modules that import nothing that is left can go, one after the other.
    while let Some(lowest) = imports.iter().find(|(_, used)| used.is_empty()).map(|(name, _)| name.clone()) {
        imports.remove(&lowest);
        for used in imports.values_mut() {
            used.remove(&lowest);
        }
    }
    assert!(imports.is_empty(), "{imports:?}");
}
