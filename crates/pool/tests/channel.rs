//! Channels between threads that are processes of two hosts.

use std::sync::Arc;
use std::time::Duration;

use polder_mem::{Heap, ProcessSlot};
use polder_pool::channel::{Receiver, Sender};
use polder_pool::ring::RingShape;
use polder_pool::testing::formatted;
use polder_pool::{Geometry, Member, Pool, PoolError};

const BYTES: u64 = 4 << 20;
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(20);

/// A pool of one process on each of two hosts.
fn pools() -> [Arc<Pool<Heap>>; 2] {
    let geometry = Geometry { hosts: 2, processes: 1, ..Geometry::for_region(BYTES) };
    let heap = formatted(&geometry, BYTES);
    let other = heap.process(1, ProcessSlot(0));
    [(heap, 0), (other, 1)]
        .map(|(memory, host)| Arc::new(Pool::attach(memory, Member::new(host, 1)).unwrap()))
}

fn shape() -> RingShape {
    RingShape::new(2, 128).unwrap()
}

fn message(number: u64) -> Vec<u8> {
    (0..number * 37 % 700).map(|index| (index ^ number) as u8).collect()
}

#[test]
fn messages_of_every_size_arrive_in_order_and_both_ends_leave_nothing() {
    let [here, there] = pools();
    let receiver = Arc::clone(&there);
    let thread = std::thread::spawn(move || {
        let mut receiver = Receiver::open(receiver, "/a", LONG).unwrap();
        let mut into = [0; 700];
        for number in 0..200 {
            let envelope = receiver.pop(&mut into, LONG).unwrap();
            assert_eq!((envelope.tag, &into[..envelope.bytes as usize]), (number, &message(number)[..]));
        }
        let over = receiver.pop(&mut into, LONG).unwrap_err();
        assert!(matches!(over, PoolError::Closed { end: "sender", .. }), "{over}");
        assert!(over.to_string().ends_with(
            "has closed the sender of the ring /a; everything that it sent was received, and nothing more will come"
        ));
    });
    let mut sender = Sender::create(Arc::clone(&here), "/a", shape()).unwrap();
    for number in 0..200 {
        sender.push(number, &message(number), LONG).unwrap();
    }
    drop(sender);
    thread.join().unwrap();
    assert_eq!(there.list("").unwrap(), []);
}

#[test]
fn an_end_that_is_missing_is_an_error_with_its_name() {
    let [here, there] = pools();
    let missing = Receiver::open(Arc::clone(&there), "/a", SHORT).err().unwrap();
    assert!(matches!(missing, PoolError::NotFound { .. }), "{missing}");
    let mut sender = Sender::create(here, "/a", shape()).unwrap();
    let said = sender.push(0, b"", SHORT).unwrap_err().to_string();
    assert!(said.contains("no process has opened the ring /a"), "{said}");
}

#[test]
fn one_process_receives_and_no_other_after_it() {
    let [here, there] = pools();
    let mut sender = Sender::create(Arc::clone(&here), "/a", shape()).unwrap();
    let first = Receiver::open(Arc::clone(&there), "/a", LONG).unwrap();
    sender.push(0, b"one", LONG).unwrap();
    drop(first);
    let second = Receiver::open(Arc::clone(&there), "/a", LONG).err().unwrap();
    assert!(matches!(second, PoolError::Exists { .. }), "{second}");
    let left = (0..3).find_map(|_| sender.push(0, b"more", LONG).err()).unwrap();
    assert!(matches!(left, PoolError::Closed { end: "receiver", .. }), "{left}");
    drop(sender);
    let _sender = Sender::create(here, "/a", shape()).unwrap();
    drop(Receiver::open(there, "/a", LONG).unwrap());
}

#[test]
fn a_short_slice_leaves_the_message_and_a_look_says_how_long_it_is() {
    let [here, there] = pools();
    let mut sender = Sender::create(here, "/a", shape()).unwrap();
    let mut receiver = Receiver::open(there, "/a", LONG).unwrap();
    sender.push(7, &[5; 100], LONG).unwrap();
    let short = receiver.pop(&mut [0; 99], LONG).unwrap_err().to_string();
    assert!(
        short.starts_with(
            "the room to receive into is 99 bytes for a message of 100 bytes; the message stays"
        ),
        "{short}"
    );
    assert_eq!(receiver.peek().unwrap().unwrap().bytes, 100);
    let mut into = [0; 100];
    receiver.pop(&mut into, LONG).unwrap();
    assert_eq!(into, [5; 100]);
}

#[test]
fn a_sender_that_closes_in_the_middle_of_a_message_has_not_ended_well() {
    let [here, there] = pools();
    let mut sender = Sender::create(here, "/a", shape()).unwrap();
    let mut receiver = Receiver::open(there, "/a", LONG).unwrap();
    sender.push(1, &[3; 10], LONG).unwrap();
    // More than the ring holds.
    let late = sender.push(2, &[5; 600], SHORT).unwrap_err();
    assert!(matches!(late, PoolError::Timeout { .. }), "{late}");
    drop(sender);
    let mut into = [0; 600];
    assert_eq!(receiver.pop(&mut into, LONG).unwrap().bytes, 10);
    let cut = receiver.pop(&mut into, LONG).unwrap_err();
    assert!(matches!(cut, PoolError::GaveUp { .. }), "{cut}");
    let again = receiver.pop(&mut into, LONG).unwrap_err();
    assert!(matches!(&again, PoolError::Broken { cause, .. } if **cause == cut), "{again}");
}
