//! `polder-dev verify --sites`: the flushes and fences of the pool, held against those that suites reach.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;

use polder_mem::Coherence;
use polder_mem::model::{Explorer, SiteKind, find};
use polder_pool::verify::suites;

use crate::Failure;

/// Where the pool's protocols lie, and their suites within.
const SOURCES: &str = "crates/pool/src";
const SUITES: &str = "crates/pool/src/verify";
const KINDS: [SiteKind; 5] = [
    SiteKind::WriteBack,
    SiteKind::Invalidate,
    SiteKind::Sfence,
    SiteKind::Mfence,
    SiteKind::FenceInvalidations,
];

/// A call of a flush or fence: its file, its line, and what is called.
type Call = (String, u32, &'static str);

/// Lists what no suite reaches, and fails if there is any.
pub(super) fn run(schedules: u64, seed: u64, threads: usize) -> Result<ExitCode, Failure> {
    let folder = find("Cargo.lock").and_then(|file| Some(file.parent()?.to_owned()));
    let folder =
        folder.ok_or_else(|| Failure("the sources are not here: run it in a checkout".to_owned()))?;
    let calls = calls_below(&folder)?;
    let reached = reached(schedules, seed, threads);
    let unreached: Vec<_> = calls.difference(&reached).collect();
    for (file, line, kind) in &unreached {
        println!("{file}:{line} {kind}: no suite reaches it");
    }
    println!("{} flushes and fences, {} unreached", calls.len(), unreached.len());
    Ok(if unreached.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What all suites reach together, as their schedules draw memory, and on memory that its device keeps coherent.
fn reached(schedules: u64, seed: u64, threads: usize) -> BTreeSet<Call> {
    let on_hdm_db = suites().into_iter().map(|suite| suite.on(Coherence::HdmDb));
    let all = suites().into_iter().chain(on_hdm_db);
    let (queue, reached) = (Mutex::new(all), Mutex::new(BTreeSet::new()));
    let next = || queue.lock().expect("no thread panics while it takes a suite").next();
    let work = || {
        while let Some(suite) = next() {
            let sites = suite.sites(&Explorer::new(suite.name, schedules).first_seed(seed));
            let calls = sites.into_iter().map(|(at, kind)| (at.file().to_owned(), at.line(), kind.name()));
            reached.lock().expect("no thread panics while it holds the sites").extend(calls);
        }
    };
    std::thread::scope(|scope| (0..threads.max(1)).for_each(|_| drop(scope.spawn(work))));
    reached.into_inner().expect("no thread panics while it holds the sites")
}

/// The calls in the sources below a checkout, but for those of suites and tests.
fn calls_below(checkout: &Path) -> Result<BTreeSet<Call>, Failure> {
    let (mut calls, mut folders) = (BTreeSet::new(), vec![checkout.join(SOURCES)]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path: PathBuf = entry?.path();
            if path.is_dir() && path != checkout.join(SUITES) {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let file = path.strip_prefix(checkout).unwrap_or(&path).display().to_string();
                let found = calls_in(&fs::read_to_string(&path)?);
                calls.extend(found.into_iter().map(|(line, kind)| (file.clone(), line, kind)));
            }
        }
    }
    Ok(calls)
}

/// The calls in a source: those of a memory, and those of helpers that pass their caller's place on.
fn calls_in(source: &str) -> Vec<(u32, &'static str)> {
    let lines: Vec<&str> = source.lines().collect();
    let end = lines.iter().position(|line| line.starts_with("#[cfg(test)]")).unwrap_or(lines.len());
    let mut calls = vec![];
    for (index, line) in lines[..end].iter().enumerate() {
        // Such a helper has the call as its only line.
        let is_passed_on = index >= 2 && lines[index - 2].trim() == "#[track_caller]";
        let code = line.split("//").next().unwrap_or_default();
        for kind in KINDS {
            let mut before = code.split(&format!(".{}(", kind.name())).collect::<Vec<_>>();
            before.pop();
            let is_call = |text: &&str| {
                let receiver = text.trim_end_matches("()");
                receiver.ends_with("memory")
                    || text.ends_with("Extents(site)")
                    || text.ends_with("Extents(self.site)")
            };
            if !is_passed_on && before.iter().any(is_call) {
                calls.push((index as u32 + 1, kind.name()));
            }
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_in_code_alone() {
        let source = "fn a() {\n    self.memory().write_back(at, 8); // memory.sfence()\n    memory.mfence();\n    cache.invalidate(1);\n}\n\
                      #[track_caller]\nfn helper() {\n    self.memory.invalidate(at, 64);\n}\n    Extents(site).write_back(extent);\n\
                      #[cfg(test)]\nmod tests {\n    memory.sfence();\n}\n";
        assert_eq!(calls_in(source), [(2, "write_back"), (3, "mfence"), (10, "write_back")]);
    }

    #[test]
    fn the_sources_of_the_pool_have_calls() {
        let checkout = find("Cargo.lock").unwrap();
        assert!(calls_below(checkout.parent().unwrap()).unwrap().len() > 100);
    }
}
