//! Settings that are changed, and restored: also by the next start, after the process was killed.
//!
//! A record of what a setting was is on disk before the setting is changed. Each line of the journal is one JSON
//! object, `{"path": …, "was": …, "sum": …}`, of a cgroup with its inode; `sum` is a checksum of the rest, which older journals lack. What
//! stands behind the end of the last line was cut short by the death of its writer, and belongs to a change that was not made. Any other
//! line that is no record is damage, which is an error and keeps the journal.
//!
//! Some settings cannot be given back as they were: the kernel refuses to empty `cpuset.mems` of a cgroup that has
//! processes (ENOSPC). Their records carry a value with the same effect, `"same_effect": …`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::ErrorKind;

use serde::{Deserialize, Serialize};

use crate::{CGROUPS, Kernel, KernelError};

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    path: String,
    /// Of the cgroup, if it is a cgroup's setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    inode: Option<u64>,
    was: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    same_effect: Option<String>,
    /// Whether it is a folder that was made, in place of a setting that was changed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    made: bool,
    /// Below which folder the file lies, if it is one of a copy and not of the machine's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    below: Option<String>,
    /// In a line alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sum: Option<u64>,
}

impl Record {
    fn of(kernel: &impl Kernel, path: &str, inode: Option<u64>, was: &str) -> Self {
        let (path, was) = (path.to_owned(), was.to_owned());
        Self { path, inode, was, same_effect: None, made: false, below: kernel.copied(), sum: None }
    }

    /// What tells it from records of other settings.
    fn key(&self) -> (String, Option<u64>) {
        (self.path.clone(), self.inode)
    }

    fn folder(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(folder, _)| folder)
    }

    fn json(&self) -> String {
        serde_json::to_string(self).expect("strings are JSON")
    }

    fn line(&self) -> String {
        Self { sum: Some(checksum(&self.json())), ..self.clone() }.json()
    }

    /// Reads a line, or says what is wrong with it.
    fn parse(line: &str) -> Result<Self, String> {
        let mut record: Self = serde_json::from_str(line).map_err(|error| error.to_string())?;
        if record.sum.take().is_some_and(|sum| sum != checksum(&record.json())) {
            return Err("its checksum is that of another line".to_owned());
        }
        let is_kernels = ["/sys/", "/proc/sys/"].iter().any(|root| record.path.starts_with(root))
            && record.path.split('/').all(|part| part != "..");
        match is_kernels {
            true => Ok(record),
            false => Err(format!("{:?} is no setting of the kernel", record.path)),
        }
    }

    /// The first record of each setting, and the first damaged line with what is wrong with it.
    fn all(text: &str) -> (Vec<Self>, Option<(usize, String)>) {
        let (mut records, mut damage, mut seen) = (Vec::new(), None, BTreeSet::new());
        for (index, line) in text.split_inclusive('\n').enumerate() {
            let Some(line) = line.strip_suffix('\n') else { break };
            match Self::parse(line) {
                _ if line.is_empty() => {}
                Ok(record) if seen.insert(record.key()) => records.push(record),
                Ok(_) => {}
                Err(why) => drop(damage.get_or_insert((index + 1, why))),
            }
        }
        (records, damage)
    }
}

/// FNV-1a: it finds what a disk or an editor changed, and nothing that somebody made to fit.
fn checksum(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

fn damaged(path: &str, (line, why): (usize, String), outcome: String) -> KernelError {
    KernelError::Damaged { path: path.to_owned(), line, why, outcome }
}

/// Refuses records of other files than the kernel's here.
fn expect_of(kernel: &impl Kernel, journal: &str, records: &[Record]) -> Result<(), KernelError> {
    let here = kernel.copied();
    match records.iter().find(|record| record.below != here) {
        Some(Record { below, .. }) => {
            Err(KernelError::OtherFiles { path: journal.to_owned(), noted: below.clone(), here })
        }
        None => Ok(()),
    }
}

/// Examines the journal that a killed agent left at `journal`, if there is one.
///
/// # Errors
/// [`KernelError::OtherFiles`]; [`KernelError::Damaged`] with the first line that is no record; otherwise as reading fails.
pub fn check_journal(kernel: &impl Kernel, journal: &str) -> Result<(), KernelError> {
    let text = match kernel.read_own(journal) {
        Err(error) if error.is_gone() => return Ok(()),
        text => text?,
    };
    let (records, damage) = Record::all(&text);
    expect_of(kernel, journal, &records)?;
    damage.map_or(Ok(()), |damage| Err(damaged(journal, damage, "its setting cannot be restored".to_owned())))
}

/// A setting that was changed; in a dry run, one that would be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Its file.
    pub path: String,
    /// Its value before.
    pub was: String,
    /// Its value now.
    pub value: String,
}

