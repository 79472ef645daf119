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
        records.filter(|record| first.insert((record.path.clone(), record.inode))).collect()
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
}

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
        Self { kernel, journal: journal.to_owned(), records: Vec::new() }
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
            let record = Record { path: path.to_owned(), inode, was, same_effect };
            // On a line of its own, also after a record that a full disk cut short.
            self.kernel.append(&self.journal, &format!("\n{}", record.line()))?;
            self.records.push(record);
        }
        values.iter().try_for_each(|value| self.kernel.write(path, value))
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
                let lines: String = left.iter().map(|record| record.line() + "\n").collect();
                self.kernel.replace(&self.journal, &lines)?;
            }
        }
        self.records = left;
        failure.map_or(Ok(restored), Err)
    }

    fn restore_one(&self, record: &Record) -> Result<Restored, KernelError> {
        let Record { path, inode, was, same_effect } = record.clone();
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

/// Whether a setting that reads as `now` has the value `value`.
fn says(now: &str, value: &str) -> bool {
    now.trim() == value.trim()
}
