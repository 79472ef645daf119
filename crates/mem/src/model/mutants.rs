//! Mutation without editing: each flush and fence knows its call site; dropped or weakened, the suite must fail.

use std::fmt;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::explore::{self, Explorer, Outcome};
use super::state::Mutation;

/// Schedules that are run to learn which flushes and fences a suite reaches.
const RECORDED: u64 = 4000;

/// A change to one flush or fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Change {
    /// It does nothing.
    Drop,
    /// It does less: `mfence` and `fence_invalidations` become `sfence`, `invalidate` (`clflushopt`) becomes `write_back`
    /// (`clwb`).
    Weaken,
}

/// The kind of a flush or fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SiteKind {
    /// `write_back`
    WriteBack,
    /// `invalidate`
    Invalidate,
    /// `sfence`
    Sfence,
    /// `mfence`
    Mfence,
    /// `fence_invalidations`
    FenceInvalidations,
}

impl SiteKind {
    /// The name of the operation.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::WriteBack => "write_back",
            Self::Invalidate => "invalidate",
            Self::Sfence => "sfence",
            Self::Mfence => "mfence",
            Self::FenceInvalidations => "fence_invalidations",
        }
    }

    fn changes(self) -> &'static [Change] {
        match self {
            Self::WriteBack | Self::Sfence => &[Change::Drop],
            Self::Invalidate | Self::Mfence | Self::FenceInvalidations => &[Change::Drop, Change::Weaken],
        }
    }
}

/// One change to one flush or fence, and whether the suite noticed.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// The call.
    pub site: &'static Location<'static>,
    /// What is called there.
    pub kind: SiteKind,
    /// What was done to it.
    pub change: Change,
    /// The seed that failed, if one did.
    pub caught_at: Option<u64>,
    /// Schedules that were run, the failing one included.
    pub schedules: u64,
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let change = match (self.change, self.kind) {
            (Change::Drop, _) => "dropped",
            (Change::Weaken, SiteKind::Invalidate) => "-> write_back",
            (Change::Weaken, _) => "-> sfence",
        };
        let place = format!("{}:{}:{}", self.site.file(), self.site.line(), self.site.column());
        write!(f, "{place:<48} {:<20}{change:<14}", self.kind.name())?;
        match self.caught_at {
            Some(seed) => write!(f, "caught by schedule {} (seed {seed})", self.schedules),
            None => write!(f, "survived {} schedules", self.schedules),
        }
    }
}

/// A mutant that survives because it does no harm, as a comment at its site argues.
#[derive(Clone, Copy, Debug)]
pub struct Harmless {
    /// How the path of the file ends.
    pub file: &'static str,
    /// What stands in the line of the call, or in the comment just above it, and above no other call that this change can
    /// befall in this suite.
    pub snippet: &'static str,
    /// The change.
    pub change: Change,
}

/// Runs every mutant of `suite` until it is caught, or through `schedules` schedules.
///
/// # Panics
/// When the suite fails without any change.
pub fn mutants(name: &str, schedules: u64, suite: impl Fn(u64) -> Outcome + Sync) -> Vec<Mutant> {
    Explorer::new(name, schedules).mutants(suite)
}

