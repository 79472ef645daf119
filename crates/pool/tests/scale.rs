//! What endpoints of many hosts cost, in operations on memory: nothing in the way of a message grows with its peers.

use std::sync::Arc;

use polder_mem::{Heap, HeapCounts, ProcessSlot};
use polder_pool::endpoint::{Completion, Endpoint, EndpointOptions, Filter, Label};
use polder_pool::testing::formatted;
use polder_pool::{Geometry, Member, Pool};

type End = Endpoint<Heap, Vec<u8>, u64>;

/// Emulated hosts, each with one process that has all endpoints of its host.
struct Rack {
    pools: Vec<Arc<Pool<Heap>>>,
    memories: Vec<Heap>,
}

impl Rack {
    fn new(hosts: u16, ports: u16, bytes: u64) -> Self {
        let geometry = Geometry {
            hosts,
            processes: ports,
            opens: 1 << 12,
            names: 1 << 13,
            ..Geometry::for_region(bytes)
        };
        let heap = formatted(&geometry, bytes);
        let of = |host| if host == 0 { heap.clone() } else { heap.process(host, ProcessSlot(0)) };
        let memories: Vec<_> = (0..hosts).map(of).collect();
        let attach = |(host, memory): (u16, &Heap)| {
            Arc::new(Pool::attach(memory.clone(), Member::new(host, 1)).unwrap())
        };
        Self { pools: (0..).zip(&memories).map(attach).collect(), memories }
    }

    /// Endpoints on the hosts in turn.
    fn ends(&self, count: usize) -> Vec<End> {
        let pools = self.pools.iter().cycle().take(count);
        pools.map(|pool| End::open(Arc::clone(pool), EndpointOptions::default()).unwrap()).collect()
    }

    fn counts(&self, end: usize) -> HeapCounts {
        self.memories[end % self.memories.len()].counts()
    }
}

fn label(tag: u64) -> Label {
    Label { kind: 1, tag, data: None }
}

fn of_all(tag: u64) -> Filter {
    Filter { from: None, kind: 1, tag, ignore: 0 }
}

/// Goes on until a receive is over.
fn received(end: &mut End) -> Vec<u8> {
    for _ in 0..1 << 20 {
        match end.step().unwrap() {
            Some(Completion::Received { buffer, .. }) => return buffer,
            Some(other) => panic!("{other:?}"),
            None => {}
        }
    }
    panic!("nothing comes");
}

/// What one message costs its sender and its receiver, and what a look in vain costs the receiver, that all others have talked to.
#[derive(Debug)]
struct Cost {
    sent: HeapCounts,
    received: HeapCounts,
    idle: HeapCounts,
    /// Operations of so many looks in vain, with the searches for new senders among them.
    idle_looks: u64,
}

const LOOKS: u64 = 20_000;

fn cost(hosts: u16, count: usize, bytes: u64) -> Cost {
    let rack = Rack::new(hosts, (count as u16).div_ceil(hosts).max(2), bytes);
    let mut ends = rack.ends(count);
    // Of another host than the receiver, and one whose host has no other sender to it in the pool of two.
    let (to, sender) = (ends[0].address(), count - 1);
    for (number, end) in (0u64..).zip(&mut ends).skip(1) {
        let peer = end.connect(to);
        end.inject(peer, label(1), &number.to_le_bytes()).unwrap();
    }
    for _ in 1..count {
        ends[0].receive(of_all(1), vec![0; 8], 0);
    }
    let mut numbers: Vec<_> =
        (1..count).map(|_| u64::from_le_bytes(received(&mut ends[0]).try_into().unwrap())).collect();
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(1..count as u64), "every message arrives once");
    // Every search finds nobody new by now, and the next is far away.
    let look = |ends: &mut Vec<End>| {
        let before = rack.counts(0);
        assert!(ends[0].step().unwrap().is_none());
        rack.counts(0).since(before)
    };
    for _ in 0..LOOKS {
        look(&mut ends);
    }
    let all: Vec<_> = (0..LOOKS).map(|_| look(&mut ends)).collect();
    let idle = all.iter().copied().min_by_key(|counts| counts.all()).unwrap();
    let mut costs = vec![];
    for _ in 0..4 {
        ends[0].receive(of_all(2), vec![0; 8], 0);
        let before = rack.counts(sender);
        ends[sender].inject(0, label(2), &[7; 8]).unwrap();
        let sent = rack.counts(sender).since(before);
        let before = rack.counts(0);
        assert_eq!(received(&mut ends[0]), [7; 8]);
        costs.push((sent, rack.counts(0).since(before)));
    }
    let (sent, received) = costs.into_iter().max_by_key(|(_, received)| received.all()).unwrap();
    Cost { sent, received, idle, idle_looks: all.iter().map(|counts| counts.all()).sum() }
}

#[test]
fn a_message_among_1024_endpoints_takes_what_it_takes_among_2_and_a_summary_line_a_host() {
    const HOSTS: u64 = 16;
    let few = cost(2, 2, 64 << 20);
    let many = cost(HOSTS as u16, 1024, 512 << 20);
    println!("2 endpoints: {few:?}\n1,024 endpoints: {many:?}");
    assert_eq!(many.sent, few.sent, "a sender looks at its receiver alone");
    // Of each host a line is invalidated and loaded, behind one fence.
    let summaries = 2 * HOSTS + 1;
    let (received, idle) = (many.received.all(), many.idle.all());
    assert!(received <= few.received.all() + summaries, "{received} operations for a message");
    assert!(idle <= few.idle.all() + summaries, "{idle} operations of a look in vain");
    // A search reads a word of each port of each host, seldom.
    let idle_looks = many.idle_looks - LOOKS * idle;
    assert!(
        idle_looks < LOOKS,
        "{idle_looks} operations of searches and looks for the dead in {LOOKS} looks"
    );
}

