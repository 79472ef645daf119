//! A lock that costs next to nothing where a program has promised that its threads take turns.

use std::cell::UnsafeCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value that one thread at a time works on: behind a lock, or by the program's promise. A lock and its release are two
/// locked instructions, which wait for all stores before them; as much as all else that a short message costs.
pub struct Serial<T> {
    turns: Turns,
    value: UnsafeCell<T>,
}

enum Turns {
    Locked(Mutex<()>),
    /// Whether a thread has its turn.
    Promised(AtomicBool),
}

// SAFETY: one thread at a time has the value: the one that has the lock, or the one that has its turn by the contract of `promised`.
unsafe impl<T: Send> Sync for Serial<T> {}

impl<T> Serial<T> {
    /// Behind a lock.
    #[must_use]
    pub const fn locked(value: T) -> Self {
        Self { turns: Turns::Locked(Mutex::new(())), value: UnsafeCell::new(value) }
    }

    /// By a promise.
    ///
    /// # Safety
    /// Of any two calls of [`Serial::take_turn`], with all that is done until what it returns is dropped, one happens before the other.
    #[must_use]
    pub const unsafe fn promised(value: T) -> Self {
        Self { turns: Turns::Promised(AtomicBool::new(false)), value: UnsafeCell::new(value) }
    }

    /// Whether a turn takes a lock, and gives it back.
    #[inline]
    pub const fn is_locked(&self) -> bool {
        matches!(self.turns, Turns::Locked(_))
    }

    /// The value, for this thread alone until what is returned is dropped. A thread that panicked meanwhile leaves it as it was.
    ///
    /// # Panics
    /// When the promise is broken, and that shows.
    #[inline(always)]
    pub fn take_turn(&self) -> SerialGuard<'_, T> {
        let held = match &self.turns {
            Turns::Locked(lock) => Some(lock.lock().unwrap_or_else(PoisonError::into_inner)),
            Turns::Promised(taken) => {
                assert!(!taken.load(Ordering::Relaxed), "two threads at once, where turns were promised");
                taken.store(true, Ordering::Relaxed);
                None
            }
        };
        SerialGuard { serial: self, _held: held, _value: PhantomData }
    }
}

impl<T> fmt::Debug for Serial<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.turns {
            Turns::Locked(_) => "Serial(locked)",
            Turns::Promised(_) => "Serial(promised)",
        })
    }
}

/// A thread's turn at a [`Serial`].
pub struct SerialGuard<'a, T> {
    serial: &'a Serial<T>,
    _held: Option<MutexGuard<'a, ()>>,
    /// It is as a reference that is the only one: shared between threads only if the value may be.
    _value: PhantomData<&'a mut T>,
}

impl<T> Deref for SerialGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: it is this thread's turn.
        unsafe { &*self.serial.value.get() }
    }
}

impl<T> DerefMut for SerialGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: it is this thread's turn, and this is the only one to have it.
        unsafe { &mut *self.serial.value.get() }
    }
}

impl<T> Drop for SerialGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Turns::Promised(taken) = &self.serial.turns {
            taken.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;

    use super::*;

    #[test]
    fn threads_behind_the_lock_lose_nothing() {
        let sum = Serial::locked(0);
        let add = || (0..1000).for_each(|_| *sum.take_turn() += 1);
        thread::scope(|scope| {
            scope.spawn(add);
            scope.spawn(add);
        });
        assert_eq!(*sum.take_turn(), 2000);
    }

    #[test]
    fn a_turn_inside_a_turn_is_a_broken_promise_and_the_next_is_none() {
        // SAFETY: one thread, which takes its turns one by one, but for the one that is to panic before it has it.
        let value = unsafe { Serial::promised(1) };
        let mut turn = value.take_turn();
        *turn += 1;
        assert!(catch_unwind(AssertUnwindSafe(|| *value.take_turn())).is_err());
        drop(turn);
        assert_eq!(*value.take_turn(), 2);
    }

    #[test]
    fn a_panic_in_a_turn_ends_it() {
        // SAFETY: one thread, one turn after the other.
        for value in [Serial::locked(1), unsafe { Serial::promised(1) }] {
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                let mut turn = value.take_turn();
                *turn = 2;
                panic!("in a test");
            }));
            assert!(panicked.is_err());
            assert_eq!(*value.take_turn(), 2);
        }
    }
}
