use std::time::Duration;

use polder_mem::{Heap, HeapShape, ProcessSlot};

use super::*;
use crate::Member;
use crate::format::{Geometry, Layout, Overwrite, Uuid, format};
use crate::keeper::{Keeper, KeeperTask, MembershipChange, change_membership};
use crate::local::LocalLayout;
use crate::view::IdSource;

const BYTES: u64 = 4 << 20;
const BLOCK: u32 = 4096;

fn heap() -> Heap {
    let geometry = Geometry {
        hosts: 2,
        processes: 3,
        names: 31,
        levels: 4,
        chunk_bytes: 64 << 10,
        opens: 20,
        keepers: 2,
    };
    let layout = Layout::new(&geometry, BYTES).unwrap();
    let local_words = LocalLayout::new(&layout).words();
    let heap = Heap::new(HeapShape { bytes: BYTES, hosts: 2, processes: 3, local_words, bells: 6 });
    format(&heap, &geometry, Uuid(1), Overwrite::Refuse).unwrap();
    heap
}

fn pool(heap: &Heap, host: u16, slot: u16) -> Arc<Pool<Heap>> {
    let member = Member { timeout: Duration::from_secs(5), ..Member::new(host, 7) };
    let memory = match (host, slot) {
        (0, 0) => heap.clone(),
        (host, slot) => heap.process(host, ProcessSlot(slot)),
    };
    Arc::new(Pool::attach(memory, member).unwrap())
}

fn identity(hash: u8, block: u32) -> Identity {
    let bytes = std::array::from_fn(|at| hash.wrapping_add(at as u8).wrapping_mul(hash + 30));
    Identity { hash: bytes, text: format!("identity {hash}"), block }
}

/// A cache of slabs with 8 blocks of 4 KiB.
fn cache_of(pool: &Arc<Pool<Heap>>, identity: Identity, options: Options) -> Result<Cache<Heap>, PoolError> {
    cache_with(pool, identity, options, 4)
}

fn cache_with(
    pool: &Arc<Pool<Heap>>,
    identity: Identity,
    options: Options,
    log_lines: u64,
) -> Result<Cache<Heap>, PoolError> {
    let slab_bytes = 512 + 64 + 8 * (64 + 4096);
    let budget = options.budget.unwrap_or(2 * slab_bytes);
    let root = Root { slab_bytes, log_lines, budget, hosts: 2 };
    Cache::open_with(Arc::clone(pool), "llm", identity, options, root)
}

fn cache(pool: &Arc<Pool<Heap>>) -> Cache<Heap> {
    cache_of(pool, identity(1, BLOCK), Options::default()).unwrap()
}

fn key(name: u8) -> Key {
    [name; 16]
}

fn put(cache: &Cache<Heap>, names: &[u8]) -> Put {
    let keys: Vec<Key> = names.iter().map(|name| key(*name)).collect();
    let blocks: Vec<Vec<u8>> = names.iter().map(|name| vec![*name; BLOCK as usize]).collect();
    cache.put(&keys, &blocks.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap()
}

/// The names whose blocks are there, each of which is right.
fn got(cache: &Cache<Heap>, names: &[u8]) -> Vec<u8> {
    let keys: Vec<Key> = names.iter().map(|name| key(*name)).collect();
    let mut buffers = vec![vec![0; BLOCK as usize]; names.len()];
    let mut into: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    let found = cache.get(&keys, &mut into).unwrap();
    let found = names.iter().zip(found).zip(&buffers).filter(|((_, found), _)| *found);
    found
        .map(|((name, _), buffer)| {
            assert_eq!(buffer, &vec![*name; BLOCK as usize]);
            *name
        })
        .collect()
}

#[test]
fn what_one_host_puts_every_process_finds_and_reads() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 0, 1), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    assert_eq!(put(&caches[0], &[1, 2, 3, 2]), Put { stored: 3, present: 1, refused: 0 });
    assert_eq!(put(&caches[2], &[3, 4]), Put { stored: 1, present: 1, refused: 0 });
    for cache in &caches {
        assert_eq!(cache.lookup(&[key(1), key(9), key(4)]), Ok(vec![true, false, true]));
        assert_eq!(got(cache, &[4, 9, 3, 2, 1]), [4, 3, 2, 1]);
    }
    // Whoever comes later reads the lines of the slots.
    let late = pool(&heap, 1, 1);
    assert_eq!(got(&cache(&late), &[1, 2, 3, 4, 5]), [1, 2, 3, 4]);
    let stat = caches[1].stat().unwrap();
    assert_eq!((stat.blocks, stat.hits, stat.misses, stat.void), (4, 4, 1, 0));
    assert_eq!(
        stat.hosts.iter().map(|part| (part.host, part.blocks, part.puts)).collect::<Vec<_>>(),
        [(0, 3, 3), (1, 1, 1)]
    );
    let seen = inspect(&heap).unwrap();
    assert_eq!((seen.len(), seen[0].name.as_str(), seen[0].blocks, seen[0].bytes), (1, "llm", 4, 4 * 4096));
    // Each process has asked for five blocks or more, of which four are there.
    let totals = |parts: &[PartStat]| parts.iter().map(|part| (part.hits, part.misses)).collect::<Vec<_>>();
    assert_eq!(totals(&seen[0].hosts), [(8, 2), (8, 2)]);
    assert_eq!(totals(&stat.hosts), totals(&seen[0].hosts));
    assert!(seen[0].hosts.iter().all(|part| part.oldest_seconds.is_some_and(|age| age < 3600)), "{seen:?}");
    let pin = caches[0].pin(&[key(1), key(4), key(9)]).unwrap();
    let pinned = || inspect(&heap).unwrap()[0].hosts.iter().map(|part| part.pinned).collect::<Vec<_>>();
    assert_eq!(pinned(), [Some(1), Some(1)]);
    drop(pin);
    assert_eq!(pinned(), [Some(0), Some(0)]);
    assert_eq!((seen[0].claimed, seen[0].budget), (stat.claimed, stat.budget));
    assert_eq!(seen[0].identities[0].text, "identity 1");
    assert_eq!(seen[0].identities[0].hash, identity(1, BLOCK).name());
}

