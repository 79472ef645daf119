//! Blocks of a cache by names that are text, as LMCache gives them to a native plug-in.
//!
//! A name is `MODEL@RANK@GROUP@HASH` or the same with `@SALT` behind it. The key is the first half of the SHA-256 of the whole name. A client
//! may choose its salt, and its prompt: a weaker hash, or a mix of two, would let it aim at the key of another. Blocks of one group have one
//! size. It is seen when a block is put or asked for, so a cache is opened for each size, all of one identity.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use polder_mem::AnyMemory;
use polder_pool::PoolError;
use polder_pool::kv::{Cache, Identity, Key, Options};
use sha2::{Digest, Sha256};

use crate::session::Session;
use crate::tellers::lock;

/// Bytes of a key, and the least that LMCache's hash has: no key resists collisions better than what it is made of.
const HASH_BYTES: usize = size_of::<Key>();
/// A look-up has no size. No block of so few bytes is ever put.
const NO_BLOCK: u32 = 1;

/// Blocks of any size in one cache.
pub struct NamedBlocks {
    /// By the bytes of their blocks.
    caches: Mutex<BTreeMap<u32, Arc<Cache<AnyMemory>>>>,
    index: Cache<AnyMemory>,
    name: String,
    session: Arc<Session>,
}

impl NamedBlocks {
    /// Opens the cache of this name for blocks of this identity; `hash` is the SHA-256 of `text`.
    ///
    /// # Errors
    /// Those of [`Cache::open`].
    pub fn open(
        session: Arc<Session>,
        name: &str,
        (hash, text): ([u8; 32], String),
        budget: Option<u64>,
    ) -> Result<Self, PoolError> {
        let identity = Identity { hash, text, block: NO_BLOCK };
        let options = Options { budget, verify: false };
        let index = Cache::open(Arc::clone(session.pool()), name, identity, options)?;
        Ok(Self { caches: Mutex::default(), index, name: name.to_owned(), session })
    }

    /// Which of these names have blocks.
    ///
    /// # Errors
    /// [`PoolError::Name`] for one that LMCache does not give; those of [`Cache::lookup`].
    pub fn lookup(&self, names: &[String]) -> Result<Vec<bool>, PoolError> {
        self.index.lookup(&keys_of(names)?)
    }

    /// Stores blocks that are not there yet; whether all are there now.
    ///
    /// # Errors
    /// As [`NamedBlocks::lookup`]; those of [`Cache::put`].
    pub fn put(&self, names: &[String], blocks: &[&[u8]]) -> Result<bool, PoolError> {
        let keys = keys_of(names)?;
        expect_one_each(&keys, blocks.len())?;
        let mut all = true;
        for (size, places) in by_size(blocks.iter().map(|block| block.len()))? {
            let keys: Vec<_> = places.iter().map(|&place| keys[place]).collect();
            let blocks: Vec<_> = places.iter().map(|&place| blocks[place]).collect();
            all &= self.cache(size)?.put(&keys, &blocks)?.refused == 0;
        }
        Ok(all)
    }

    /// Fills buffers with blocks; says of each whether it was there with this size.
    ///
    /// # Errors
    /// As [`NamedBlocks::lookup`]; those of [`Cache::get`].
    pub fn get(&self, names: &[String], into: Vec<&mut [u8]>) -> Result<Vec<bool>, PoolError> {
        let keys = keys_of(names)?;
        expect_one_each(&keys, into.len())?;
        let sizes = by_size(into.iter().map(|buffer| buffer.len()))?;
        let mut into: Vec<_> = into.into_iter().map(Some).collect();
        let mut present = vec![false; keys.len()];
        for (size, places) in sizes {
            let keys: Vec<_> = places.iter().map(|&place| keys[place]).collect();
            let mut buffers: Vec<_> = places.iter().filter_map(|&place| into[place].take()).collect();
            let got = self.cache(size)?.get(&keys, &mut buffers)?;
            places.into_iter().zip(got).for_each(|(place, is_there)| present[place] = is_there);
        }
        Ok(present)
    }

