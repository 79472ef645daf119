//! What killed processes of a job leave, and what of it a sweep removes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use polder_attach::session::{self, Session};
use polder_attach::settings::Settings;
use polder_mem::testing::{Child, Scratch};
use polder_mem::{AnyMemory, Coherence, Memory};
use polder_pool::endpoint::{Address, Completion, Endpoint, EndpointOptions, Filter, Label};
use polder_pool::{Geometry, Peer, Pool, PoolError, PrivateMemory, SweepReport};

const JOB: u64 = 7;

type End = Endpoint<AnyMemory, Vec<u8>, u64>;

fn made() -> Scratch {
    let (scratch, bytes) = (Scratch::new(), 64 << 20);
    session::create(&scratch.path().join("pool"), bytes, &Geometry::for_region(bytes)).unwrap();
    scratch
}

fn attach(folder: &Path, host: u16) -> (Session, Arc<Pool<AnyMemory>>) {
    attach_by(folder, folder, host)
}

/// With a run directory that is not the pool's folder.
fn attach_by(folder: &Path, run: &Path, host: u16) -> (Session, Arc<Pool<AnyMemory>>) {
    attach_as(JOB, folder, run, host)
}

fn attach_as(job: u64, folder: &Path, run: &Path, host: u16) -> (Session, Arc<Pool<AnyMemory>>) {
    let settings = Settings {
        pool: Some(folder.join("pool")),
        run: Some(run.into()),
        host: Some(host),
        job: Some(job),
        ..Settings::default()
    };
    let session = Session::open(&settings).unwrap();
    let pool = session.pool();
    assert_eq!(pool.memory().coherence(), Coherence::Coherent, "a file on tmpfs is coherent");
    let pool = Arc::clone(pool);
    (session, pool)
}

/// A process on `host` that sends `message` to whomever it is told of, until it is killed.
struct Sender {
    child: Child,
    wire: UnixStream,
}

impl Sender {
    fn start(scratch: &Scratch, host: u16, message: &[u8], options: EndpointOptions) -> Self {
        let (wire, mut theirs) = UnixStream::pair().unwrap();
        let (folder, message) = (scratch.path().to_owned(), message.to_owned());
        let child = Child::fork(move || {
            let (_session, pool) = attach(&folder, host);
            let _memory = PrivateMemory::take(Arc::clone(&pool), 0, 1000).unwrap();
            let mut end = End::open(pool, options).unwrap();
            theirs.write_all(&end.address().encode()).unwrap();
            let mut address = [0; 16];
            while theirs.read_exact(&mut address).is_ok() {
                let peer = end.connect(Address::decode(address).unwrap());
                end.inject(peer, Label { kind: 1, tag: 3, data: None }, &message).unwrap();
                end.progress().unwrap();
                theirs.write_all(&[1]).unwrap();
            }
        });
        Self { child, wire }
    }

    fn address(&mut self) -> Address {
        let mut bytes = [0; 16];
        self.wire.read_exact(&mut bytes).unwrap();
        Address::decode(bytes).unwrap()
    }

    fn send_to(&mut self, address: Address) {
        self.wire.write_all(&address.encode()).unwrap();
        self.wire.read_exact(&mut [0]).unwrap();
    }
}

fn names(pool: &Pool<AnyMemory>) -> Vec<String> {
    let mut names: Vec<_> = pool.list("").unwrap().into_iter().map(|listed| listed.name).collect();
    names.sort();
    names
}

/// A process on `host` that joins the group `/sums/one` of two as `rank`, and waits to be killed.
fn rank(scratch: &Scratch, host: u16, rank: usize) -> (Child, UnixStream) {
    rank_by(scratch, scratch.path(), host, rank)
}

fn rank_by(scratch: &Scratch, run: &Path, host: u16, rank: usize) -> (Child, UnixStream) {
    let (mut wire, mut theirs) = UnixStream::pair().unwrap();
    let (folder, run) = (scratch.path().to_owned(), run.to_owned());
    let child = Child::fork(move || {
        let (_session, pool) = attach_by(&folder, &run, host);
        let options = polder_pool::group::GroupOptions::default();
        let _group = polder_pool::group::Group::join(pool, "/sums/one", rank, 2, options, None).unwrap();
        theirs.write_all(&[1]).unwrap();
        let _ = theirs.read(&mut [0]);
    });
    wire.set_nonblocking(false).unwrap();
    if rank == 1 {
        wire.read_exact(&mut [0]).unwrap();
    }
    (child, wire)
}

