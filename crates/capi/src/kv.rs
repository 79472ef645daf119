//! `polder_kv`: a cache of blocks.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use polder_attach::session::Session;
use polder_mem::AnyMemory;
use polder_pool::kv::{Cache, Identity, Key, Options};

use crate::failure::Failure;
use crate::guard::{self, exported};
use crate::pool::Pool;

/// A cache, let go of before the session.
pub(crate) struct Kv {
    cache: Cache<AnyMemory>,
    _session: Arc<Session>,
}

exported! {
    /// Opens a cache, which the first process makes.
    extern "C" fn polder_kv_open(
        pool: *mut Pool,
        name: *const c_char,
        identity: *const c_char,
        hash: *const c_void,
        block_bytes: u32,
        budget: u64,
        kv: *mut *mut Kv,
    ) -> c_int {
        let open = || {
            let (Pool(session), name) = (guard::given(pool, "pool")?, guard::text(name, "name")?);
            let (text, hash) = (guard::text(identity, "identity")?, guard::source(hash.cast(), 32)?);
            let hash = hash.try_into().expect("32 bytes");
            let identity = Identity { hash, text: text.to_owned(), block: block_bytes };
            let options = Options { budget: (budget > 0).then_some(budget), verify: false };
            let cache = Cache::open(Arc::clone(session.pool()), name, identity, options)?;
            Ok(Kv { cache, _session: Arc::clone(session) })
        };
        guard::made(kv, open)
    }

    /// Says which keys have blocks.
    extern "C" fn polder_kv_lookup(
        kv: *mut Kv,
        keys: *const c_void,
        count: usize,
        found: *mut c_void,
    ) -> c_int {
        guard::status(|| {
            let (kv, keys) = (guard::given(kv, "cache")?, keys_at(keys, count)?);
            let flags = guard::target(found.cast::<u8>(), count)?;
            let there = kv.cache.lookup(&keys)?;
            flags.iter_mut().zip(there).for_each(|(flag, there)| *flag = there.into());
            Ok(())
        })
    }

    /// Stores blocks that are not there yet.
    extern "C" fn polder_kv_put(
        kv: *mut Kv,
        keys: *const c_void,
        blocks: *const *const c_void,
        count: usize,
        refused: *mut u64,
    ) -> c_int {
        guard::status(|| {
            let (kv, keys) = (guard::given(kv, "cache")?, keys_at(keys, count)?);
            let bytes = kv.cache.identity().block as usize;
            let places = pointers(blocks, count)?;
            let blocks = places.iter().map(|at| guard::source(at.cast(), bytes));
            let put = kv.cache.put(&keys, &blocks.collect::<Result<Vec<_>, _>>()?)?;
            if let Some(refused) = refused.as_mut() {
                *refused = put.refused;
            }
            Ok(())
        })
    }

    /// Fills buffers with blocks.
    extern "C" fn polder_kv_get(
        kv: *mut Kv,
        keys: *const c_void,
        into: *const *mut c_void,
        count: usize,
        found: *mut c_void,
    ) -> c_int {
        guard::status(|| {
            let (kv, keys) = (guard::given(kv, "cache")?, keys_at(keys, count)?);
            let bytes = kv.cache.identity().block as usize;
            let (places, flags) =
                (pointers(into.cast(), count)?, guard::target(found.cast::<u8>(), count)?);
            let mut sorted: Vec<_> = places.iter().map(|at| *at as usize).collect();
            sorted.sort_unstable();
            if sorted.windows(2).any(|two| two[1] - two[0] < bytes) {
                return Err(Failure::argument("two buffers share memory; give each block its own"));
            }
            // No two share a byte.
            let buffers = places.iter().map(|at| guard::target(at.cast_mut().cast(), bytes));
            let there = kv.cache.get(&keys, &mut buffers.collect::<Result<Vec<_>, _>>()?)?;
            flags.iter_mut().zip(there).for_each(|(flag, there)| *flag = there.into());
            Ok(())
        })
    }

    /// Lets go of a cache; blocks stay.
    extern "C" fn polder_kv_close(kv: *mut Kv) -> c_int {
        guard::close(kv)
    }
}

/// Keys of 16 bytes, one after the other.
///
/// # Safety
/// So many may be read there.
unsafe fn keys_at(keys: *const c_void, count: usize) -> Result<Vec<Key>, Failure> {
    // SAFETY: by this function's contract.
    let bytes = unsafe { guard::source(keys.cast(), count.saturating_mul(size_of::<Key>()))? };
    Ok(bytes.as_chunks().0.to_vec())
}

/// Addresses, one after the other.
///
/// # Safety
/// So many may be read there, which is aligned as pointers are.
unsafe fn pointers<'a>(at: *const *const c_void, count: usize) -> Result<&'a [*const c_void], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if at.is_null() {
        return Err(Failure::argument(format!("{count} blocks at NULL; pass an array of their addresses")));
    }
    // SAFETY: not null, and readable by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts(at, count) })
}