#[test]
fn the_oldest_block_makes_room_and_the_budget_holds() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    let names: Vec<u8> = (0..40).collect();
    for names in names.chunks(3) {
        assert_eq!(put(&caches[0], names).refused, 0);
        let keys: Vec<Key> = names.iter().map(|name| key(*name)).collect();
        assert_eq!(caches[1].lookup(&keys), Ok(vec![true; names.len()]));
    }
    // The budget is two slabs of 8.
    assert_eq!(got(&caches[1], &names), (24..40).collect::<Vec<u8>>());
    let stat = caches[0].stat().unwrap();
    assert!(stat.claimed <= stat.budget, "{stat:?}");
    assert_eq!((stat.blocks, stat.hosts[0].evictions), (16, 24));
    // More than there is at once.
    let many: Vec<u8> = (60..90).collect();
    assert_eq!(put(&caches[0], &many), Put { stored: 16, present: 0, refused: 14 });
}

#[test]
fn blocks_that_any_host_reads_outlive_those_that_nobody_does() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 0, 1), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    put(&caches[0], &(0..16).collect::<Vec<u8>>());
    for name in 100..200 {
        // Each reader has a prefix of its own, which it reads between any two puts of what nobody reads again.
        for (reader, prefix) in (0..).zip([[0, 1], [5, 6], [14, 15]]) {
            assert_eq!(got(&caches[reader], &prefix), prefix, "at {name}");
        }
        assert_eq!(put(&caches[0], &[name]).stored, 1);
    }
    // The others made room, the one that came first before all others. Four blocks of this size are counted together.
    assert_eq!(got(&caches[1], &(100..200).collect::<Vec<u8>>()), (196..200).collect::<Vec<u8>>());
    assert_eq!(got(&caches[1], &(0..16).collect::<Vec<u8>>()), [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]);
    assert_eq!(caches[0].stat().unwrap().hosts[0].evictions, 100);
    // Where all are read, one makes room for each that comes.
    for name in 200..250 {
        let all: Vec<u8> = (0..=name).collect();
        assert_eq!(got(&caches[2], &all).len(), 16, "at {name}");
        assert_eq!(put(&caches[0], &[name]).stored, 1);
    }
}

#[test]
fn many_puts_lose_none_of_their_own_while_older_blocks_are_there_that_were_read_once() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    put(&caches[0], &(0..16).collect::<Vec<u8>>());
    // Four blocks of this size are counted together: those from 4 and from 12 on were read.
    got(&caches[1], &[4, 5, 6, 7, 12, 13, 14, 15]);
    let burst: Vec<u8> = (100..116).collect();
    for name in &burst {
        assert_eq!(put(&caches[0], &[*name]).stored, 1);
        let sofar: Vec<u8> = (100..=*name).collect();
        assert_eq!(
            caches[1].lookup(&sofar.iter().map(|name| key(*name)).collect::<Vec<_>>()),
            Ok(vec![true; sofar.len()])
        );
    }
    assert_eq!(got(&caches[1], &burst), burst);
    // Nobody reads any more: the one that came first makes room again.
    let more: Vec<u8> = (120..160).collect();
    more.iter().for_each(|name| _ = put(&caches[0], &[*name]));
    assert_eq!(got(&caches[1], &more).len(), 16);
}