#[test]
fn a_group_is_swept_once_all_its_ranks_are_dead_and_what_looks_like_one_stays() {
    let scratch = made();
    let (mut first, _one) = rank(&scratch, 1, 0);
    let (mut second, _other) = rank(&scratch, 2, 1);
    let (_session, pool) = attach(scratch.path(), 0);
    for name in ["/sums/one/2", "/numbered/0"] {
        pool.close(pool.create(name, 1000).unwrap());
    }
    let free = || match pool.create("/all", 1 << 40) {
        Err(PoolError::Full { free, .. }) => free,
        other => panic!("{other:?}"),
    };
    assert_eq!(pool.sweep_groups(None).unwrap(), SweepReport::default(), "all live");
    first.kill();
    assert_eq!(pool.sweep_groups(None).unwrap(), SweepReport::default(), "one lives");
    second.kill();
    let before = free();
    assert_eq!(pool.sweep_groups(Some(JOB + 1)).unwrap(), SweepReport::default(), "of another job");
    let swept = pool.sweep_groups(Some(JOB)).unwrap();
    let mut removed: Vec<_> = swept.objects.iter().map(|listed| listed.name.as_str()).collect();
    removed.sort_unstable();
    assert_eq!(removed, ["/sums/one/0", "/sums/one/1"]);
    let dead = [(1, first.pid()), (2, second.pid())].map(|(host, pid)| Peer::new(host, pid));
    assert_eq!(swept.dead, dead);
    assert_eq!(names(&pool), ["/numbered/0", "/sums/one/2"]);
    // Each host frees its own, once the host of the other rank has cleaned up after that.
    for host in [1, 2, 1] {
        let (_session, owner) = attach(scratch.path(), host);
        owner.maintain().unwrap();
    }
    // A host may keep an empty chunk.
    let held: u64 = swept.objects.iter().map(|listed| listed.bytes).sum();
    assert!(free() + (256 << 10) >= before + held, "{} free after {before} and {held} more", free());
}

/// Nobody is attached while they die, so that the run directory of those that come later knows nothing of them.
#[test]
fn a_group_of_several_hosts_is_swept_also_by_a_process_that_saw_none_of_its_ranks() {
    let (scratch, apart) = (made(), Scratch::new());
    let (mut first, _one) = rank_by(&scratch, apart.path(), 1, 0);
    let (mut second, _other) = rank(&scratch, 2, 1);
    second.kill();
    {
        let (_session, pool) = attach(scratch.path(), 0);
        assert_eq!(
            pool.sweep_groups(None).unwrap(),
            SweepReport::default(),
            "one lives, by another run directory"
        );
        let holders = pool.holders("/sums/one/0").unwrap();
        assert_eq!(
            holders,
            [Peer::new(1, first.pid())],
            "the second is dead, and the first holds what it has joined"
        );
    }
    first.kill();
    let (_session, pool) = attach(scratch.path(), 0);
    assert_eq!(pool.holders("/sums/one/0").unwrap(), []);
    let swept = pool.sweep_groups(None).unwrap();
    assert_eq!(swept.objects.len(), 2, "{swept:?}");
    let dead = [(1, first.pid()), (2, second.pid())].map(|(host, pid)| Peer::new(host, pid));
    assert_eq!(swept.dead, dead);
    assert!(names(&pool).is_empty());
}

#[test]
fn a_sweep_leaves_what_the_living_may_still_want_and_in_the_end_nothing() {
    // Pairs begin with small rings, in the objects of their senders. One that has talked for a while gets a ring of its own.
    let usual = EndpointOptions::default();
    for (options, rings) in [(usual, 0), (EndpointOptions { short_talk: 0, ..usual }, 4)] {
        sweep(options, rings);
    }
}

fn sweep(options: EndpointOptions, rings: usize) {
    let scratch = made();
    let [last, more] = ["last words", "more to come"];
    let mut dead = Sender::start(&scratch, 1, last.as_bytes(), options);
    let mut alive = Sender::start(&scratch, 1, more.as_bytes(), options);
    let [of_dead, of_alive] = [dead.address(), alive.address()];
    let (_session, pool) = attach(scratch.path(), 0);
    let mut end = End::open(Arc::clone(&pool), EndpointOptions::default()).unwrap();
    // A ring takes messages once its receiver has seen it.
    for _ in 0..2 {
        for _ in 0..100_000 {
            end.progress().unwrap();
        }
        for sender in [&mut dead, &mut alive] {
            sender.send_to(end.address());
        }
    }
    dead.send_to(of_alive);
    alive.send_to(of_dead);
    dead.child.kill();
    pool.close(pool.create("/endpoint/70/1.0", 64).unwrap());
    pool.close(pool.create("/mine", 64).unwrap());
    // Three endpoints, rings of pairs, two memories, and two objects that are not the job's.
    assert_eq!(names(&pool).len(), 3 + rings + 2 + 2, "{:?}", names(&pool));
    // `polder pool sweep` is a process of another job.
    let (_other, stranger) = attach_as(JOB + 1, scratch.path(), scratch.path(), 0);
    for sweeper in [&stranger, &pool] {
        let job = sweeper.member().job;
        assert_eq!(
            sweeper.sweep_job(JOB),
            Ok(SweepReport::default()),
            "somebody who lives may still listen to the dead, and a process of job {job} sweeps"
        );
    }
    // What the dead said is heard after the sweep.
    let mut heard = vec![];
    for _ in 0..4 {
        end.receive(Filter { from: None, kind: 1, tag: 3, ignore: 0 }, vec![0; 400], 0);
        let done = (0..10_000_000).find_map(|_| {
            end.progress().unwrap();
            end.completion()
        });
        let Some(Completion::Received { buffer, arrival, .. }) = done else { panic!("{done:?}") };
        heard.push(String::from_utf8(buffer[..arrival.bytes as usize].into()).unwrap());
    }
    heard.sort();
    assert_eq!(heard, [last, last, more, more]);
    alive.child.kill();
    pool.sweep_job(JOB).unwrap();
    let left = names(&pool);
    assert!(
        left.iter().filter(|name| name.contains("/from/")).all(|name| name.contains("/0.0.")),
        "{left:?}"
    );
    end.close().unwrap();
    let mut named = pool.sweep_job(JOB).unwrap().dead;
    named.sort_by_key(|peer| peer.pid != dead.child.pid());
    assert_eq!(named, [&dead, &alive].map(|sender| Peer::new(1, sender.child.pid())));
    assert_eq!(names(&pool), ["/endpoint/70/1.0", "/mine"]);
}