impl fmt::Display for Change {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &str| if value.is_empty() { "\"\"".to_owned() } else { value.to_owned() };
        write!(to, "{}: {} -> {}", self.path, shown(&self.was), shown(&self.value))
    }
}

/// What became of one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Restored {
    /// It is as it was found.
    AsFound {
        /// The setting's file.
        path: String,
        /// Its value.
        value: String,
    },
    /// The kernel refuses the value that was found, and the setting has one with the same effect.
    InEffect {
        /// The setting's file.
        path: String,
        /// Its value.
        value: String,
        /// The value that was found.
        found: String,
    },
    /// It was made, and is removed.
    Removed {
        /// The folder.
        path: String,
    },
    /// Its file is gone, as that of a cgroup that was removed.
    Gone {
        /// The file that was there.
        path: String,
    },
}

/// Changes settings, and restores each to what it was before its first change.
#[derive(Debug)]
pub struct Settings<K> {
    kernel: K,
    journal: String,
    /// What is in the journal, the oldest first.
    records: Vec<Record>,
    /// The keys of these.
    noted: BTreeSet<(String, Option<u64>)>,
    /// Whether the journal may end with a part of a line, because a write of it failed.
    is_torn: bool,
    /// So many records make it worth looking for those of cgroups that are gone.
    prune_at: usize,
    /// In a dry run, the values that settings would have.
    planned: Option<BTreeMap<String, String>>,
    /// Changes that nobody has taken yet.
    changes: Vec<Change>,
}

/// Fewer records than this are kept as they are.
const FEWEST_TO_PRUNE: usize = 256;

impl<K: Kernel> Settings<K> {
    /// Restores what an earlier process left changed, if it was killed, and goes on with an empty journal at `journal`.
    ///
    /// # Errors
    /// As restoring fails; the journal stays then. [`KernelError::OtherFiles`] where it was written for another root: nothing is restored.
    /// [`KernelError::Damaged`] where a line of it is no record: those of the others are
    /// restored.
    pub fn start(kernel: K, journal: &str) -> Result<(Self, Vec<Restored>), KernelError> {
        let mut settings = Self { planned: None, ..Self::dry(kernel, journal) };
        let text = match settings.kernel.read_own(journal) {
            Err(error) if error.is_gone() => return Ok((settings, Vec::new())),
            text => text?,
        };
        let (records, damage) = Record::all(&text);
        if records.is_empty() && damage.is_none() && (text.is_empty() || text.ends_with('\n')) {
            // There is nothing to restore, and it may be no journal: it stays. One whose only record is torn goes: the next would be
            // appended to it.
            return Ok((settings, Vec::new()));
        }
        expect_of(&settings.kernel, journal, &records)?;
        settings.noted = records.iter().map(Record::key).collect();
        settings.records = records;
        if let Some(damage) = damage {
            let (left, restored, _) = settings.restore_each(|_| false);
            let (restored, left) = (restored.len(), left.len());
            let outcome = format!(
                "{restored} settings of other lines were restored, {left} could not be, and its own is not known"
            );
            return Err(damaged(journal, damage, outcome));
        }
        let restored = settings.restore()?;
        Ok((settings, restored))
    }

    /// Settings of a dry run, which are not changed: it is noted what they would be. The journal of an earlier process stays as it is.
    #[must_use]
    pub fn dry(kernel: K, journal: &str) -> Self {
        Self {
            kernel,
            journal: journal.to_owned(),
            records: Vec::new(),
            noted: BTreeSet::new(),
            is_torn: false,
            prune_at: FEWEST_TO_PRUNE,
            planned: Some(BTreeMap::new()),
            changes: Vec::new(),
        }
    }

    /// The kernel whose settings these are.
    pub const fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Whether nothing is changed.
    pub const fn is_dry(&self) -> bool {
        self.planned.is_some()
    }

