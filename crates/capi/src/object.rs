//! `polder_object`.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use polder_attach::session::Session;
use polder_mem::Memory;

use crate::failure::Failure;
use crate::guard::{self, exported};
use crate::pool::Pool;

/// Named bytes that this process holds open.
pub(crate) struct Object {
    session: Arc<Session>,
    /// Taken when it is closed.
    held: Option<polder_pool::Object>,
}

impl Object {
    fn held(&self) -> &polder_pool::Object {
        self.held.as_ref().expect("held until it is dropped")
    }

    /// The same, while the host is a member.
    fn held_by_member(&self) -> Result<&polder_pool::Object, polder_pool::PoolError> {
        self.session.pool().expect_member()?;
        Ok(self.held())
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if let Some(object) = self.held.take() {
            self.session.pool().close(object);
        }
    }
}

exported! {
    /// Makes an object.
    extern "C" fn polder_object_create(
        pool: *mut Pool,
        name: *const c_char,
        bytes: usize,
        object: *mut *mut Object,
    ) -> c_int {
        let create = || {
            let (Pool(session), name) = (guard::given(pool, "pool")?, guard::text(name, "name")?);
            let held = session.pool().create(name, bytes as u64)?;
            Ok(Object { session: Arc::clone(session), held: Some(held) })
        };
        guard::made(object, create)
    }

    /// Opens an object.
    extern "C" fn polder_object_open(
        pool: *mut Pool,
        name: *const c_char,
        object: *mut *mut Object,
    ) -> c_int {
        let open = || {
            let (Pool(session), name) = (guard::given(pool, "pool")?, guard::text(name, "name")?);
            let held = session.pool().open(name)?;
            Ok(Object { session: Arc::clone(session), held: Some(held) })
        };
        guard::made(object, open)
    }

    /// Destroys an object.
    extern "C" fn polder_object_destroy(pool: *mut Pool, name: *const c_char) -> c_int {
        guard::status(|| {
            let (Pool(session), name) = (guard::given(pool, "pool")?, guard::text(name, "name")?);
            Ok(session.pool().destroy(name)?)
        })
    }

    /// Lets go of an object.
    extern "C" fn polder_object_close(object: *mut Object) -> c_int {
        guard::close(object)
    }

    /// The size of an object in bytes; 0 of null.
    extern "C" fn polder_object_size(object: *const Object) -> usize {
        guard::value(0, || Ok(guard::given(object, "object")?.held().bytes() as usize))
    }

    /// Copies bytes out, afresh.
    extern "C" fn polder_object_read(
        object: *const Object,
        offset: usize,
        into: *mut c_void,
        bytes: usize,
    ) -> c_int {
        guard::status(|| {
            let (object, into) = (guard::given(object, "object")?, guard::target(into.cast(), bytes)?);
            let held = object.held_by_member()?;
            Ok(held.read_at(object.session.pool().memory(), offset as u64, into)?)
        })
    }

    /// Copies bytes in and publishes them.
    extern "C" fn polder_object_write(
        object: *const Object,
        offset: usize,
        from: *const c_void,
        bytes: usize,
    ) -> c_int {
        guard::status(|| {
            let (object, from) = (guard::given(object, "object")?, guard::source(from.cast(), bytes)?);
            let held = object.held_by_member()?;
            Ok(held.write_at(object.session.pool().memory(), offset as u64, from)?)
        })
    }

    /// Where an object is mapped; null where it is not, and of null.
    extern "C" fn polder_object_address(object: *const Object) -> *mut c_void {
        guard::value(ptr::null_mut(), || {
            let object = guard::given(object, "object")?;
            let held = object.held_by_member()?;
            let address = object.session.pool().memory().address(held.at(), held.bytes());
            let refused = || {
                let name = held.name();
                Failure::argument(format!(
                    "{name} lies in a shadow, which has no address; read and write it by calls"
                ))
            };
            Ok(address.ok_or_else(refused)?.cast())
        })
    }

    /// Publishes what this host stored in a range.
    extern "C" fn polder_object_publish(object: *const Object, offset: usize, bytes: usize) -> c_int {
        guard::status(|| {
            let object = guard::given(object, "object")?;
            let held = object.held_by_member()?;
            Ok(held.publish(object.session.pool().memory(), offset as u64, bytes as u64)?)
        })
    }

    /// Forgets what this host's caches hold of a range.
    extern "C" fn polder_object_refresh(object: *const Object, offset: usize, bytes: usize) -> c_int {
        guard::status(|| {
            let object = guard::given(object, "object")?;
            let held = object.held_by_member()?;
            Ok(held.refresh(object.session.pool().memory(), offset as u64, bytes as u64)?)
        })
    }
}