/// Operations of each of so many endpoints of one host to open, in turn.
fn joins(count: usize) -> Vec<u64> {
    let rack = Rack::new(2, 256, 128 << 20);
    let mut ends = vec![];
    let mut join = || {
        let before = rack.counts(0);
        ends.push(End::open(Arc::clone(&rack.pools[0]), EndpointOptions::default()).unwrap());
        rack.counts(0).since(before).all()
    };
    (0..count).map(|_| join()).collect()
}

#[test]
fn the_last_of_256_endpoints_of_a_host_joins_with_as_many_operations_as_the_second() {
    let joins = joins(256);
    let sum = |count: usize| joins[..count].iter().sum::<u64>();
    println!("16 endpoints: {} operations, 256: {}; each {joins:?}", sum(16), sum(256));
    let most = joins[1..].iter().max().unwrap();
    assert!(sum(256) <= 17 * sum(16), "256 endpoints join with {} operations, 16 with {}", sum(256), sum(16));
    println!("at most {most}");
}

#[test]
fn a_port_that_an_endpoint_has_left_is_the_next_ones() {
    let rack = Rack::new(2, 4, 16 << 20);
    let mut ends = rack.ends(8);
    assert!(
        End::open(Arc::clone(&rack.pools[0]), EndpointOptions::default()).is_err(),
        "the host has four ports"
    );
    let left = ends.swap_remove(2);
    let address = left.address();
    left.close().unwrap();
    let next = End::open(Arc::clone(&rack.pools[0]), EndpointOptions::default()).unwrap();
    assert_eq!((next.address().host, next.address().port), (address.host, address.port));
    assert_ne!(next.address().generation, address.generation);
}

/// What the first message of a pair takes of its sender and of its receiver, which is not called before all is out.
fn first_contact(hosts: u16, bytes: usize) -> [HeapCounts; 2] {
    let rack = Rack::new(hosts, 2, u64::from(hosts) * (12 << 20));
    let mut ends = rack.ends(hosts.into());
    let (to, sender) = (ends[0].address(), usize::from(hosts) - 1);
    let before = [sender, 0].map(|end| rack.counts(end));
    let peer = ends[sender].connect(to);
    ends[sender].send(peer, label(1), vec![7; bytes], 0).unwrap();
    let sent = ends[sender].completion();
    assert!(matches!(sent, Some(Completion::Sent { .. })), "its sender waits for the receiver: {sent:?}");
    ends[0].receive(of_all(1), vec![0; bytes], 0);
    ends[0].search_next();
    let came = ends[0].step().unwrap();
    let Some(Completion::Received { buffer, .. }) = came else {
        panic!("it takes more than one look: {came:?}")
    };
    assert_eq!(buffer, vec![7; bytes]);
    let after = [sender, 0].map(|end| rack.counts(end));
    [0, 1].map(|end| after[end].since(before[end]))
}

#[test]
fn a_first_message_in_send_buffers_arrives_at_one_look_and_is_looked_up_in_no_directory() {
    for hosts in [2, 4, 16, 64] {
        let [[_, short], [_, long]] = [8, 2048].map(|bytes| first_contact(hosts, bytes));
        let more = long.flushes - short.flushes;
        println!("{hosts} hosts: {} lines for 8 bytes, {more} more for 2 KiB", short.flushes);
        // Its own lines, what says that this host is a member, and three slots. A look-up would read the lines of each level of each host.
        let member = u64::from(hosts) + 32;
        assert!(more <= 2048 / 64 + member + 12, "{hosts} hosts: {more} lines more");
    }
}

/// Looks that an endpoint which has waited long takes until it has the first message of a peer; with `reads`, each reads the news.
fn looks_until_heard(hosts: u16, reads: bool) -> u32 {
    let rack = Rack::new(hosts, 2, u64::from(hosts) * (12 << 20));
    let mut ends = rack.ends(hosts.into());
    for _ in 0..50_000 {
        assert!(ends[0].step().unwrap().is_none());
    }
    let (to, sender) = (ends[0].address(), usize::from(hosts) - 1);
    let peer = ends[sender].connect(to);
    ends[sender].send(peer, label(1), vec![7; 8], 0).unwrap();
    ends[0].receive(of_all(1), vec![0; 8], 0);
    for looks in 1..1 << 20 {
        if reads {
            ends[0].read_news_next();
        }
        if let Some(Completion::Received { .. }) = ends[0].step().unwrap() {
            return looks;
        }
    }
    panic!("nothing comes");
}

#[test]
fn whoever_has_waited_long_hears_a_new_peer_by_the_news_of_its_host() {
    for hosts in [2, 16] {
        let [seldom, always] = [false, true].map(|reads| looks_until_heard(hosts, reads));
        println!("{hosts} hosts: heard after {seldom} looks, and {always} that read the news");
        assert!(always == 1 && seldom <= 64, "{hosts} hosts: {seldom}, {always}");
    }
}
