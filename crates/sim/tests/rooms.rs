//! Holds who imports whom inside the crate: each folder those below it alone, so that there is no circle.

use std::path::Path;

/// Each folder with what it may import of the crate. `text`, `fidelity`, `given`, `random` and `message` are files that import no folder.
const TABLE: [(&str, &[&str]); 15] = [
    ("text", &[]),
    ("fidelity", &[]),
    ("given", &[]),
    ("random", &[]),
    ("message", &[]),
    ("contention", &["fidelity", "random"]),
    ("step", &["text", "fidelity", "contention"]),
    ("offload", &["text", "step"]),
    ("memory", &["contention", "fidelity", "given", "step"]),
    ("sync", &["step"]),
    ("pages", &["random"]),
    ("program", &["contention", "fidelity", "given", "message", "step"]),
    ("formats", &["text", "step"]),
    ("judge", &["random", "message", "step"]),
    ("search", &["text", "fidelity", "given", "contention", "step", "formats", "pages", "judge"]),
];

/// Every file of a folder, and the file that declares it.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let inside = std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    inside.chain([folder.with_extension("rs")]).collect()
}

#[test]
fn each_folder_imports_those_below_it_alone() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = 0;
    for (folder, allowed) in TABLE {
        for path in files(&src.join(folder)) {
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            for line in code {
                for (at, _) in line.match_indices("crate::") {
                    let rest = &line[at + "crate::".len()..];
                    let name: String =
                        rest.chars().take_while(|it| it.is_alphanumeric() || *it == '_').collect();
                    // What lib.rs exports could come from anywhere: each import names its folder.
                    assert!(
                        name == folder || allowed.contains(&name.as_str()),
                        "{}: {folder} imports {name:?}; it may import {allowed:?}: {line}",
                        path.display()
                    );
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 60, "only {seen} imports were seen");
    // No other file is there that the table does not hold.
    let known = |name: &str| name == "lib" || TABLE.iter().any(|(folder, _)| *folder == name);
    for entry in std::fs::read_dir(&src).unwrap() {
        let path = entry.unwrap().path();
        assert!(known(path.file_stem().unwrap().to_str().unwrap()), "{} is not in the table", path.display());
    }
}