#[test]
fn a_host_that_has_no_room_is_given_a_slab_by_one_that_has_more_than_its_part() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    put(&caches[0], &(0..16).collect::<Vec<u8>>());
    assert_eq!(put(&caches[1], &[50, 51]), Put { stored: 0, present: 0, refused: 2 });
    // The other host is asked, and does not wait for anybody: a look-up is enough.
    assert_eq!(caches[0].lookup(&[key(8)]), Ok(vec![true]));
    assert_eq!(got(&caches[0], &(0..16).collect::<Vec<u8>>()), (8..16).collect::<Vec<u8>>());
    assert_eq!(put(&caches[0], &[20]), Put { stored: 1, present: 0, refused: 0 });
    assert_eq!(put(&caches[1], &[50, 51]), Put { stored: 2, present: 0, refused: 0 });
    assert_eq!(got(&caches[0], &[50, 51, 20]), [50, 51, 20]);
    // Both have their part: neither asks.
    assert_eq!(put(&caches[1], &(60..70).collect::<Vec<u8>>()).stored, 8);
    assert_eq!(got(&caches[0], &[20]), [20]);
    // From then on each keeps its part.
    for name in 100..200 {
        put(&caches[usize::from(name % 2)], &[name]);
        let stat = caches[0].stat().unwrap();
        assert!(stat.claimed <= stat.budget, "{stat:?}");
    }
    for cache in &caches {
        assert_eq!(got(cache, &(184..200).collect::<Vec<u8>>()).len(), 16);
    }
}

#[test]
fn blocks_of_a_size_that_has_no_slab_take_the_place_of_others() {
    let heap = heap();
    let pool = pool(&heap, 0, 0);
    let ours = cache(&pool);
    put(&ours, &(0..16).collect::<Vec<u8>>());
    let small = cache_of(&pool, identity(3, 100), Options::default()).unwrap();
    assert_eq!(small.put(&[key(1)], &[&[7; 100]]).map(|put| put.stored), Ok(1));
    // A slab of ours has gone, and the other goes on.
    assert_eq!(got(&ours, &(0..16).collect::<Vec<u8>>()), (8..16).collect::<Vec<u8>>());
    assert_eq!(put(&ours, &[20, 21]).stored, 2);
    assert_eq!(got(&ours, &[20, 21, 8, 10]), [20, 21, 10]);
    let mut block = [0; 100];
    assert_eq!(small.get(&[key(1)], &mut [&mut block]), Ok(vec![true]));
    assert_eq!(block, [7; 100]);
}

#[test]
fn two_identities_share_a_cache_and_never_meet() {
    let heap = heap();
    let pool = pool(&heap, 0, 0);
    let ours = cache(&pool);
    let theirs = cache_of(&pool, identity(2, BLOCK), Options::default()).unwrap();
    put(&ours, &[1]);
    assert_eq!(theirs.lookup(&[key(1)]), Ok(vec![false]));
    assert_eq!(got(&theirs, &[1]), [0; 0]);
    put(&theirs, &[1, 2]);
    assert_eq!(ours.lookup(&[key(1), key(2)]), Ok(vec![true, false]));
    // Blocks of another size have slabs of their own.
    let small = cache_of(&pool, identity(3, 100), Options::default()).unwrap();
    assert_eq!(small.put(&[key(1)], &[&[7; 100]]).map(|put| put.stored), Ok(1));
    let mut block = [0; 100];
    assert_eq!(small.get(&[key(1)], &mut [&mut block]), Ok(vec![true]));
    assert_eq!(block, [7; 100]);
    assert_eq!(got(&ours, &[1]), [1]);
}

#[test]
fn what_is_no_block_is_refused_by_name() {
    let heap = heap();
    let pool = pool(&heap, 0, 0);
    let ours = cache(&pool);
    let refused = |result: Result<Put, PoolError>| result.unwrap_err().to_string();
    assert_eq!(
        refused(ours.put(&[key(1)], &[&[0; 100]])),
        "a block is 100 bytes where this identity's have 4096; give whole blocks; another size is another identity"
    );
    assert_eq!(refused(ours.put(&[key(1)], &[])), "the number of blocks is 0 for 1 keys; one for each key");
    let open = |name: &str, identity, options| {
        Cache::open(Arc::clone(&pool), name, identity, options).map(drop).unwrap_err().to_string()
    };
    for name in ["", "a/b"] {
        let text = open(name, identity(1, BLOCK), Options::default());
        assert!(text.contains("is empty or has a / in it"), "{text}");
    }
    let text = open("llm", identity(1, 0), Options::default());
    assert_eq!(text, "the size of a block is 0 bytes; a size of at least 1 byte");
    let text = open("llm", identity(1, BLOCK), Options { budget: Some(5), verify: false });
    assert!(text.contains("the budget is 5 bytes where the cache llm has"), "{text}");
    let text = open("large", identity(1, BLOCK), Options { budget: Some(1 << 63), verify: false });
    assert!(text.contains("the budget is 9223372036854775808 bytes in a pool of"), "{text}");
    assert!(pool.list("/kv/large").unwrap().is_empty());
    // The least has room for a slab of one block.
    for budget in [1, 4096 + 127] {
        let text = open("large", identity(1, BLOCK), Options { budget: Some(budget), verify: false });
        let says = format!("the budget is {budget} bytes where one block of the cache large takes 4224; ");
        assert!(text.starts_with(&says), "{text}");
        assert!(pool.list("/kv/large").unwrap().is_empty());
    }
    let text = open("llm", identity(1, 1 << 20), Options::default());
    assert!(text.contains("bytes where one block of the cache llm takes 1048704; "), "{text}");
    let least = Options { budget: Some(4096 + 128), verify: false };
    let least = Cache::open(Arc::clone(&pool), "least", identity(1, BLOCK), least).unwrap();
    assert_eq!(put(&least, &[1]).stored, 1);
    // A budget of zero holds nothing, and is no error.
    let none = cache_of(&pool, identity(1, BLOCK), Options { budget: Some(0), verify: false });
    assert!(none.unwrap_err().to_string().contains("the budget is 0 bytes"));
    drop(ours);
    Cache::remove(&pool, "llm").unwrap();
    let none = cache_of(&pool, identity(1, BLOCK), Options { budget: Some(0), verify: false }).unwrap();
    assert_eq!(put(&none, &[1]), Put { stored: 0, present: 0, refused: 1 });
    assert_eq!(Cache::remove(&pool, "other"), Err(PoolError::NotFound { name: "/kv/other".into() }));
}

