use std::time::Duration;

use polder_mem::Heap;

use super::writer::Plan;
use super::*;
use crate::line;
use crate::owned::{self, Identity, Kind};

fn pool() -> Arc<Pool<Heap>> {
    pool_within(Duration::from_secs(5))
}

fn pool_within(timeout: Duration) -> Arc<Pool<Heap>> {
    Arc::new(owned::tests::pool_within(timeout))
}

fn read(version: &Version<Heap>, name: &str, bytes: usize) -> Vec<u8> {
    let mut into = vec![0; bytes];
    version.read(name, &mut into).unwrap();
    into
}

/// The writer of an object is a process that is gone.
fn die(pool: &Pool<Heap>, left: Object) {
    let process = pool.this_process();
    let before = crate::Process { incarnation: process.incarnation + 1, ..process };
    let words = Identity { kind: Kind::Version, process: before, own: [0; 3] }.encode();
    line::publish(pool.memory(), left.at(), &words);
    pool.close(left);
}

#[test]
fn two_versions_are_kept_and_a_third_takes_the_place_of_the_first() {
    let store = Store::new(pool(), "model/rank0").unwrap();
    let none = PoolError::NoVersion { name: "model/rank0".into(), version: None, kept: vec![] };
    assert_eq!(store.newest().unwrap_err(), none);
    for step in 1..=3_u8 {
        let published = store.publish(&[("w", &[step; 100]), ("", &[])]).unwrap();
        assert_eq!(published, Published { version: step.into(), copied: 100, shared: 0 });
    }
    assert_eq!(store.versions(), Ok(vec![2, 3]));
    assert_eq!(read(&store.newest().unwrap(), "w", 100), [3; 100]);
    assert_eq!(read(&store.open(2).unwrap(), "w", 100), [2; 100]);
    let lost = store.open(1).unwrap_err().to_string();
    assert_eq!(
        lost,
        "the store model/rank0 keeps no version 1 in this pool; it keeps 2 and 3; check the name and the pool, or take a version that is kept"
    );
    store.remove().unwrap();
    assert!(store.pool().list("").unwrap().is_empty());
}

#[test]
fn what_has_not_changed_is_not_copied_and_what_is_out_of_use_goes() {
    let store = Store::new(pool(), "lora").unwrap();
    let frozen = [7; 4000];
    for step in 1..=4_u8 {
        let published = store.publish(&[("frozen", &frozen), ("adapter", &[step; 64])]).unwrap();
        let shared = if step == 1 { 0 } else { 4000 };
        assert_eq!((published.copied, published.shared), (4064 - shared, shared), "step {step}");
    }
    let names: Vec<_> = store.listed().unwrap().into_iter().map(|(number, _)| number).collect();
    assert_eq!(names, [4, 3, 1], "the first still holds what is frozen");
    assert_eq!(store.versions(), Ok(vec![1, 3, 4]));
    let version = store.newest().unwrap();
    assert_eq!((read(&version, "frozen", 4000), read(&version, "adapter", 64)), (vec![7; 4000], vec![4; 64]));
    drop(version);
    // Most of the first object is out of use now, so that the rest is copied.
    let published = store.publish(&[("adapter", &[9; 64])]).unwrap();
    assert_eq!(published.copied, 64);
    store.publish(&[("adapter", &[9; 64])]).unwrap();
    assert!(!store.listed().unwrap().iter().any(|(number, _)| *number == 1));
}

#[test]
fn a_version_stays_for_its_reader_when_it_is_removed() {
    let store = Store::new(pool(), "s").unwrap();
    store.publish(&[("w", &[1; 1000])]).unwrap();
    let first = store.newest().unwrap();
    for step in 2..6 {
        store.publish(&[("w", &[step; 1000])]).unwrap();
    }
    assert_eq!(read(&first, "w", 1000), [1; 1000]);
    let missing = first.read("x", &mut [0; 1000]).unwrap_err().to_string();
    assert!(
        missing.starts_with("the tensor is \"x\" of 1000 bytes; a name that the version has"),
        "{missing}"
    );
}

