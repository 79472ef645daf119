//! Objects that several users in one process hold open under one announcement: a process has few announcements, and may have
//! many endpoints that speak to the same peer.

use std::collections::BTreeMap;
use std::sync::Mutex;

use polder_mem::Offset;

use crate::object::Object;

/// What this process holds open for several users, by name and generation.
#[derive(Debug, Default)]
pub(crate) struct SharedObjects(pub(crate) Mutex<BTreeMap<(String, u64), Held>>);

/// An object that is held open for so many users.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) object: Object,
    pub(crate) users: usize,
}

/// The part of one user in an object that is held open; it is given back to [`Pool::let_go`].
#[derive(Debug)]
#[must_use = "an object that is not let go of is held open until the process ends"]
pub(crate) struct SharedObject {
    pub(crate) key: (String, u64),
    at: Offset,
    bytes: u64,
    slot: u32,
}

impl SharedObject {
    pub(crate) fn name(&self) -> &str {
        &self.key.0
    }

    pub(crate) const fn generation(&self) -> u64 {
        self.key.1
    }

    pub(crate) const fn at(&self) -> Offset {
        self.at
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The slot of its entry, in the directory of its owner.
    pub(crate) const fn slot(&self) -> u32 {
        self.slot
    }
}

impl Held {
    /// One more user.
    pub(crate) fn take(&mut self) -> SharedObject {
        self.users += 1;
        let Object { name, generation, at, bytes, slot, .. } = &self.object;
        SharedObject { key: (name.clone(), *generation), at: *at, bytes: *bytes, slot: *slot }
    }
}
