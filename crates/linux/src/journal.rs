//! Settings that are changed, and restored: also by the next start, after the process was killed.
//!
//! A record of what a setting was is on disk before the setting is changed. Each line of the journal is one JSON
//! object, `{"path": …, "was": …}`; a line that the death of its writer cut short belongs to a change that was not
//! made.
//!
//! Some settings cannot be given back as they were: the kernel refuses to empty `cpuset.mems` of a cgroup that has
//! processes (ENOSPC). Their records carry a value with the same effect, `"same_effect": …`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{Kernel, KernelError};

#[derive(Serialize, Deserialize)]
struct Record {
    path: String,
    was: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    same_effect: Option<String>,
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
    recorded: BTreeSet<String>,
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
        Self { kernel, journal: journal.to_owned(), recorded: BTreeSet::new() }
    }

    /// The kernel whose settings these are.
    pub const fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Sets `path` to `value`, unless it says so already.
    ///
    /// # Errors
    /// As reading, recording or writing fails.
    pub fn set(&mut self, path: &str, value: &str) -> Result<(), KernelError> {
        if says(&self.kernel.read(path)?, value) {
            return Ok(());
        }
        self.set_in_turn(path, &[value.to_owned()], None)
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
        if !self.recorded.contains(path) {
            let was = self.kernel.read(path)?.trim_end_matches('\n').to_owned();
            let record = Record { path: path.to_owned(), was, same_effect };
            let record = serde_json::to_string(&record).expect("strings are JSON");
            // On a line of its own, also after a record that a full disk cut short.
            self.kernel.append(&self.journal, &format!("\n{record}"))?;
            self.recorded.insert(path.to_owned());
        }
        values.iter().try_for_each(|value| self.kernel.write(path, value))
    }

    /// Restores every setting that was changed, the last one first, and removes the journal.
    ///
    /// # Errors
    /// As reading or writing fails; what was not restored is tried again by the next call, or the next start.
    pub fn restore(&mut self) -> Result<Vec<Restored>, KernelError> {
        let text = match self.kernel.read(&self.journal) {
            Ok(text) => text,
            Err(error) if error.is_gone() => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut first = BTreeSet::new();
        let records = text.lines().filter_map(|line| serde_json::from_str::<Record>(line).ok());
        let records: Vec<Record> = records.filter(|record| first.insert(record.path.clone())).collect();
        let mut restored = Vec::new();
        for record in records.into_iter().rev() {
            let path = record.path.clone();
            restored.push(match self.restore_one(record) {
                Err(error) if error.is_gone() => Restored::Gone { path },
                other => other?,
            });
        }
        self.kernel.remove(&self.journal)?;
        self.recorded.clear();
        Ok(restored)
    }

    fn restore_one(&self, record: Record) -> Result<Restored, KernelError> {
        let Record { path, was, same_effect } = record;
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
}

/// Whether a setting that reads as `now` has the value `value`.
fn says(now: &str, value: &str) -> bool {
    now.trim() == value.trim()
}
