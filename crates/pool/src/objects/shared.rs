//! Objects that several users in one process hold open under one announcement: a process has few announcements, and may have
//! many endpoints that speak to the same peer.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use polder_mem::{Memory, Offset};

use crate::object::Object;
use crate::{Pool, PoolError};

/// What this process holds open for several users, by name and generation.
#[derive(Debug, Default)]
pub(crate) struct SharedObjects(Mutex<BTreeMap<(String, u64), Held>>);

#[derive(Debug)]
struct Held {
    object: Object,
    users: usize,
}

/// The part of one user in an object that is held open; it is given back to [`Pool::let_go`].
#[derive(Debug)]
#[must_use = "an object that is not let go of is held open until the process ends"]
pub(crate) struct SharedObject {
    key: (String, u64),
    at: Offset,
    bytes: u64,
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
}

impl SharedObjects {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, u64), Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    fn take(&mut self) -> SharedObject {
        self.users += 1;
        let Object { name, generation, at, bytes, .. } = &self.object;
        SharedObject { key: (name.clone(), *generation), at: *at, bytes: *bytes }
    }
}

impl<M: Memory> Pool<M> {
    /// Holds the object of this name open, of a generation that `is_it`, together with others of this process that do.
    ///
    /// # Errors
    /// [`PoolError::NotFound`] when it is of another generation; those of [`Pool::open`].
    pub(crate) fn share(&self, name: &str, is_it: impl Fn(u64) -> bool) -> Result<SharedObject, PoolError> {
        let all = (name.to_owned(), 0)..=(name.to_owned(), u64::MAX);
        if let Some((_, held)) =
            self.shared.lock().range_mut(all).find(|((_, generation), _)| is_it(*generation))
        {
            return Ok(held.take());
        }
        let object = self.open(name)?;
        if !is_it(object.generation()) {
            self.close(object);
            return Err(PoolError::NotFound { name: name.to_owned() });
        }
        let key = (name.to_owned(), object.generation());
        let mut shared = self.shared.lock();
        if let Some(held) = shared.get_mut(&key) {
            // Another thread was as fast.
            let taken = held.take();
            drop(shared);
            self.close(object);
            return Ok(taken);
        }
        Ok(shared.entry(key).or_insert(Held { object, users: 0 }).take())
    }

    /// Gives back what [`Pool::share`] gave; the last user closes the object.
    pub(crate) fn let_go(&self, taken: SharedObject) {
        let mut shared = self.shared.lock();
        let Some(held) = shared.get_mut(&taken.key) else { return };
        held.users -= 1;
        let last = if held.users == 0 { shared.remove(&taken.key) } else { None };
        drop(shared);
        last.into_iter().for_each(|Held { object, .. }| self.close(object));
    }
}