impl Explorer<'_> {
    /// Runs every mutant of `suite` until it is caught, or through all schedules; each OS thread runs other mutants.
    ///
    /// # Panics
    /// When the suite fails without any change.
    pub fn mutants(&self, suite: impl Fn(u64) -> Outcome + Sync) -> Vec<Mutant> {
        self.mutants_of(&[""], &[], suite)
    }

    /// As [`Explorer::mutants`], for the flushes and fences in files whose paths end with one of `files`. Those of `harmless` are
    /// run through the schedules of [`Explorer::listed`].
    pub(super) fn mutants_of(
        &self,
        files: &[&str],
        harmless: &[Harmless],
        suite: impl Fn(u64) -> Outcome + Sync,
    ) -> Vec<Mutant> {
        let mut sites = self.sites(&suite);
        sites.retain(|(site, _)| files.iter().any(|file| site.file().ends_with(file)));
        sites.sort_by_key(|(site, kind)| (site.file(), site.line(), site.column(), *kind));
        let planned: Vec<Mutation> = sites
            .into_iter()
            .flat_map(|(site, kind)| {
                kind.changes().iter().map(move |&change| Mutation { site, kind, change })
            })
            .collect();
        let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = || {
            while let Some(&mutation) = planned.get(next.fetch_add(1, Ordering::Relaxed)) {
                let listed = entry(mutation.site, mutation.change, harmless).is_some();
                let mutant = self.hunt(mutation, if listed { self.listed } else { self.schedules }, &suite);
                let mut done = done.lock().expect("no thread panics while it holds the list");
                done.push(mutant);
                self.tell(done.len() as u64);
            }
        };
        if self.threads == 1 {
            work();
        } else {
            std::thread::scope(|scope| (0..self.threads).for_each(|_| drop(scope.spawn(work))));
        }
        let mut done = done.into_inner().expect("no thread panics while it holds the list");
        done.sort_by_key(|m| (m.site.file(), m.site.line(), m.site.column(), m.kind, m.change));
        done
    }

    pub(super) fn sites(&self, suite: &impl Fn(u64) -> Outcome) -> explore::Sites {
        explore::with_session(|session| session.recording = true);
        let failure = (0..self.schedules.min(RECORDED))
            .find_map(|index| explore::once(self.first_seed.wrapping_add(index), suite).err());
        explore::with_session(|session| session.recording = false);
        let sites = explore::with_session(|session| std::mem::take(&mut session.sites));
        match failure {
            Some(failure) => panic!("{} fails without any change: {failure}", self.name),
            None => sites,
        }
    }

    fn hunt(&self, mutation: Mutation, schedules: u64, suite: &impl Fn(u64) -> Outcome) -> Mutant {
        explore::with_session(|session| session.mutation = Some(mutation));
        let caught =
            (0..schedules).find(|index| explore::once(self.first_seed.wrapping_add(*index), suite).is_err());
        explore::with_session(|session| session.mutation = None);
        Mutant {
            site: mutation.site,
            kind: mutation.kind,
            change: mutation.change,
            caught_at: caught.map(|index| self.first_seed.wrapping_add(index)),
            schedules: caught.map_or(schedules, |index| index + 1),
        }
    }
}

/// Holds a list of harmless mutants against what was found: every survivor must be listed, and every entry must be a
/// survivor.
///
/// # Errors
/// What does not match, in lines.
pub fn judge(mutants: &[Mutant], harmless: &[Harmless]) -> Result<(), String> {
    let mut complaints = Vec::new();
    let mut used = vec![0; harmless.len()];
    for mutant in mutants {
        match (entry(mutant.site, mutant.change, harmless), mutant.caught_at) {
            (None, None) => {
                complaints.push(format!("{mutant}: add a test that fails, or argue why it is harmless"))
            }
            (Some(entry), None) => used[entry] += 1,
            (Some(entry), Some(_)) if source(mutant.site).is_some() => {
                used[entry] += 1;
                complaints.push(format!("{mutant}: listed as harmless, and is not"));
            }
            _ => {}
        }
    }
    let without_source = mutants.iter().any(|mutant| source(mutant.site).is_none());
    for (entry, uses) in harmless.iter().zip(used) {
        if uses == 0 || (uses > 1 && !without_source) {
            let Harmless { file, snippet, change } = entry;
            complaints.push(format!(
                "the harmless entry {file} {snippet:?} {change:?} names {uses} survivors, not one"
            ));
        }
    }
    if without_source && !complaints.is_empty() {
        complaints.push("(the source is not here: entries were matched by file and change only)".into());
    }
    if complaints.is_empty() { Ok(()) } else { Err(complaints.join("\n")) }
}

/// Which entry of the list means this change here. Without the source, the file and the change have to do.
fn entry(site: &Location, change: Change, harmless: &[Harmless]) -> Option<usize> {
    let text = source(site);
    harmless.iter().position(|entry| {
        entry.change == change
            && site.file().ends_with(entry.file)
            && text.as_ref().is_none_or(|text| text.contains(entry.snippet))
    })
}

/// The line of a call and the comment just above it; none when the source is not on this machine.
fn source(site: &Location) -> Option<String> {
    let text = std::fs::read_to_string(find(site.file())?).ok()?;
    let lines: Vec<&str> = text.lines().take(site.line() as usize).collect();
    let comment = lines.iter().rev().skip(1).take_while(|line| line.trim_start().starts_with("//")).count();
    Some(lines[lines.len() - 1 - comment..].join("\n"))
}

/// The file of a location, whose path is relative to the workspace, from where tests do not run.
#[must_use]
pub fn find(file: &str) -> Option<PathBuf> {
    let here = std::env::current_dir().ok()?;
    here.ancestors().map(|above: &Path| above.join(file)).find(|path| path.is_file())
}