#[test]
fn of_a_small_tensor_that_changes_meanwhile_the_copy_counts_and_of_a_large_one_it_is_corrupt() {
    let store = Store::new(Arc::new(owned::tests::pool_of(4 << 20, Duration::from_secs(5))), "s").unwrap();
    let (small, large) =
        ([vec![1; 1 << 20], vec![2; 1 << 20]], [vec![3; (1 << 20) + 1], vec![4; (1 << 20) + 1]]);
    let mut plan =
        Plan::new(1, &[("large", &large[0]), ("small", &small[0])], None::<&Version<Heap>>).unwrap();
    plan.change(&[&large[1], &small[1]]);
    let object =
        owned::create_unfilled(store.pool(), &store.object_name(1), plan.bytes, Kind::Version, [0; 3])
            .unwrap();
    store.write(&object, &mut plan).unwrap();
    let version = store.open(1).unwrap();
    assert!(read(&version, "small", 1 << 20) == small[1]);
    let changed = version.read("large", &mut vec![0; (1 << 20) + 1]);
    assert!(matches!(changed, Err(PoolError::Corrupt { what: "tensor of a version", .. })), "{changed:?}");
    store.pool().close(object);
}

#[test]
fn another_writer_is_named_while_it_lives_and_followed_when_it_is_dead() {
    let pool = pool();
    let store = Store::new(Arc::clone(&pool), "s").unwrap();
    store.publish(&[("w", &[1; 100])]).unwrap();
    let left = owned::create_unfilled(&pool, "/version/s/2", 1000, Kind::Version, [0; 3]).unwrap();
    let taken = PoolError::VersionTaken { name: "s".into(), version: 2, peer: pool.this_process().peer() };
    assert_eq!(store.publish(&[("w", &[2; 100])]), Err(taken));
    die(&pool, left);
    assert_eq!(store.newest().unwrap().number(), 1, "it was never published");
    assert_eq!(store.publish(&[("w", &[2; 100])]).unwrap().version, 3);
    assert_eq!(store.versions(), Ok(vec![1, 3]));
    assert_eq!(pool.list("/version/s/2"), Ok(vec![]));
}

#[test]
fn an_attempt_takes_the_number_of_what_a_dead_writer_left_unpublished() {
    let pool = pool();
    let [store, other] = ["s/0", "s/1"].map(|name| Store::new(Arc::clone(&pool), name).unwrap());
    let others = std::slice::from_ref(&other);
    let attempt = Attempt { word: 1, first: 1, base: 0, floor: 0, seen: 0, others, left: &[] };
    store.publish_in(&attempt, 1, &[("w", &[1; 100])]).unwrap();
    let left = owned::create_unfilled(&pool, "/version/s/0/2", 1000, Kind::Version, [0; 3]).unwrap();
    let taken = PoolError::VersionTaken { name: "s/0".into(), version: 2, peer: pool.this_process().peer() };
    assert_eq!(store.publish_in(&attempt, 2, &[("w", &[2; 100])]), Err(taken));
    die(&pool, left);
    // The next attempt finds version 1 on each rank, and goes on from there.
    let next = Attempt { word: 2, first: 2, base: 1, seen: 1, ..attempt };
    assert_eq!(store.publish_in(&next, 2, &[("w", &[2; 100])]).unwrap().version, 2);
    assert_eq!(read(&store.newest().unwrap(), "w", 100), [2; 100]);
    let again = store.publish_in(&next, 2, &[("w", &[3; 100])]);
    assert!(matches!(again, Err(PoolError::Exists { .. })), "{again:?}");
}