#[test]
fn a_damaged_block_line_or_log_is_a_miss() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let verify = Options { verify: true, budget: None };
    let ours = cache_of(&pools[0], identity(1, BLOCK), verify).unwrap();
    let theirs = cache_of(&pools[1], identity(1, BLOCK), verify).unwrap();
    put(&ours, &[1, 2, 3]);
    assert_eq!(got(&theirs, &[1, 2, 3]), [1, 2, 3]);
    let slab = pools[0].open("/kv/llm/slab/0/0").unwrap();
    let blocks = slab.at().lines(9);
    heap.store(blocks.word(3), 77);
    heap.store(slab.at().lines(2), 78);
    assert_eq!(got(&theirs, &[1, 2, 3]), [3]);
    assert_eq!(theirs.stat().unwrap().void, 1, "the block; its line is not even looked at twice");
    let part = pools[0].open("/kv/llm/host/0").unwrap();
    (0..13).for_each(|line| heap.store(part.at().lines(line).word(1), 79));
    assert_eq!(got(&theirs, &[3]), [3]);
    // The host goes on: a line that is damaged is written anew.
    put(&ours, &[4, 5, 6, 7, 8, 9]);
    assert_eq!(got(&theirs, &[4, 9]), [4, 9]);
    // A damaged control line too.
    let root = pools[0].open("/kv/llm").unwrap();
    heap.store(root.at().lines(1).word(2), u64::MAX);
    put(&ours, &[10]);
    assert_eq!(got(&theirs, &[3, 10]), [3, 10]);
    for object in [slab, part, root] {
        pools[0].close(object);
    }
}

#[test]
fn a_cache_that_was_removed_takes_nothing_more() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    put(&caches[0], &[1]);
    assert_eq!(got(&caches[1], &[1]), [1]);
    Cache::remove(&pools[1], "llm").unwrap();
    let refused = caches[0].put(&[key(2)], &[&[2; BLOCK as usize]]).unwrap_err();
    assert!(matches!(refused, PoolError::NotFound { .. }), "{refused}");
    drop(caches);
    pools.iter().chain(&pools).for_each(|pool| pool.maintain().unwrap());
    assert_eq!(pools[0].list(""), Ok(vec![]));
    let anew = cache(&pools[1]);
    assert_eq!(got(&anew, &[1]), [0; 0]);
    put(&anew, &[1]);
    assert_eq!(got(&anew, &[1]), [1]);
}

#[test]
fn what_is_left_of_a_cache_whose_removal_was_cut_short_is_removed_and_is_none_of_the_next() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    for pool in &pools {
        put(&cache(pool), &[1, 2]);
    }
    pools[0].destroy("/kv/llm").unwrap();
    // Its log is longer: the default budget follows what is free.
    let again = |pool| cache_with(pool, identity(1, BLOCK), Options::default(), 8).unwrap();
    let first = again(&pools[1]);
    assert_eq!(got(&first, &[1, 2]), [0; 0]);
    assert_eq!(put(&first, &[3]).stored, 1);
    let second = again(&pools[0]);
    assert_eq!(put(&second, &[1, 4]).stored, 2);
    for cache in [&first, &second] {
        assert_eq!(got(cache, &[1, 2, 3, 4]), [1, 3, 4]);
    }
    drop((first, second));
    pools[0].destroy("/kv/llm").unwrap();
    Cache::remove(&pools[1], "llm").unwrap();
    assert_eq!(Cache::remove(&pools[1], "llm"), Err(PoolError::NotFound { name: "/kv/llm".into() }));
    pools.iter().chain(&pools).for_each(|pool| pool.maintain().unwrap());
    assert_eq!(pools[0].list(""), Ok(vec![]));
}

