//! How the users of one process hold an object open together.

use polder_mem::Memory;

use crate::pool::locked;
use crate::shared::{Held, SharedObject};
use crate::{Pool, PoolError};

impl<M: Memory> Pool<M> {
    /// Holds the object of this name open, of a generation that `is_it`, together with others of this process that do.
    ///
    /// # Errors
    /// [`PoolError::NotFound`] when it is of another generation; those of [`Pool::open`].
    pub(crate) fn share(&self, name: &str, is_it: impl Fn(u64) -> bool) -> Result<SharedObject, PoolError> {
        let all = (name.to_owned(), 0)..=(name.to_owned(), u64::MAX);
        if let Some((_, held)) =
            locked(&self.shared.0).range_mut(all).find(|((_, generation), _)| is_it(*generation))
        {
            return Ok(held.take());
        }
        let object = self.open(name)?;
        if !is_it(object.generation()) {
            self.close(object);
            return Err(PoolError::NotFound { name: name.to_owned() });
        }
        let key = (name.to_owned(), object.generation());
        let mut shared = locked(&self.shared.0);
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
        let mut shared = locked(&self.shared.0);
        let Some(held) = shared.get_mut(&taken.key) else { return };
        held.users -= 1;
        let last = if held.users == 0 { shared.remove(&taken.key) } else { None };
        drop(shared);
        last.into_iter().for_each(|Held { object, .. }| self.close(object));
    }
}
