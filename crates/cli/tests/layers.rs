//! Holds the table of docs/architecture.md: what each room imports, and which rooms are free of unsafe code. Holds too that no modules of a room
//! import each other in a ring.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Each room with the rooms that it imports outside its tests. Lower never knows higher.
const TABLE: &[(&str, &[&str])] = &[
    ("platform", &[]),
    ("schedule", &[]),
    ("mem", &[]),
    ("kernels", &[]),
    ("place", &["platform"]),
    ("linux", &[]),
    ("rehearse", &[]),
    ("border", &[]),
    ("agent", &["linux", "place"]),
    ("offload", &["mem", "kernels"]),
    ("pool", &["mem", "kernels", "schedule", "platform"]),
    ("sim", &["platform", "schedule", "place"]),
    ("attach", &["pool", "mem", "platform"]),
    ("ofi", &["attach", "border", "pool", "mem"]),
    ("capi", &["attach", "border", "pool", "mem"]),
    ("mpi", &["attach", "border", "pool", "mem"]),
    ("mpi-mpich", &["mpi"]),
    ("mpi-openmpi", &["mpi"]),
    ("mpi-abi", &["mpi"]),
    (
        "python",
        &["attach", "offload", "linux", "pool", "mem", "kernels", "schedule", "place", "sim", "platform"],
    ),
    ("lab", &["attach", "offload", "pool", "mem", "kernels", "linux"]),
    ("front", &["platform"]),
    ("plan", &["front", "agent", "sim", "platform"]),
    ("measure", &["front", "attach", "linux", "offload", "pool", "mem", "platform"]),
    ("cli", &["plan", "measure", "front", "agent", "attach", "linux", "offload", "pool", "mem", "platform"]),
    (
        "dev",
        &[
            "cli", "plan", "measure", "front", "agent", "attach", "linux", "place", "offload", "pool", "mem",
            "kernels", "schedule", "sim", "platform",
        ],
    ),
];

const WITHOUT_UNSAFE: &[&str] = &[
    "platform", "schedule", "place", "linux", "agent", "attach", "pool", "sim", "front", "plan", "measure",
    "cli", "dev",
];

/// What cargo knows of the packages that `of` asks for.
fn metadata(of: &str) -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--offline", of])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo metadata runs");
    let Ok(Value::Object(mut all)) = serde_json::from_slice(&output.stdout) else {
        panic!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr))
    };
    match all.remove("packages") {
        Some(Value::Array(packages)) => packages,
        other => panic!("packages: {other:?}"),
    }
}

/// A room of the workspace.
struct Room {
    name: String,
    /// Where its `src` lies.
    folder: PathBuf,
    /// The crates that its Cargo.toml names, but for its tests, as its sources name them.
    declared: BTreeSet<String>,
    /// The code of its sources without comments and tests.
    code: String,
}

impl Room {
    fn of(package: &Value) -> Self {
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        let named =
            |it: &Value| it["rename"].as_str().or(it["name"].as_str()).expect("a name").replace('-', "_");
        let declared =
            dependencies.iter().filter(|it| it["kind"].as_str() != Some("dev")).map(named).collect();
        let manifest = Path::new(package["manifest_path"].as_str().expect("a path"));
        let folder = manifest.parent().expect("in a folder").to_owned();
        let mut files = rust_files(&folder.join("src"));
        files.extend(Some(folder.join("build.rs")).filter(|file| file.exists()));
        let name = package["name"].as_str().expect("a name").trim_start_matches("polder-").to_owned();
        Self { name, folder, declared, code: files.iter().map(|file| code_of(file)).collect() }
    }

    /// Whether the sources name a crate.
    fn uses(&self, name: &str) -> bool {
        self.code.match_indices(name).any(|(at, _)| {
            let before = self.code[..at].chars().next_back().unwrap_or(' ');
            let after = &self.code[at + name.len()..];
            !(before.is_alphanumeric() || before == '_')
                && ["::", "!", " as ", ";"].iter().any(|end| after.starts_with(end))
        })
    }
}

fn rooms() -> Vec<Room> {
    metadata("--no-deps").iter().map(Room::of).collect()
}

/// The source files below a folder, those of tests left out.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files = vec![];
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        match path.file_stem().and_then(|stem| stem.to_str()) {
            Some("tests" | "testing") => {}
            _ if path.is_dir() => files.extend(rust_files(&path)),
            _ if path.extension().is_some_and(|it| it == "rs") => files.push(path),
            _ => {}
        }
    }
    files
}