#[test]
fn a_cache_that_was_removed_takes_no_slab_of_the_next_of_its_name() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let gone = cache(&pools[0]);
    put(&gone, &[1]);
    Cache::remove(&pools[1], "llm").unwrap();
    let anew = cache(&pools[0]);
    put(&anew, &[5]);
    let blocks = [&[2; BLOCK as usize][..]];
    for refused in [gone.put(&[key(2)], &blocks).map(drop), gone.retire()] {
        assert!(matches!(refused, Err(PoolError::NotFound { .. })), "{refused:?}");
    }
    // One that has seen no slab yet, and one whose process died in the middle.
    *locked(&gone.own_slabs) = OwnSlabs::default();
    assert!(gone.put(&[key(2)], &blocks).is_err());
    assert!(gone.put(&[key(2)], &blocks).is_err());
    assert_eq!(put(&anew, &(10..25).collect::<Vec<_>>()).stored, 15);
    assert_eq!(got(&anew, &[2, 5, 10, 24]), [5, 10, 24]);
    assert_eq!(inspect(&heap).unwrap()[0].identities[0].text, "identity 1");
}

#[test]
fn a_block_that_is_pinned_stays_where_it_is_until_nobody_pins_it() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    put(&caches[0], &(0..16).collect::<Vec<u8>>());
    let pin = caches[1].pin(&[key(3), key(99), key(12)]).unwrap();
    let bytes = |pin: &Pin<Heap>, index| {
        let mut bytes = vec![0; BLOCK as usize];
        heap.copy_out(pin.block(index)?, &mut bytes).unwrap();
        Some(bytes)
    };
    assert_eq!((bytes(&pin, 1), pin.block(7)), (None, None));
    // More than the cache has at once, many times: all others make room.
    for round in 0..5 {
        let names: Vec<u8> = (100 + 30 * round..130 + 30 * round).collect();
        assert_eq!(put(&caches[0], &names), Put { stored: 14, present: 0, refused: 16 }, "round {round}");
        assert_eq!(bytes(&pin, 0), Some(vec![3; BLOCK as usize]));
        assert_eq!(bytes(&pin, 2), Some(vec![12; BLOCK as usize]));
    }
    assert_eq!(got(&caches[1], &[3, 12]), [3, 12]);
    let given = Cache::give_up_part(&pools[0], "llm").unwrap();
    assert_eq!((given.bytes, given.kept), (0, 2), "each slab has one");
    drop(pin);
    assert_eq!(put(&caches[0], &(50..66).collect::<Vec<u8>>()).stored, 16);
    assert_eq!(got(&caches[1], &[3, 12]), [0; 0]);
    // It was announced as an open object is.
    let many: Vec<Key> = (50..66).map(key).collect();
    assert_eq!(caches[1].pin(&many).unwrap_err(), PoolError::TooManyOpen { limit: 20 });
    drop(caches[1].pin(&many[..10]).unwrap());
    drop(caches[1].pin(&many[..10]).unwrap());
}

#[test]
fn a_pin_holds_no_slot_of_another_cache_nor_of_the_next_of_its_name() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let [ours, theirs] = [cache(&pools[0]), cache(&pools[1])];
    let other = |pool: &Arc<Pool<Heap>>| {
        let root = Root { slab_bytes: 512 + 64 + 8 * (64 + 4096), log_lines: 4, budget: 1 << 16, hosts: 2 };
        Cache::open_with(Arc::clone(pool), "other", identity(1, BLOCK), Options::default(), root).unwrap()
    };
    let (our_other, their_other) = (other(&pools[0]), other(&pools[1]));
    put(&ours, &(0..16).collect::<Vec<u8>>());
    put(&our_other, &(0..8).collect::<Vec<u8>>());
    // The same slots of the same host.
    let pins = [theirs.pin(&[key(0)]).unwrap(), their_other.pin(&[key(1)]).unwrap()];
    let pinned =
        || inspect(&heap).unwrap().into_iter().map(|cache| cache.hosts[0].pinned).collect::<Vec<_>>();
    assert_eq!(pinned(), [Some(1), Some(1)]);
    assert_eq!(put(&ours, &(20..36).collect::<Vec<u8>>()).stored, 15);
    assert_eq!(put(&our_other, &(20..28).collect::<Vec<u8>>()).stored, 7);
    assert_eq!((got(&theirs, &[0, 1]), got(&their_other, &[0, 1])), (vec![0], vec![1]));
    Cache::remove(&pools[0], "llm").unwrap();
    drop([ours, theirs]);
    let [ours, theirs] = [cache(&pools[0]), cache(&pools[1])];
    assert_eq!(put(&ours, &(0..16).collect::<Vec<u8>>()).stored, 16);
    // The other host has pinned some block of it, and holds none.
    drop(theirs.pin(&[key(99)]).unwrap());
    assert_eq!(put(&ours, &(20..36).collect::<Vec<u8>>()).stored, 16);
    assert_eq!(pinned(), [Some(0), Some(1)]);
    drop(pins);
    assert_eq!(pinned(), [Some(0), Some(0)]);
}