#[test]
fn damage_is_named_and_the_next_version_is_whole() {
    // A reader that was told of a version looks for it until its time is up.
    let pool = pool_within(Duration::from_millis(1));
    let store = Store::new(Arc::clone(&pool), "s").unwrap();
    let tensors: &[(&str, &[u8])] = &[("a", &[3; 200]), ("b", &[5; 64])];
    store.publish(tensors).unwrap();
    let bytes = store.listed().unwrap()[0].1.bytes;
    let at = store.listed().unwrap()[0].1.at;
    let mut damaged = 0;
    for offset in (0..bytes).step_by(8) {
        let word = pool.memory().load(at + offset).unwrap();
        pool.memory().store(at + offset, word ^ 1 << (offset / 8 % 64));
        let read = store.newest().and_then(|version| {
            version.read("a", &mut [0; 200])?;
            version.read("b", &mut [0; 64])
        });
        match read {
            Ok(()) => {}
            Err(PoolError::Corrupt { .. } | PoolError::NoVersion { .. }) => damaged += 1,
            Err(error) => panic!("byte {offset}: {error}"),
        }
        pool.memory().store(at + offset, word);
    }
    assert!(damaged > 40, "{damaged} of {} words were missed", bytes / 8);
    pool.memory().store(at.lines(2), 0);
    let corrupt = PoolError::Corrupt { offset: at.lines(2), what: MANIFEST };
    assert_eq!(store.newest().unwrap_err(), corrupt);
    assert_eq!(store.publish(tensors).unwrap().version, 2);
    assert_eq!(read(&store.newest().unwrap(), "a", 200), [3; 200]);
}

#[test]
fn a_manifest_that_no_writer_writes_is_none() {
    let pool = pool();
    let store = Store::new(Arc::clone(&pool), "s").unwrap();
    store.publish(&[("a", &[3; 200])]).unwrap();
    let version = store.newest().unwrap();
    let whole = version.manifest.encode();
    assert_eq!(Manifest::decode(&whole), Some(version.manifest.clone()));
    for end in 0..whole.len() {
        assert_eq!(Manifest::decode(&whole[..end]), None, "{end} bytes of it");
    }
    // With a right checksum, but outside the object.
    let mut far = version.manifest.clone();
    far.tensors.values_mut().for_each(|tensor| tensor.offset = u64::MAX - 8);
    let object = pool.open("/version/s/1").unwrap();
    let bytes = far.encode();
    pool.memory().copy_in(object.at().lines(MANIFEST_LINE), &bytes).unwrap();
    Head::of(&bytes, 0).publish(pool.memory(), &object, 1);
    let corrupt = PoolError::Corrupt { offset: object.at().lines(MANIFEST_LINE), what: MANIFEST };
    assert_eq!(store.newest().unwrap_err(), corrupt);
    pool.close(object);
}

#[test]
fn names_are_checked_before_anything_is_written() {
    let pool = pool();
    for name in ["", "/s", "a\nb", "a//b", &"n".repeat(255)] {
        match Store::new(Arc::clone(&pool), name) {
            Err(PoolError::Name { name: told, .. }) => assert_eq!(told, name),
            other => panic!("{name:?}: {other:?}"),
        }
    }
    let store = Store::new(pool, "s").unwrap();
    let twice = store.publish(&[("w", &[1]), ("w", &[2])]).unwrap_err().to_string();
    assert_eq!(twice, "the name of a tensor is \"w\" twice; a different name for each");
    assert!(store.listed().unwrap().is_empty());
}

#[test]
fn a_version_that_does_not_count_is_passed_over() {
    let store = Store::new(pool(), "s").unwrap();
    for step in 1..=2 {
        store.publish(&[("w", &[step; 1000])]).unwrap();
    }
    // Another store has no second version, so that the first one still counts.
    assert_eq!(store.publish_over(&[("w", &[3; 1000])], Some(1)).unwrap().version, 3);
    assert_eq!(store.versions(), Ok(vec![1, 3]));
    let lost = store.publish_over(&[("w", &[4; 1000])], Some(2)).map(|published| published.version);
    let kept = PoolError::NoVersion { name: "s".into(), version: Some(2), kept: vec![1, 3] };
    assert_eq!(lost, Err(kept));
}