    /// Changes since the last call; in a dry run, those that would have been made.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// The value of a setting, without the end of its line.
    fn now(&self, path: &str) -> Result<String, KernelError> {
        match self.planned.as_ref().and_then(|planned| planned.get(path)) {
            Some(value) => Ok(value.clone()),
            None => Ok(self.kernel.read(path)?.trim_end_matches('\n').to_owned()),
        }
    }

    fn changed(&mut self, path: &str, was: String, value: &str) {
        let (path, value) = (path.to_owned(), value.to_owned());
        if let Some(planned) = &mut self.planned {
            planned.insert(path.clone(), value.clone());
        }
        // A setting is one line.
        let was = was.lines().next().unwrap_or_default().to_owned();
        if !says(&was, &value) {
            self.changes.push(Change { path, was, value });
        }
    }

    /// Sets `path` to `value`, unless it says so already. Returns whether it was written.
    ///
    /// # Errors
    /// As reading, recording or writing fails.
    pub fn set(&mut self, path: &str, value: &str) -> Result<bool, KernelError> {
        if says(&self.now(path)?, value) {
            return Ok(false);
        }
        self.set_in_turn(path, &[value.to_owned()], None)?;
        Ok(true)
    }

    /// Writes `values` to `path` one after the other, whatever it says now. `same_effect` is a value that does what the present one does, if
    /// the kernel may refuse to take that back.
    ///
    /// # Errors
    /// As reading, recording or writing fails.
    pub fn set_in_turn(
        &mut self,
        path: &str,
        values: &[String],
        same_effect: Option<String>,
    ) -> Result<(), KernelError> {
        let inode = self.cgroup_inode(path)?;
        let was = self.now(path)?;
        if !self.is_dry() {
            let record = Record { same_effect, ..Record::of(&self.kernel, path, inode, &was) };
            if !self.noted.contains(&record.key()) {
                self.note(record)?;
            }
            values.iter().try_for_each(|value| self.write(path, value))?;
        }
        if let Some(value) = values.last() {
            self.changed(path, was, value);
        }
        Ok(())
    }

    /// Writes a value, again where a signal interrupted it: such a setting is written whole or not at all.
    fn write(&self, path: &str, value: &str) -> Result<(), KernelError> {
        const TRIES: u32 = 8;
        let is_interrupted = |written: &Result<(), KernelError>| {
            written.as_ref().is_err_and(|error| error.kind() == Some(ErrorKind::Interrupted))
        };
        let mut written = self.kernel.write(path, value);
        for _ in 1..TRIES {
            if !is_interrupted(&written) {
                break;
            }
            written = self.kernel.write(path, value);
        }
        written
    }

    /// Makes the folder `path`, which is removed as settings are restored.
    ///
    /// # Errors
    /// [`KernelError::Missing`] where it is there already; otherwise as recording or making it fails.
    pub fn make(&mut self, path: &str) -> Result<(), KernelError> {
        let record = Record { made: true, ..Record::of(&self.kernel, path, None, "") };
        if self.noted.contains(&record.key()) {
            return Ok(());
        }
        let is_there = self.kernel.list(path).is_ok();
        if !self.is_dry() {
            if is_there {
                return Err(KernelError::Missing(format!(
                    "{path} exists, and this agent did not make it; stop the agent that has another journal, or remove it: rmdir {path}"
                )));
            }
            self.note(record)?;
            self.kernel.make_folder(path)?;
        }
        if !is_there {
            self.changed(path, "absent".to_owned(), "made");
        }
        Ok(())
    }

    /// Puts a record on disk. Those of cgroups that are gone are dropped once there are many, so that services that come and go do not fill
    /// the journal.
    fn note(&mut self, record: Record) -> Result<(), KernelError> {
        if self.records.len() < self.prune_at && !self.is_torn {
            self.is_torn = true;
            self.kernel.append(&self.journal, &record.line())?;
            self.is_torn = false;
            self.noted.insert(record.key());
            self.records.push(record);
            return Ok(());
        }
        let is_there = |record: &Record| match self.cgroup_inode(&record.path) {
            Ok(inode) => inode == record.inode,
            Err(error) => !error.is_gone(),
        };
        let mut kept: Vec<Record> = self.records.iter().filter(|record| is_there(record)).cloned().collect();
        kept.push(record);
        self.prune_at = FEWEST_TO_PRUNE.max(2 * kept.len());
        self.rewrite(kept)
    }