#[test]
fn what_a_dead_process_has_pinned_is_free_once_its_host_has_cleaned_up() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    put(&caches[0], &(0..16).collect::<Vec<u8>>());
    let dies = pool(&heap, 1, 1);
    let theirs = cache(&dies);
    let pin = theirs.pin(&[key(3)]).unwrap();
    let words = (0..20).map(|index| dies.layout().announcement(1, ProcessSlot(1), index));
    let announced: Vec<_> = words.map(|at| (at, heap.load(at).unwrap())).collect();
    drop((pin, theirs));
    Arc::into_inner(dies).expect("nobody else has it").die();
    // As when it was killed.
    announced.into_iter().for_each(|(at, word)| heap.store(at, word));
    let more = |first: u8| put(&caches[0], &(first..first + 16).collect::<Vec<u8>>()).stored;
    assert_eq!(more(100), 15);
    pools[1].maintain().unwrap();
    assert_eq!(more(120), 16);
}

#[test]
fn the_blocks_of_a_host_that_is_gone_stay_until_its_room_is_given_back() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    put(&caches[1], &(0..16).collect::<Vec<u8>>());
    let [ours, theirs] = <[_; 2]>::try_from(caches).unwrap();
    drop(theirs);
    let [stays, goes] = pools;
    Arc::into_inner(goes).expect("nobody else has it").die();
    for change in [MembershipChange::Evict, MembershipChange::Fence] {
        let Member { timeout, silence, .. } = Member::new(1, 7);
        change_membership(&heap, 1, change, timeout, silence).unwrap();
    }
    assert_eq!(got(&ours, &[0, 7, 15]), [0, 7, 15]);
    assert_eq!(put(&ours, &[50]), Put { stored: 0, present: 0, refused: 1 }, "the budget is its");
    // Another machine stands in for it.
    let member = Member { timeout: Duration::from_secs(5), ..Member::new(1, 8) };
    let stands_in = Arc::new(Pool::attach(heap.process(1, ProcessSlot(2)), member).unwrap());
    let given = Cache::give_up_part(&stands_in, "llm").unwrap();
    assert_eq!((given.bytes, given.kept), (2 * (9 * 64 + 8 * 4096), 0));
    assert_eq!(Cache::give_up_part(&stands_in, "llm"), Ok(GivenUp::default()), "it has none");
    let missing = Cache::give_up_part(&stands_in, "other").unwrap_err();
    assert_eq!(missing, PoolError::NotFound { name: "/kv/other".into() });
    drop(stands_in);
    assert_eq!(put(&ours, &(100..116).collect::<Vec<u8>>()).stored, 16, "all of the budget");
    assert_eq!(got(&ours, &[0, 7, 15]), [0; 0]);
    drop((ours, stays));
}

#[test]
fn a_host_that_is_fenced_has_its_room_given_to_others_while_they_want_some() {
    let heap = heap();
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let caches: Vec<_> = pools.iter().map(cache).collect();
    put(&caches[0], &[1]);
    put(&caches[1], &[2]);
    let [ours, theirs] = <[_; 2]>::try_from(caches).unwrap();
    let more: Vec<u8> = (100..109).collect();
    put(&ours, &more);
    assert!(inspect(&heap).unwrap()[0].hosts[0].wants_room);
    assert_eq!(wanted_parts(&heap), Ok(vec![]), "nobody is gone");
    let Member { timeout, silence, .. } = Member::new(1, 7);
    change_membership(&heap, 1, MembershipChange::Evict, timeout, silence).unwrap();
    assert_eq!(wanted_parts(&heap), Ok(vec![]), "it may still write");
    change_membership(&heap, 1, MembershipChange::Fence, timeout, silence).unwrap();
    drop(theirs);
    let parts = wanted_parts(&heap).unwrap();
    assert_eq!((parts.len(), parts[0].host, &*parts[0].cache), (1, 1, "llm"));
    let stat = inspect(&heap).unwrap();
    assert_eq!([0, 1].map(|host| stat[0].hosts[host].gone), [false, true]);
    let member = Member { timeout: Duration::from_secs(5), ..Member::new(1, 8) };
    let stands_in = || Arc::new(Pool::attach(heap.process(1, ProcessSlot(2)), member).unwrap());
    let given = Cache::give_to_living(&stands_in(), &parts[0]).unwrap();
    assert_eq!((given.bytes, given.kept), (9 * 64 + 8 * 4096, 0));
    assert_eq!(wanted_parts(&heap), Ok(vec![]), "there is room, and its part has none");
    put(&ours, &more);
    assert_eq!(put(&ours, &(110..117).collect::<Vec<u8>>()).stored, 7);
    let stat = inspect(&heap).unwrap();
    assert_eq!((stat[0].hosts[0].claimed, stat[0].hosts[1].gone), (2 * (9 * 64 + 8 * 4096), true));
    // Who comes back has its part again.
    let back = stands_in();
    drop(cache(&back));
    assert!(!inspect(&heap).unwrap()[0].hosts[1].gone);
}