/// A file's code without comments, up to its tests.
fn code_of(file: &Path) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.starts_with("//")).collect();
    let begins_tests = |pair: &[&str]| {
        let is_of_tests = pair[0].starts_with("#[cfg(") && pair[0].contains("test");
        is_of_tests && pair[1].contains("mod ") && pair[1].ends_with('{')
    };
    let end = lines.windows(2).position(begins_tests).unwrap_or(lines.len());
    lines[..end].join("\n") + "\n"
}

#[test]
fn each_room_declares_imports_and_may_import_the_same_rooms() {
    let rooms = rooms();
    for Room { name, declared, .. } in &rooms {
        let declared: BTreeSet<_> =
            declared.iter().filter_map(|it| Some(it.strip_prefix("polder_")?.replace('_', "-"))).collect();
        let (_, allowed) = TABLE.iter().find(|(room, _)| room == name).unwrap_or_else(|| {
            panic!("{name} is no room of the table: add it to docs/architecture.md and here")
        });
        let allowed: BTreeSet<_> = allowed.iter().map(|&room| room.to_owned()).collect();
        assert_eq!(declared, allowed, "{name}: its Cargo.toml beside the table");
    }
    assert_eq!(rooms.len(), TABLE.len(), "the table has a room that is not there");
}

#[test]
fn no_cargo_toml_names_a_crate_that_no_source_uses() {
    let rooms = rooms();
    let unused = rooms.iter().flat_map(|room| {
        room.declared.iter().filter(|it| !room.uses(it)).map(move |it| (room.name.as_str(), it.as_str()))
    });
    assert_eq!(unused.collect::<Vec<_>>(), []);
}

#[test]
fn the_list_of_imports_on_the_page_is_the_table() {
    let page = include_str!("../../../docs/architecture.md");
    let (_, rest) =
        page.split_once("`crates/cli/tests/layers.rs` checks:\n\n```\n").expect("the page has a list");
    let rows = rest.lines().take_while(|line| *line != "```").map(|line| {
        // Behind the level.
        let (room, imports) = line[11..].trim().split_once(' ').expect("a room and what it imports");
        let imports = imports.split(',').map(str::trim).filter(|import| *import != "none");
        (room, imports.collect::<BTreeSet<_>>())
    });
    let table = TABLE.iter().map(|(room, imports)| (*room, imports.iter().copied().collect()));
    assert_eq!(rows.collect::<BTreeMap<_, _>>(), table.collect());
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
    command.args(["tree", "--offline", "--edges=normal", "--prefix=none", "--format={p} {f}"]);
    command.args(packages.iter().map(|package| format!("--package=polder-{package}")));
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo tree runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("cargo tree prints text")
}

/// Licences that software under Apache-2.0 can ship.
const LICENCES: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "MIT",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "Unicode-3.0",
    "Zlib",
];

/// Whether an SPDX expression leaves the choice of one of [`LICENCES`] in each of its parts. An `AND` inside an `OR` counts as one around it,
/// so that such an expression is refused rather than misread.
fn is_allowed(expression: &str) -> bool {
    let alternatives = |part: &str| part.replace(['(', ')'], " ").replace('/', " OR ");
    let allowed = |licence: &str| LICENCES.contains(&licence.trim());
    expression.split(" AND ").all(|part| alternatives(part).split(" OR ").any(allowed))
}

#[test]
fn what_comes_from_outside_is_of_the_registry_in_a_version_and_under_a_licence_that_can_be_shipped() {
    assert!(is_allowed("(MIT OR GPL-3.0-only) AND Unicode-3.0") && is_allowed("Unlicense/MIT"));
    assert!(!is_allowed("MIT AND GPL-3.0-only") && !is_allowed("MIT OR (Zlib AND GPL-3.0-only)"));
    assert!(!is_allowed("LGPL-2.1-or-later") && !is_allowed(""));
    const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";
    let packages = metadata("--filter-platform=x86_64-unknown-linux-gnu");
    let (outside, ours): (Vec<_>, Vec<_>) = packages.iter().partition(|it| it["source"].is_string());
    assert_eq!(ours.len(), TABLE.len(), "a package without a registry is none of ours");
    for package in outside {
        let (name, licence) = (&package["name"], package["license"].as_str().unwrap_or_default());
        assert_eq!(package["source"], REGISTRY, "{name}");
        assert!(is_allowed(licence), "{name}: its licence {licence:?} is none that can be shipped");
    }
    for package in ours {
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let is_any = dependency["req"] == "*" && dependency["path"].is_null();
            assert!(!is_any, "{}: {} in any version", package["name"], dependency["name"]);
        }
    }
}