    /// Puts these records on disk in place of those that are there.
    fn rewrite(&mut self, records: Vec<Record>) -> Result<(), KernelError> {
        let lines: String = records.iter().map(|record| record.line() + "\n").collect();
        self.kernel.replace(&self.journal, &lines)?;
        self.is_torn = false;
        self.noted = records.iter().map(Record::key).collect();
        self.records = records;
        Ok(())
    }

    /// Restores every setting that was changed, the last one first, and removes the journal.
    ///
    /// # Errors
    /// The first one as reading or writing fails. The others are restored all the same. What was not restored is tried
    /// again by the next call, or the next start.
    pub fn restore(&mut self) -> Result<Vec<Restored>, KernelError> {
        self.restore_all_but(|_| false)
    }

    /// Restores what was changed, but for the settings that `keeps` names.
    ///
    /// # Errors
    /// As [`Settings::restore`].
    pub fn restore_all_but(&mut self, keeps: impl Fn(&str) -> bool) -> Result<Vec<Restored>, KernelError> {
        if let Some(planned) = &mut self.planned {
            planned.retain(|path, _| keeps(path));
            return Ok(Vec::new());
        }
        let (left, restored, failure) = self.restore_each(keeps);
        if left.is_empty() {
            match self.kernel.remove(&self.journal) {
                Err(error) if !error.is_gone() => return Err(error),
                _ => {}
            }
            (self.records, self.noted, self.is_torn) = (left, BTreeSet::new(), false);
        } else if left.len() < self.records.len() {
            self.rewrite(left)?;
        }
        failure.map_or(Ok(restored), Err)
    }

    /// What `keeps` names and what could not be restored, what was, and the first failure.
    fn restore_each(
        &self,
        keeps: impl Fn(&str) -> bool,
    ) -> (Vec<Record>, Vec<Restored>, Option<KernelError>) {
        let (mut left, mut restored, mut failure) = (Vec::new(), Vec::new(), None);
        // Settings of one folder may depend on each other: a weight that is written ends the kernel's derivation. So
        // older ones of a folder wait until the newer ones are restored.
        let mut waits = BTreeSet::new();
        for record in self.records.iter().rev() {
            if keeps(&record.path) || waits.contains(record.folder()) {
                left.push(record.clone());
                continue;
            }
            match self.restore_one(record) {
                Ok(outcome) => restored.push(outcome),
                Err(error) if error.is_gone() => restored.push(Restored::Gone { path: record.path.clone() }),
                Err(error) => {
                    left.push(record.clone());
                    waits.insert(record.folder());
                    failure.get_or_insert(error);
                }
            }
        }
        left.reverse();
        (left, restored, failure)
    }

    fn restore_one(&self, record: &Record) -> Result<Restored, KernelError> {
        let Record { path, inode, was, same_effect, made, .. } = record.clone();
        if made {
            return self.kernel.remove_folder(&path).map(|()| Restored::Removed { path });
        }
        if self.cgroup_inode(&path)? != inode {
            // A cgroup of the same path that was made since: what was recorded is not its setting.
            return Ok(Restored::Gone { path });
        }
        if says(&self.kernel.read(&path)?, &was) {
            return Ok(Restored::AsFound { path, value: was });
        }
        match (self.write(&path, &was), same_effect) {
            (Err(error), Some(value)) if !error.is_gone() => {
                self.write(&path, &value)?;
                Ok(Restored::InEffect { path, value, found: was })
            }
            (outcome, _) => outcome.map(|()| Restored::AsFound { path, value: was }),
        }
    }

    /// The cgroup whose file `path` is; [`None`] where it is no cgroup's.
    fn cgroup_inode(&self, path: &str) -> Result<Option<u64>, KernelError> {
        match path.rsplit_once('/').filter(|(folder, _)| folder.starts_with(CGROUPS)) {
            Some((folder, _)) => self.kernel.inode(folder).map(Some),
            None => Ok(None),
        }
    }
}

/// Whether a setting that reads as `now` has the value `value`.
fn says(now: &str, value: &str) -> bool {
    now.trim() == value.trim()
}

#[cfg(all(test, feature = "fake"))]
mod tests {
    use super::*;
    use crate::fake::Tree;