#[test]
fn whoever_takes_the_place_of_a_dead_endpoint_removes_what_the_dead_of_its_job_have_left() {
    let scratch = made();
    let mut dead = [(); 2].map(|()| Sender::start(&scratch, 1, b"last words", EndpointOptions::default()));
    let addresses = dead.each_mut().map(Sender::address);
    for (sender, other) in dead.iter_mut().zip(addresses.into_iter().rev()) {
        sender.send_to(other);
    }
    let (_session, pool) = attach(scratch.path(), 1);
    for sender in &mut dead {
        sender.child.kill();
    }
    let end = End::open(Arc::clone(&pool), EndpointOptions::default()).unwrap();
    assert_eq!(names(&pool), [format!("/endpoint/{JOB}/1.0")]);
    end.close().unwrap();
}

#[test]
fn what_names_no_process_stays_and_stands_in_nobodys_way() {
    let scratch = made();
    let mut dead = Sender::start(&scratch, 1, b"", EndpointOptions::default());
    let _ = dead.address();
    let (_session, pool) = attach(scratch.path(), 0);
    pool.close(pool.create(&format!("/endpoint/{JOB}/1.9"), 64).unwrap());
    pool.close(pool.create(&format!("/endpoint/{JOB}/odd"), 0).unwrap());
    dead.child.kill();
    pool.sweep_job(JOB).unwrap();
    assert_eq!(names(&pool), [format!("/endpoint/{JOB}/1.9"), format!("/endpoint/{JOB}/odd")]);
}

#[test]
fn a_receive_whose_message_the_memory_does_not_give_fails() {
    let scratch = made();
    // What is host 1's lies behind all else.
    let [(_first, here), (_second, there)] = [1, 0].map(|host| attach(scratch.path(), host));
    let mut ends =
        [&here, &there].map(|pool| End::open(Arc::clone(pool), EndpointOptions::default()).unwrap());
    let to = ends[1].address();
    let peer = ends[0].connect(to);
    ends[1].receive(Filter { from: None, kind: 1, tag: 3, ignore: 0 }, vec![0; 100_000], 1);
    // So long a message goes through a ring of the pair, once the receiver has said that it has that open.
    ends[0].send(peer, Label { kind: 1, tag: 3, data: None }, vec![7; 100_000], 2).unwrap();
    while !matches!(ends[0].completion(), Some(Completion::Sent { .. })) {
        ends[1].progress().unwrap();
        ends[0].progress().unwrap();
    }
    // Of the ring's first cell only the page in which it begins is left.
    let names = here.list("").unwrap();
    let ring = names.iter().max_by_key(|listed| listed.bytes).unwrap();
    let ring = here.open(&ring.name).unwrap();
    let shape = EndpointOptions::default().ring;
    let cell = ring.at().0 + ring.bytes() - shape.cells() * shape.cell_bytes();
    let file = std::fs::OpenOptions::new().write(true).open(scratch.path().join("pool")).unwrap();
    let bytes = file.metadata().unwrap().len();
    file.set_len((cell + 1).next_multiple_of(4096)).unwrap();
    let failed = loop {
        if let Err(error) = ends[1].progress() {
            break error;
        }
    };
    file.set_len(bytes).unwrap();
    assert!(matches!(failed, PoolError::Memory(_)), "{failed}");
    let done = ends[1].completion();
    assert!(
        matches!(done, Some(Completion::Failed { context: 1, error: PoolError::Memory(_), .. })),
        "{done:?}"
    );
    here.close(ring);
}
