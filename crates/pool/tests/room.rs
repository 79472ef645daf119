//! How many objects and groups a pool holds, and what it costs to be told that there is no room.

use std::sync::Arc;

use polder_kernels::{Dtype, Op};
use polder_mem::testing::Scratch;
use polder_mem::{Mapped, ProcessSlot, Region, Wrapped};
use polder_pool::group::{Group, GroupOptions};
use polder_pool::testing::{formatted, plan_of};
use polder_pool::{Geometry, InitialContents, Member, Overwrite, Pool, PoolError, Uuid, format};

const BYTES: u64 = 1 << 30;
const OBJECT: u64 = 1 << 20;

/// The only process of a pool, which counts its operations on memory.
fn pool(scratch: &Scratch) -> Pool<Wrapped> {
    let path = scratch.path().join("pool");
    let region = Mapped::coherent(Region::create(&path, BYTES).unwrap());
    let geometry = Geometry::for_region(BYTES);
    format(&region, &geometry, Uuid(1), Overwrite::Refuse).unwrap();
    let plan = plan_of(&geometry, BYTES, 0, scratch.path());
    Pool::attach(Wrapped::from(region).attach(&plan).unwrap(), Member::new(0, 1)).unwrap()
}

#[test]
fn objects_of_a_mebibyte_fill_a_pool_of_a_gibibyte_and_the_next_is_refused_with_few_operations() {
    let scratch = Scratch::new();
    let pool = pool(&scratch);
    // Nothing is written there, so that the pool takes no memory of this machine.
    let create = |index: u64| pool.create_filled(&format!("/{index}"), OBJECT, InitialContents::Nothing);
    let (count, full) = (0..)
        .find_map(|index| create(index).map(|object| pool.close(object)).err().map(|error| (index, error)))
        .unwrap();
    let PoolError::Full { free, .. } = full else { panic!("{full}") };
    assert!(count * OBJECT >= BYTES / 100 * 95, "{count} objects of 1 MiB fill a pool of 1 GiB");
    assert!(free <= OBJECT, "{free} bytes are left when no object of {OBJECT} bytes fits");
    let before = pool.memory().operations();
    assert!(matches!(create(count), Err(PoolError::Full { .. })));
    let refused = pool.memory().operations() - before;
    // It looks at the claims of all hosts for each of the 1,024 chunks, once.
    assert!(refused < 20 << 10, "a refused create took {refused} operations on memory");
    println!("{count} objects, {free} bytes left, {refused} operations of a refused create");
}

/// A job of eight ranks has a pool of 8 GiB of its own, or of what memory has room for.
#[test]
fn two_hundred_groups_of_eight_ranks_are_alive_at_once_in_a_pool_of_two_gibibytes() {
    const RANKS: u16 = 8;
    const BYTES: u64 = 2 << 30;
    let geometry = Geometry { processes: 16, ..Geometry::for_region(BYTES) };
    let heap = formatted(&geometry, BYTES);
    let memories: Vec<_> = (0..RANKS)
        .map(|slot| if slot == 0 { heap.clone() } else { heap.process(0, ProcessSlot(slot)) })
        .collect();
    drop(heap);
    std::thread::scope(|scope| {
        for (rank, memory) in memories.into_iter().enumerate() {
            scope.spawn(move || {
                let pool = Arc::new(Pool::attach(memory, Member::new(0, 7)).unwrap());
                let mut groups = vec![];
                for number in 0..200 {
                    let (name, options) = (format!("/group/{number}"), GroupOptions::default());
                    let mut group =
                        Group::join(Arc::clone(&pool), &name, rank, RANKS.into(), options, None).unwrap();
                    let mut data = [1, rank as u8];
                    group.all_reduce(Op::Sum, Dtype::U8, &mut data).unwrap();
                    assert_eq!(data, [8, 28], "group {number}");
                    groups.push(group);
                }
            });
        }
    });
}