/// Evicts and fences host 1, whose process dies.
fn fence(heap: &Heap, goes: Arc<Pool<Heap>>) {
    Arc::into_inner(goes).expect("nobody else has it").die();
    let Member { timeout, silence, .. } = Member::new(1, 7);
    for change in [MembershipChange::Evict, MembershipChange::Fence] {
        change_membership(heap, 1, change, timeout, silence).unwrap();
    }
}

/// A process of another machine that stands in for host 1.
fn stands_in(heap: &Heap) -> Arc<Pool<Heap>> {
    let member = Member { timeout: Duration::from_secs(5), ..Member::new(1, 8) };
    Arc::new(Pool::attach(heap.process(1, ProcessSlot(2)), member).unwrap())
}

#[test]
fn a_host_is_still_gone_once_its_room_was_given_back_but_for_what_is_pinned() {
    let heap = heap();
    let [stays, goes] = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let [ours, theirs] = [cache(&stays), cache(&goes)];
    put(&theirs, &(0..16).collect::<Vec<u8>>());
    drop(theirs);
    fence(&heap, goes);
    let pin = ours.pin(&[key(3)]).unwrap();
    let given = Cache::give_up_part(&stands_in(&heap), "llm").unwrap();
    assert_eq!((given.bytes, given.kept), (9 * 64 + 8 * 4096, 1));
    assert_eq!(put(&ours, &(100..116).collect::<Vec<u8>>()).stored, 8);
    let stat = inspect(&heap).unwrap();
    assert_eq!([0, 1].map(|host| stat[0].hosts[host].gone), [false, true]);
    assert_eq!(check(&heap).unwrap()[0].want_room, [0]);
    drop(pin);
    let parts = wanted_parts(&heap).unwrap();
    assert_eq!((parts.len(), parts[0].host), (1, 1));
    let given = Cache::give_to_living(&stands_in(&heap), &parts[0]).unwrap();
    assert_eq!((given.bytes, given.kept), (9 * 64 + 8 * 4096, 0));
    assert_eq!(put(&ours, &(120..128).collect::<Vec<u8>>()).stored, 8);
    assert_eq!(check(&heap).unwrap()[0].want_room, [0; 0]);
    // A host that lives is not gone by a flush.
    assert_eq!(Cache::give_up_part(&stays, "llm").unwrap().kept, 0);
    assert!(!inspect(&heap).unwrap()[0].hosts[0].gone);
}

#[test]
fn the_room_of_a_host_that_is_gone_is_given_where_what_is_free_is_in_pieces() {
    let heap = heap();
    let [stays, goes] = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    // Slabs have 64 slots at least, of more than 4 chunks. The budget has room for many.
    let slab_bytes = 64 * 4160 + 64;
    let open = |pool: &Arc<Pool<Heap>>, block: u32| {
        let root = Root { slab_bytes, log_lines: 4, budget: 3 << 20, hosts: 2 };
        Cache::open_with(Arc::clone(pool), "llm", identity(1, block), Options::default(), root).unwrap()
    };
    let (ours, theirs) = (open(&stays, BLOCK), open(&goes, BLOCK));
    assert_eq!(put(&theirs, &(0..100).collect::<Vec<u8>>()).stored, 100, "two slabs");
    drop(theirs);
    // The rest of the pool is full; then every third pair of chunks comes back.
    let (mut number, mut chunks) = (0, 4);
    while chunks > 0 {
        match stays.create(&format!("/{number}"), (chunks << 16) - 512) {
            Ok(object) => {
                stays.close(object);
                (number, chunks) = (number + 1, if chunks > 1 { 6 - chunks } else { 1 });
            }
            Err(error) => {
                assert!(matches!(error, PoolError::Full { .. }), "{error}");
                chunks = if chunks > 1 { 1 } else { 0 };
            }
        }
    }
    for number in (1..number - 2).step_by(2) {
        stays.destroy(&format!("/{number}")).unwrap();
    }
    stays.maintain().unwrap();
    assert_eq!(put(&ours, &[200]), Put { stored: 0, present: 0, refused: 1 }, "no run is long enough");
    fence(&heap, goes);
    let found = crate::inspect(&heap).unwrap();
    assert!(found.stat.unclaimed_bytes > slab_bytes && found.longest_unclaimed_bytes < slab_bytes);
    // One slab leaves a run that is too short, because chunks at its ends hold something else too.
    let mut visits = 0;
    while let Some(part) = wanted_parts(&heap).unwrap().first() {
        assert!(visits < 2, "all its room is given, and none is enough");
        assert_eq!(put(&ours, &[200]).stored, 0, "no run is long enough yet");
        Cache::give_to_living(&stands_in(&heap), part).unwrap();
        visits += 1;
    }
    assert_eq!((visits, put(&ours, &[200]).stored), (2, 1));
}