    #[test]
    fn cgroups_that_come_and_go_do_not_fill_the_journal() {
        const JOURNAL: &str = "/journal";
        const RESTARTS: usize = 5 * FEWEST_TO_PRUNE;
        let tree = Tree::new(1 << 20);
        tree.add_group("/stays", [4096, 0]);
        tree.set_nodes("/stays", "0-1");
        let before = tree.settings();
        let (mut settings, _) = Settings::start(&tree, JOURNAL).unwrap();
        settings.set("/sys/fs/cgroup/stays/cpuset.mems", "0").unwrap();
        for restart in 0..RESTARTS {
            // Half come back under their name, half under another.
            let path = format!("/s{}", if restart % 2 == 0 { 0 } else { restart });
            tree.add_group(&path, [4096, 0]);
            settings.set(&format!("/sys/fs/cgroup{path}/cpuset.mems"), "0").unwrap();
            tree.remove_group(&path);
        }
        let kept = tree.disk()[JOURNAL].lines().filter(|line| !line.is_empty()).count();
        assert!((1..=FEWEST_TO_PRUNE + 1).contains(&kept), "{kept} records");
        // Another process restores what is there still.
        let (_, restored) = Settings::start(&tree, JOURNAL).unwrap();
        let is_kept = |restored: &Restored| matches!(restored, Restored::AsFound { path, .. } | Restored::InEffect { path, .. } if path.contains("stays"));
        assert!(restored.iter().any(is_kept), "{restored:?}");
        assert_eq!(tree.settings(), before);
    }

    #[test]
    fn a_record_after_one_that_is_torn_is_whole() {
        let tree = Tree::new(1 << 20);
        let before = tree.settings();
        let (mut settings, _) = Settings::start(&tree, "/journal").unwrap();
        tree.kill_after(1);
        settings.set(crate::BALANCING, "2").expect_err("half a line is written");
        tree.revive();
        assert!(!tree.disk()["/journal"].contains('\n'), "the control");
        let (mut settings, _) = Settings::start(&tree, "/journal").unwrap();
        settings.set(crate::BALANCING, "2").unwrap();
        assert_eq!(Settings::start(&tree, "/journal").unwrap().1.len(), 1);
        assert_eq!(tree.settings(), before);
    }

    #[test]
    fn a_file_without_records_stays() {
        let tree = Tree::new(1 << 20);
        tree.append("/journal", "").unwrap();
        let before = tree.disk();
        assert_eq!((Settings::start(&tree, "/journal").unwrap().1, tree.disk()), (Vec::new(), before));
    }

    #[test]
    fn a_journal_restores_settings_of_the_kernel_and_no_other_file() {
        let tree = Tree::new(1 << 20);
        tree.put("/etc/passwd", "root");
        let before = tree.settings();
        tree.write(crate::DEMOTION, "true").unwrap();
        for path in ["/etc/passwd", "/sys/../etc/passwd", crate::DEMOTION] {
            tree.append(
                "/journal",
                &format!("{{\"path\": \"{path}\", \"inode\": null, \"was\": \"false\"}}"),
            )
            .unwrap();
        }
        let error = Settings::start(&tree, "/journal").expect_err("it is damaged").to_string();
        let expected = "/journal: line 1 is damaged: \"/etc/passwd\" is no setting of the kernel; 1 settings of other lines were restored, \
                        0 could not be";
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(tree.settings(), before);
    }

    /// A tree with two changed settings, and its journal.
    fn journal_of_two() -> (Tree, BTreeMap<String, String>, String) {
        let tree = Tree::new(1 << 20);
        let before = tree.settings();
        let (mut settings, _) = Settings::start(&tree, "/journal").unwrap();
        settings.set(crate::BALANCING, "2").unwrap();
        settings.set(crate::DEMOTION, "true").unwrap();
        let journal = tree.disk()["/journal"].clone();
        (tree, before, journal)
    }