#[test]
fn the_model_and_what_kills_are_in_no_program_and_no_library_that_users_load() {
    let has_model = |packages: &[&str]| crates_of(packages).contains("corosensei");
    assert!(has_model(&["dev"]), "`polder-dev verify` needs the model");
    let dist = include_str!("../../../scripts/dist.sh");
    for (installed, profile) in [
        (&["cli"][..], "--profile dist"),
        (&["rehearse", "ofi", "mpi-mpich", "mpi-openmpi", "mpi-abi", "capi", "sim"][..], "--release"),
        (&["python"][..], "--release"),
    ] {
        let together =
            installed.iter().map(|package| format!("-p polder-{package}")).collect::<Vec<_>>().join(" ");
        assert!(
            dist.contains(&format!("cargo build {profile} {together}\n")) || installed == ["python"],
            "dist.sh builds others together"
        );
        assert!(!has_model(installed), "{installed:?}");
        let features = crates_of(installed);
        let mem =
            features.lines().find(|line| line.starts_with("polder-mem ")).expect("all of them have memory");
        assert!(!mem.contains("instruments"), "{installed:?}: {mem}");
        let attach = features.lines().find(|line| line.starts_with("polder-attach ")).expect("a session");
        assert!(!attach.contains("instruments"), "{installed:?}: {attach}");
    }
}

#[test]
fn the_plan_front_needs_no_memory_that_hosts_share() {
    let crates = crates_of(&["plan"]);
    assert!(crates.contains("polder-sim") && !crates.contains("polder-mem"), "{crates}");
}

#[test]
fn rooms_without_unsafe_code_forbid_it() {
    for room in WITHOUT_UNSAFE {
        let roots: &[&str] = if *room == "dev" { &["lib.rs", "main.rs"] } else { &["lib.rs"] };
        for root in roots {
            let path = format!("{}/../{room}/src/{root}", env!("CARGO_MANIFEST_DIR"));
            let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(source.contains("#![forbid(unsafe_code)]"), "{path} does not forbid unsafe code");
        }
    }
}

/// Rings of modules that stand, with the reason.
const RINGS: &[(&str, &[&str], &str)] = &[
    (
        "pool",
        &["collectives", "group"],
        "collectives are calls of a group, which keeps what they work with from one to the next",
    ),
    ("python", &["buffer", "object"], "an array is told from an object by its class"),
];

/// The names that a piece of code takes from the root of its crate.
fn taken_from_root(code: &str, root: &str) -> Vec<String> {
    let mut names = vec![];
    let first = |path: &str| {
        let path = path.trim_start();
        let end = path.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
        path[..end.unwrap_or(path.len())].to_owned()
    };
    for path in code.split(root).skip(1) {
        let Some(list) = path.strip_prefix('{') else {
            names.push(first(path));
            continue;
        };
        let (mut depth, mut begin) = (0, 0);
        for (at, letter) in list.char_indices() {
            match letter {
                '{' => depth += 1,
                '}' if depth == 0 => {
                    names.push(first(&list[begin..at]));
                    break;
                }
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    names.push(first(&list[begin..at]));
                    begin = at + 1;
                }
                _ => {}
            }
        }
    }
    names
}

/// The modules that lie in a folder of sources, each with its code; children count as their parent.
fn modules(sources: &Path) -> BTreeMap<String, String> {
    let mut modules = BTreeMap::<String, String>::new();
    for file in rust_files(sources) {
        let within = file.strip_prefix(sources).expect("below the sources").with_extension("");
        let name = within.iter().next().and_then(|name| name.to_str()).expect("a name").to_owned();
        // `super` is the root of the crate in a file of the first level alone.
        let is_first = within.iter().count() == 1;
        let code = code_of(&file);
        let code = if is_first { code.replace("super::", "crate::") } else { code };
        modules.entry(name).or_default().push_str(&code);
    }
    modules
}

/// Which module of a crate imports which others. What the root exports of a module counts as the module.
fn imports(sources: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut modules = modules(sources);
    let roots = ["lib", "main"].map(|root| modules.remove(root).unwrap_or_default());
    let mut exported = BTreeMap::new();
    for line in roots.concat().split(';') {
        let Some((_, path)) = line.split_once("use ") else { continue };
        let Some((module, items)) = path.split_once("::") else { continue };
        let items = items.trim_matches(|it| it == '{' || it == '}').split(',');
        for item in items.filter(|_| modules.contains_key(module)) {
            let item = item.rsplit_once(" as ").map_or(item, |(_, name)| name);
            let item = item.rsplit_once("::").map_or(item, |(_, name)| name);
            exported.insert(item.trim().trim_matches('}').to_owned(), module.to_owned());
        }
    }
    let known =
        |name: String| if modules.contains_key(&name) { Some(name) } else { exported.get(&name).cloned() };
    let used = |(module, code): (&String, &String)| {
        let names = taken_from_root(code, "crate::").into_iter().filter_map(known);
        (module.clone(), names.filter(|name| name != module).collect())
    };
    modules.iter().map(used).collect()
}