#[test]
fn the_room_that_is_given_is_that_of_the_slab_that_was_asked_for() {
    let heap = heap();
    let [stays, goes] = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    // Beside four slabs of the small blocks there is room for a fifth, and not for a slab of the large one.
    let budget = 4 * (9 * 64 + 8 * 4096) + 40_000;
    let root = Root { slab_bytes: 512 + 64 + 8 * (64 + 4096), log_lines: 4, budget, hosts: 2 };
    let open = |pool: &Arc<Pool<Heap>>, block: u32| {
        Cache::open_with(Arc::clone(pool), "llm", identity(1, block), Options::default(), root).unwrap()
    };
    let (ours, theirs) = (open(&stays, 14 * 4096), open(&goes, BLOCK));
    put(&theirs, &(0..32).collect::<Vec<u8>>());
    drop(theirs);
    fence(&heap, goes);
    let block = vec![7; 14 * 4096];
    let store = || ours.put(&[key(99)], &[&block]).unwrap().stored;
    assert_eq!(store(), 0);
    let mut visits = 0;
    while let Some(part) = wanted_parts(&heap).unwrap().first() {
        assert!(visits < 4, "all its room is given, and none is enough");
        Cache::give_to_living(&stands_in(&heap), part).unwrap();
        visits += 1;
    }
    assert_eq!((visits, store()), (1, 1));
}

#[test]
fn a_host_is_still_gone_once_its_id_was_given_to_a_keeper_that_died_before_its_visit() {
    let heap = heap();
    let task = KeeperTask { incarnation: 1, id_source: Some(IdSource::Keeper), evict_after: None };
    let mut keeper = Keeper::start(heap.clone(), task).unwrap();
    (0..2).for_each(|host| keeper.admit(host, 5, 7).unwrap());
    let pools = [pool(&heap, 0, 0), pool(&heap, 1, 0)];
    let [ours, theirs] = [cache(&pools[0]), cache(&pools[1])];
    put(&theirs, &[2]);
    put(&ours, &(100..109).collect::<Vec<u8>>());
    keeper.evict(1).and_then(|()| keeper.fence(1)).unwrap();
    drop(theirs);
    let parts = wanted_parts(&heap).unwrap();
    keeper.admit(1, 6, 8).unwrap();
    assert_eq!((parts.len(), wanted_parts(&heap)), (1, Ok(parts)));
}

#[test]
fn an_index_takes_at_most_40_bytes_a_block() {
    let heap = heap();
    let pool = pool(&heap, 0, 0);
    let budget = 900 * (64 + 64);
    let root = Root { slab_bytes: 100 * 128 + 576, log_lines: 8, budget, hosts: 2 };
    let small =
        Cache::open_with(Arc::clone(&pool), "small", identity(1, 64), Options::default(), root).unwrap();
    let keys: Vec<Key> =
        (0..800_u64).map(|name| std::array::from_fn(|at| (name >> (8 * (at % 2))) as u8)).collect();
    for keys in keys.chunks(7) {
        small.put(keys, &vec![&[1; 64][..]; keys.len()]).unwrap();
        let stat = small.stat().unwrap();
        // The slab that is being filled has all its slots.
        assert!(stat.index_bytes <= 40 * (stat.blocks + 100) + 200, "{stat:?}");
    }
    let stat = small.stat().unwrap();
    assert!(stat.index_bytes <= 40 * stat.blocks, "{stat:?}");
}

#[test]
fn a_check_names_a_damaged_block_and_a_damaged_line_by_slab_and_slot() {
    let heap = heap();
    let pool = pool(&heap, 0, 0);
    let cache = cache_of(&pool, identity(1, BLOCK), Options { verify: true, ..Options::default() }).unwrap();
    put(&cache, &[1, 2, 3]);
    let whole = check(&heap).unwrap();
    assert_eq!((whole.len(), whole[0].blocks, whole[0].read, whole[0].damaged.len()), (1, 3, 3, 0));
    let slab = cache.slab(0, 0).unwrap().unwrap();
    heap.store(slab.block(1) + 4088, 7);
    heap.store(slab.entry(2), 7);
    let checked = check(&heap).unwrap();
    let found = &checked[0];
    assert_eq!((found.blocks, found.read), (2, 2));
    let damaged: Vec<_> = found.damaged.iter().map(|it| (it.host, it.slab, it.slot, it.offset)).collect();
    assert_eq!(damaged, [(0, 0, 1, slab.block(1).0), (0, 0, 2, slab.entry(2).0)]);
    assert!(found.damaged[0].what.contains("checksum") && found.damaged[1].what.contains("torn"));
    // Blocks without a checksum are counted, and not read.
    let plain = cache_of(&pool, identity(2, BLOCK), Options::default()).unwrap();
    put(&plain, &[4]);
    assert_eq!(check(&heap).unwrap()[0].read, 2);
}