    /// The cache for blocks of this size.
    fn cache(&self, block: u32) -> Result<Arc<Cache<AnyMemory>>, PoolError> {
        let mut caches = lock(&self.caches);
        if let Some(cache) = caches.get(&block) {
            return Ok(Arc::clone(cache));
        }
        let identity = Identity { block, ..self.index.identity().clone() };
        let pool = Arc::clone(self.session.pool());
        let cache = Arc::new(Cache::open(pool, &self.name, identity, Options::default())?);
        caches.insert(block, Arc::clone(&cache));
        Ok(cache)
    }
}

/// The places of each size.
fn by_size(sizes: impl Iterator<Item = usize>) -> Result<BTreeMap<u32, Vec<usize>>, PoolError> {
    let mut places = BTreeMap::<u32, Vec<usize>>::new();
    for (place, size) in sizes.enumerate() {
        let block = u32::try_from(size).ok().filter(|size| *size > NO_BLOCK);
        let block = block.ok_or_else(|| PoolError::Argument {
            what: "a block",
            value: format!("{size} bytes"),
            expected: "2 bytes to 4 GiB",
        })?;
        places.entry(block).or_default().push(place);
    }
    Ok(places)
}

fn expect_one_each(keys: &[Key], blocks: usize) -> Result<(), PoolError> {
    if keys.len() == blocks {
        return Ok(());
    }
    let value = format!("{blocks} for {} keys", keys.len());
    Err(PoolError::Argument { what: "the number of blocks", value, expected: "one for each key" })
}

fn keys_of(names: &[String]) -> Result<Vec<Key>, PoolError> {
    names.iter().map(|name| key_of(name)).collect()
}

/// The key of a name.
fn key_of(name: &str) -> Result<Key, PoolError> {
    let why = "is no MODEL@RANK@GROUP@HASH of LMCache with a hash of 16 bytes or more; take --hash-algorithm blake3";
    let wrong = || PoolError::Name { name: name.to_owned(), why };
    let fields: Vec<_> = name.split('@').collect();
    let ([_, _, _, hash] | [_, _, _, hash, _]) = fields[..] else {
        return Err(wrong());
    };
    let is_hex = hash.bytes().all(|digit| digit.is_ascii_hexdigit());
    if !is_hex || hash.len() < 2 * HASH_BYTES {
        return Err(wrong());
    }
    let mut key = Key::default();
    key.copy_from_slice(&Sha256::digest(name.as_bytes())[..HASH_BYTES]);
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

    #[test]
    fn a_key_is_a_hash_of_every_part_of_its_name() {
        let name = |model: &str, rank: u32, group: u32, salt: &str| {
            format!("{model}@{rank:08x}@{group:x}@{HASH}{salt}")
        };
        let names = [
            name("llama", 0, 0, ""),
            name("llama/3", 0, 0, ""),
            name("llama", 1, 0, ""),
            name("llama", 0, 1, ""),
            name("llama", 0, 0, "@user"),
            name("llama", 0, 0, "").replace("@0001", "@0101"),
            name("llama", 0, 0, "").replace("1e1f", "1e1e"),
        ];
        let mut keys = keys_of(&names).unwrap();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), names.len());
        // By `printf %s NAME | sha256sum`: no part is mixed in by anything weaker.
        let expected = "e193e5cd2dfd3ff7d44c79920b4cf7fb";
        let key: String = key_of(&names[4]).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(key, expected);
    }

    #[test]
    fn what_lmcache_does_not_give_is_refused_by_its_name() {
        for name in [
            "",
            "llama",
            "llama@0@0",
            "llama@0@0@0123",
            "a@0@0@zz0102030405060708090a0b0c0d0e0f",
            "a@b@c@d@e@f",
        ] {
            let refused = key_of(name).unwrap_err().to_string();
            assert!(refused.contains("blake3"), "{refused}");
        }
    }
}