/// The modules that are in rings: those that are left when all go that import nothing that is left, or that nothing left imports.
fn rings(mut imports: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let is_imported = |name: &String| imports.values().any(|used| used.contains(name));
        let ends = imports.iter().find(|(name, used)| used.is_empty() || !is_imported(name));
        let Some(end) = ends.map(|(name, _)| name.clone()) else { return imports };
        imports.remove(&end);
        for used in imports.values_mut() {
            used.remove(&end);
        }
    }
}

#[test]
fn no_modules_of_a_room_import_each_other_in_a_ring() {
    let found = rooms().into_iter().map(|room| (room.name, rings(imports(&room.folder.join("src")))));
    let found: BTreeMap<_, _> = found.filter(|(_, rings)| !rings.is_empty()).collect();
    let in_rings: BTreeMap<_, Vec<_>> =
        found.iter().map(|(room, rings)| (&**room, rings.keys().map(String::as_str).collect())).collect();
    let known = RINGS.iter().map(|(room, modules, _)| (*room, modules.to_vec())).collect();
    assert_eq!(in_rings, known, "{found:?}");
}

#[test]
fn a_ring_of_modules_is_found_through_lists_and_exports_of_the_root() {
    let names = taken_from_root("use crate::{a::{B, C}, d, Root as R}; crate::e::f()", "crate::");
    assert_eq!(names, ["a", "d", "Root", "e"]);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ofi/src");
    assert!(imports(&sources).values().map(BTreeSet::len).sum::<usize>() > 50);
    let of = |used: &[(&str, &[&str])]| {
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        used.iter().map(|(name, used)| ((*name).to_owned(), set(used))).collect()
    };
    assert!(rings(of(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])).is_empty());
    let left = rings(of(&[("top", &["a"]), ("a", &["b"]), ("b", &["a", "low"]), ("low", &[])]));
    assert_eq!(left.into_keys().collect::<Vec<_>>(), ["a", "b"]);
}

/// Nothing but `make fuzz` reads that file.
#[test]
fn the_lock_file_of_fuzz_has_the_rooms_that_those_of_fuzz_import() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/Cargo.lock");
    let locked: toml::Table = std::fs::read_to_string(path).unwrap().parse().unwrap();
    for room in rooms() {
        let packages = locked["package"].as_array().unwrap();
        let Some(package) = packages
            .iter()
            .find(|package| package["name"].as_str() == Some(&format!("polder-{}", room.name)))
        else {
            continue;
        };
        let names = package.get("dependencies").and_then(toml::Value::as_array).into_iter().flatten();
        // A version stands behind a name of which there are several.
        let names =
            names.map(|dependency| dependency.as_str().unwrap().split(' ').next().unwrap().replace('-', "_"));
        let rooms =
            |names: BTreeSet<String>| names.into_iter().filter(|name| name.starts_with("polder_")).collect();
        let [locked, declared]: [Vec<_>; 2] = [names.collect(), room.declared].map(rooms);
        assert_eq!(locked, declared, "{}: update fuzz/Cargo.lock", room.name);
    }
}

/// A fence is half of a protocol: without the other half beside it nobody can tell whether it is right, or needed.
#[test]
fn every_fence_of_a_protocol_has_a_comment_that_names_its_partner() {
    let mut fences = 0;
    for room in ["pool", "attach", "ofi", "mpi"] {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(room).join("src");
        for path in rust_files(&sources) {
            if path.ends_with("hostile.rs") || path.strip_prefix(&sources).unwrap().starts_with("verify") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let lines: Vec<_> = text.lines().take_while(|line| *line != "mod tests {").collect();
            let mut begin = 0;
            for (index, line) in lines.iter().enumerate() {
                let code = line.split("//").next().unwrap();
                if !["mfence()", "sfence()", "fence_invalidations()"].iter().any(|call| code.contains(call)) {
                    continue;
                }
                let near = lines[begin.max(index.saturating_sub(8))..index].join("\n");
                let (at, number) = (path.display(), index + 1);
                assert!(
                    near.contains("SYNC:") || near.contains("HARMLESS("),
                    "{at}:{number}: say with which line of another host the fence pairs, as `// SYNC: pairs with …`"
                );
                (begin, fences) = (index + 1, fences + 1);
            }
        }
    }
    assert!(fences > 70, "{fences} fences: are they read?");
}
