//! A lock that costs next to nothing where a program has promised that its threads take turns.

use std::cell::UnsafeCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A value that one thread at a time works on: behind a lock, or by the program's promise. A lock and its release are two
/// locked instructions, which wait for all stores before them; as much as all else that a short message costs.
pub struct Serial<T> {
    /// Whether turns take the lock. Set once.
    locks: AtomicBool,
    lock: Mutex<()>,
    /// Whether a thread has its turn by the promise.
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time has the value: the one that has the lock, or the one that has its turn by the contract of `promised`.
unsafe impl<T: Send> Sync for Serial<T> {}

impl<T> Serial<T> {
    /// Behind a lock.
    #[must_use]
    pub const fn locked(value: T) -> Self {
        Self::new(true, value)
    }

    /// By a promise.
    ///
    /// # Safety
    /// Of any two calls of [`Serial::take_turn`], with all that is done until what it returns is dropped, one happens before the other;
    /// so it does of such a call and one of [`Serial::lock_turns`]. Calls that one of `lock_turns` happens before may come at any time.
    #[must_use]
    pub const unsafe fn promised(value: T) -> Self {
        Self::new(false, value)
    }

    const fn new(locks: bool, value: T) -> Self {
        let (locks, taken) = (AtomicBool::new(locks), AtomicBool::new(false));
        Self { locks, lock: Mutex::new(()), taken, value: UnsafeCell::new(value) }
    }

    /// Lets turns take the lock from here on, so that a thread may take one that the promise does not speak of.
    ///
    /// # Panics
    /// When a thread has its turn by the promise.
    pub fn lock_turns(&self) {
        assert!(!self.taken.load(Ordering::Relaxed), "turns were to be locked in the middle of one");
        self.locks.store(true, Ordering::Relaxed);
    }

    /// Whether a turn takes a lock, and gives it back.
    #[inline]
    pub fn is_locked(&self) -> bool {
        self.locks.load(Ordering::Relaxed)
    }

    /// The value, for this thread alone until what is returned is dropped. A thread that panicked meanwhile leaves it as it was.
    ///
    /// # Panics
    /// When the promise is broken, and that shows.
    #[inline(always)]
    pub fn take_turn(&self) -> SerialGuard<'_, T> {
        let held = match self.is_locked() {
            true => Some(self.lock.lock().unwrap_or_else(PoisonError::into_inner)),
            false => {
                assert!(
                    !self.taken.load(Ordering::Relaxed),
                    "two threads at once, where turns were promised"
                );
                self.taken.store(true, Ordering::Relaxed);
                None
            }
        };
        SerialGuard { serial: self, held, _value: PhantomData }
    }

    /// As [`Serial::take_turn`], where turns take the lock and no thread has one; else nothing.
    pub fn try_turn(&self) -> Option<SerialGuard<'_, T>> {
        let held = match self.lock.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        self.is_locked().then(|| SerialGuard { serial: self, held: Some(held), _value: PhantomData })
    }
}

impl<T> fmt::Debug for Serial<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_locked() { "Serial(locked)" } else { "Serial(promised)" })
    }
}

/// A thread's turn at a [`Serial`].
pub struct SerialGuard<'a, T> {
    serial: &'a Serial<T>,
    held: Option<MutexGuard<'a, ()>>,
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
        if self.held.is_none() {
            self.serial.taken.store(false, Ordering::Relaxed);
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
    fn a_promise_that_ends_lets_other_threads_in_one_at_a_time() {
        // SAFETY: one thread, until it locks the turns.
        let sum = unsafe { Serial::promised(0) };
        assert!(sum.try_turn().is_none(), "no turn for threads that the promise does not speak of");
        *sum.take_turn() += 1;
        sum.lock_turns();
        let add = || (0..1000).for_each(|_| *sum.take_turn() += 1);
        let try_add = || {
            let added = (0..1000).filter_map(|_| sum.try_turn().map(|mut sum| *sum += 1));
            added.count()
        };
        let tried = thread::scope(|scope| {
            let tried = scope.spawn(try_add);
            add();
            tried.join().unwrap()
        });
        assert_eq!(*sum.take_turn(), 1001 + tried);
        let turn = sum.take_turn();
        assert!(sum.try_turn().is_none(), "a thread has its turn");
        drop(turn);
        assert!(sum.try_turn().is_some());
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
