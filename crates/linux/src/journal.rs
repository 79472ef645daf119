//! Settings that are changed, and restored: also by the next start, after the process was killed.
//!
//! A record of what a setting was is on disk before the setting is changed. Each line of the journal is one JSON
//! object, `{"path": …, "was": …}`, of a cgroup with its inode; a line that the death of its writer cut short belongs to a change that was not
//! made.
//!
//! Some settings cannot be given back as they were: the kernel refuses to empty `cpuset.mems` of a cgroup that has
//! processes (ENOSPC). Their records carry a value with the same effect, `"same_effect": …`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{CGROUPS, Kernel, KernelError};

#[derive(Clone, Debug, Serialize, Deserialize)]
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
}

impl Record {
    fn is_of(&self, path: &str, inode: Option<u64>) -> bool {
        self.path == path && self.inode == inode
    }

    fn folder(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(folder, _)| folder)
    }

    fn line(&self) -> String {
        serde_json::to_string(self).expect("strings are JSON")
    }

    /// The first record of each setting.
    fn all(text: &str) -> Vec<Self> {
        let mut first = BTreeSet::new();
        let records = text.lines().filter_map(|line| serde_json::from_str::<Self>(line).ok());
        // No journal that this program wrote has others.
        let of_kernel = |path: &str| {
            ["/sys/", "/proc/sys/"].iter().any(|root| path.starts_with(root))
                && path.split('/').all(|part| part != "..")
        };
        records
            .filter(|record| of_kernel(&record.path))
            .filter(|record| first.insert((record.path.clone(), record.inode)))
            .collect()
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
    /// So many records make it worth looking for those of cgroups that are gone.
    prune_at: usize,
}

/// Fewer records than this are kept as they are.
const FEWEST_TO_PRUNE: usize = 256;

impl<K: Kernel> Settings<K> {
    /// Restores what an earlier process left changed, if it was killed, and goes on with an empty journal at `journal`.
    ///
    /// # Errors
    /// As restoring fails; the journal stays then.
    pub fn start(kernel: K, journal: &str) -> Result<(Self, Vec<Restored>), KernelError> {
        let mut settings = Self::detached(kernel, journal);
        let restored = settings.restore()?;
        Ok((settings, restored))
    }

    /// Settings that are not changed: the journal of an earlier process stays as it is.
    #[must_use]
    pub fn detached(kernel: K, journal: &str) -> Self {
        Self { kernel, journal: journal.to_owned(), records: Vec::new(), prune_at: FEWEST_TO_PRUNE }
    }

    /// The kernel whose settings these are.
    pub const fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Sets `path` to `value`, unless it says so already. Returns whether it was written.
    ///
    /// # Errors
    /// As reading, recording or writing fails.
    pub fn set(&mut self, path: &str, value: &str) -> Result<bool, KernelError> {
        if says(&self.kernel.read(path)?, value) {
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
        if !self.records.iter().any(|record| record.is_of(path, inode)) {
            let was = self.kernel.read(path)?.trim_end_matches('\n').to_owned();
            self.note(Record { path: path.to_owned(), inode, was, same_effect, made: false })?;
        }
        values.iter().try_for_each(|value| self.kernel.write(path, value))
    }

    /// Makes the folder `path`, which is removed as settings are restored.
    ///
    /// # Errors
    /// [`KernelError::Missing`] where it is there already; otherwise as recording or making it fails.
    pub fn make(&mut self, path: &str) -> Result<(), KernelError> {
        if self.records.iter().any(|record| record.is_of(path, None)) {
            return Ok(());
        }
        if self.kernel.list(path).is_ok() {
            return Err(KernelError::Missing(format!(
                "{path} is there, and this agent has not made it; stop the agent that has another journal, or remove it: rmdir {path}"
            )));
        }
        let was = String::new();
        self.note(Record { path: path.to_owned(), inode: None, was, same_effect: None, made: true })?;
        self.kernel.make_folder(path)
    }

    /// Puts a record on disk. Those of cgroups that are gone are dropped once there are many, so that services that come and go do not fill
    /// the journal.
    fn note(&mut self, record: Record) -> Result<(), KernelError> {
        if self.records.len() < self.prune_at {
            // On a line of its own, also after a record that a full disk cut short.
            self.kernel.append(&self.journal, &format!("\n{}", record.line()))?;
            self.records.push(record);
            return Ok(());
        }
        let is_there = |record: &Record| match self.cgroup_inode(&record.path) {
            Ok(inode) => inode == record.inode,
            Err(error) => !error.is_gone(),
        };
        let mut kept: Vec<Record> = self.records.iter().filter(|record| is_there(record)).cloned().collect();
        kept.push(record);
        self.kernel.replace(&self.journal, &lines(&kept))?;
        self.prune_at = FEWEST_TO_PRUNE.max(2 * kept.len());
        self.records = kept;
        Ok(())
    }

    /// Restores every setting that was changed, the last one first, and removes the journal.
    ///
    /// # Errors
    /// The first one as reading or writing fails. The others are restored all the same. What was not restored is tried
    /// again by the next call, or the next start.
    pub fn restore(&mut self) -> Result<Vec<Restored>, KernelError> {
        self.records = match self.kernel.read_own(&self.journal) {
            Ok(text) => Record::all(&text),
            Err(error) if error.is_gone() => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        self.restore_all_but(|_| false)
    }

    /// Restores what was changed, but for the settings that `keeps` names.
    ///
    /// # Errors
    /// As [`Settings::restore`].
    pub fn restore_all_but(&mut self, keeps: impl Fn(&str) -> bool) -> Result<Vec<Restored>, KernelError> {
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
        match (left.is_empty(), left.len() == self.records.len()) {
            (true, _) => match self.kernel.remove(&self.journal) {
                Err(error) if !error.is_gone() => return Err(error),
                _ => {}
            },
            (false, true) => {}
            (false, false) => {
                self.kernel.replace(&self.journal, &lines(&left))?;
            }
        }
        self.records = left;
        failure.map_or(Ok(restored), Err)
    }

    fn restore_one(&self, record: &Record) -> Result<Restored, KernelError> {
        let Record { path, inode, was, same_effect, made } = record.clone();
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
        match (self.kernel.write(&path, &was), same_effect) {
            (Err(error), Some(value)) if !error.is_gone() => {
                self.kernel.write(&path, &value)?;
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

fn lines(records: &[Record]) -> String {
    records.iter().map(|record| record.line() + "\n").collect()
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
        let (_, restored) = Settings::start(&tree, "/journal").unwrap();
        assert_eq!(
            restored,
            [Restored::AsFound { path: crate::DEMOTION.to_owned(), value: "false".to_owned() }]
        );
        assert_eq!(tree.settings(), before);
        assert!(tree.disk().is_empty());
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