    #[test]
    fn a_journal_with_any_byte_damaged_is_an_error_that_keeps_it_and_restores_its_other_lines() {
        let (_, _, journal) = journal_of_two();
        let second = journal.find('\n').unwrap() + 1;
        let ends = journal.len() - 1;
        for at in 0..ends {
            let (tree, before, _) = journal_of_two();
            let mut damaged = journal.clone().into_bytes();
            damaged[at] ^= 1;
            let Ok(damaged) = String::from_utf8(damaged) else { panic!("its bytes are ASCII") };
            tree.replace("/journal", &damaged).unwrap();
            let Err(error) = Settings::start(&tree, "/journal") else {
                panic!("{damaged:?} is taken for a journal")
            };
            assert!(matches!(error, KernelError::Damaged { .. }), "{error}");
            assert_eq!(
                check_journal(&tree, "/journal").unwrap_err().to_string().split(';').next(),
                error.to_string().split(';').next()
            );
            assert_eq!(tree.disk()["/journal"], damaged);
            // The end of the first line is that of both.
            let settings = tree.settings();
            let is_back = |path: &str| settings[path] == before[path];
            let intact = [at >= second, at + 1 < second];
            assert_eq!([crate::BALANCING, crate::DEMOTION].map(is_back), intact, "{at}: {error}");
        }
    }

    #[test]
    fn a_last_line_that_was_cut_short_belongs_to_no_change() {
        let (_, _, journal) = journal_of_two();
        let second = journal.find('\n').unwrap() + 1;
        for end in second..journal.len() {
            let (tree, before, _) = journal_of_two();
            tree.write(crate::DEMOTION, "false").unwrap();
            tree.replace("/journal", &journal[..end]).unwrap();
            assert_eq!(Settings::start(&tree, "/journal").unwrap().1.len(), 1);
            assert_eq!((tree.settings(), tree.disk().len()), (before, 0));
        }
    }

    #[test]
    fn a_line_that_a_full_disk_cut_short_is_written_anew_and_a_stop_needs_no_journal() {
        let tree = Tree::new(1 << 20);
        let before = tree.settings();
        let (mut settings, _) = Settings::start(&tree, "/journal").unwrap();
        settings.set(crate::BALANCING, "2").unwrap();
        tree.kill_after(1);
        settings.set(crate::DEMOTION, "true").expect_err("half a line is written");
        tree.revive();
        assert!(!tree.disk()["/journal"].ends_with('\n'), "the control");
        settings.set(crate::DEMOTION, "true").unwrap();
        check_journal(&tree, "/journal").unwrap();
        // Somebody removes it.
        tree.remove("/journal").unwrap();
        assert_eq!(settings.restore().unwrap().len(), 2);
        assert_eq!((tree.settings(), tree.disk().len()), (before, 0));
    }

    #[test]
    fn a_dry_run_notes_each_change_once_and_makes_none() {
        let tree = Tree::new(1 << 20);
        tree.add_group("/a", [4096, 0]);
        let before = tree.settings();
        let changes = |settings: &mut Settings<&Tree>| {
            for _ in 0..2 {
                settings.set(crate::BALANCING, "2").unwrap();
                settings.set(crate::PROMOTION_LIMIT, "65536").unwrap();
                settings
                    .set_in_turn("/sys/fs/cgroup/a/cpuset.mems", &["0-1".to_owned(), "0".to_owned()], None)
                    .unwrap();
            }
            settings.take_changes().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let mut dry = Settings::dry(&tree, "/journal");
        let noted = changes(&mut dry);
        assert_eq!(
            noted,
            [format!("{}: 1 -> 2", crate::BALANCING), "/sys/fs/cgroup/a/cpuset.mems: \"\" -> 0".to_owned()]
        );
        assert_eq!((tree.settings(), tree.disk().len()), (before, 0));
        assert_eq!(changes(&mut Settings::start(&tree, "/journal").unwrap().0), noted);
    }

    #[test]
    fn a_folder_that_was_made_is_removed_and_one_that_was_there_is_left() {
        let tree = Tree::new(1 << 20);
        tree.add_cxl("mem0");
        let path = crate::CxlWatch::path();
        let before = tree.settings();
        let (mut settings, _) = Settings::start(&tree, "/journal").unwrap();
        settings.make(path).unwrap();
        settings.make(path).unwrap();
        assert_ne!(tree.settings(), before);
        let removed = Restored::Removed { path: path.to_owned() };
        // A process that was killed here leaves it to the next.
        assert_eq!(Settings::start(&tree, "/journal").unwrap().1, [removed]);
        assert_eq!(tree.settings(), before);
        tree.make_folder(path).unwrap();
        let (mut settings, _) = Settings::start(&tree, "/journal").unwrap();
        let error = settings.make(path).expect_err("it is another's").to_string();
        assert!(error.contains("rmdir"), "{error}");
        assert_eq!(settings.restore().unwrap(), []);
        assert!(tree.list(path).is_ok());
    }
}
