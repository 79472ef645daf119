//! The threads of a process: calls of a group run in their order beside the program, messages come while nobody waits, and none of them takes
//! a signal of the program.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use nix::sys::signal::SigSet;
use polder_attach::lane::{Lane, LaneCall};
use polder_attach::messages::{Channel, MESSAGE, Sending, Station};
use polder_attach::session::Session;
use polder_attach::settings::Settings;
use polder_mem::AnyMemory;
use polder_mem::testing::Scratch;
use polder_pool::PoolError;
use polder_pool::group::Group;

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(60);

fn session(scratch: &Scratch, host: u16) -> Arc<Session> {
    let settings = Settings {
        pool: Some(scratch.path().join("pool")),
        run: Some(scratch.path().to_owned()),
        host: Some(host),
        ..Settings::default()
    };
    Arc::new(Session::open_or_create(&settings, 64 << 20).unwrap())
}

/// Notes its number once all ranks have come.
struct Meeting {
    number: u32,
    notes: Arc<Mutex<Vec<u32>>>,
}

impl LaneCall for Meeting {
    fn ready(&self) -> Result<(), PoolError> {
        Ok(())
    }

    fn run(&self, group: &mut Group<AnyMemory>) -> Result<(), PoolError> {
        group.barrier()?;
        self.notes.lock().unwrap().push(self.number);
        Ok(())
    }
}

/// There are threads of this name, once they have given it to themselves, and none takes SIGUSR1.
fn expect_signals_blocked(name: &str) {
    let named = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let statuses = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
        // One that is over, and still there, blocks nothing.
        let is_over = |status: &str| status.contains("\nState:\tX") || status.contains("\nState:\tZ");
        let of_name = |status: &String| status.starts_with(&format!("Name:\t{name}\n")) && !is_over(status);
        statuses.filter(of_name).collect::<Vec<_>>()
    };
    let blocked = |status: &String| {
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
        u64::from_str_radix(mask, 16).unwrap() >> 9 & 1 == 1
    };
    let until = std::time::Instant::now() + LONG;
    while named().is_empty() && std::time::Instant::now() < until {
        std::thread::yield_now();
    }
    let named = named();
    assert!(!named.is_empty() && named.iter().all(blocked), "{named:?}");
}

/// Does the same on two ranks, each on a host and a thread of its own.
fn on_two_ranks(act: impl Fn(usize, Lane, Arc<Session>) + Sync) {
    let scratch = Scratch::new();
    let sessions = [0, 1].map(|host| session(&scratch, host));
    std::thread::scope(|scope| {
        for (rank, session) in sessions.into_iter().enumerate() {
            let act = &act;
            scope.spawn(move || {
                let lane = Lane::join(&session, "/g", (rank, 2), Some(LONG), Box::new(|| false)).unwrap();
                act(rank, lane, session);
            });
        }
    });
}

#[test]
fn calls_run_in_their_order_and_a_closed_group_takes_no_more() {
    on_two_ranks(|_, lane, _| {
        let notes = Arc::default();
        let call = |number| Meeting { number, notes: Arc::clone(&notes) };
        lane.start().unwrap();
        let tickets = [1, 2, 3].map(|number| lane.submit(Box::new(call(number)), Some(LONG)).unwrap());
        let (told, heard) = mpsc::channel();
        let before = SigSet::thread_get_mask().unwrap();
        tickets[2].when_done(Box::new(move |outcome| {
            let blocked = SigSet::thread_get_mask().unwrap();
            told.send((outcome, blocked == before)).unwrap();
        }));
        assert_eq!(heard.recv_timeout(LONG).unwrap(), (Ok(()), true), "code of the program has its signals");
        assert!(tickets.iter().all(|ticket| ticket.outcome() == Some(Ok(()))));
        assert!(lane.is_idle_within(LONG));
        expect_signals_blocked("polder-group");
        lane.run(&call(4), Some(LONG)).unwrap();
        assert_eq!(*notes.lock().unwrap(), [1, 2, 3, 4]);
        lane.close().unwrap();
        let refused = lane.submit(Box::new(call(5)), None).err().unwrap().to_string();
        assert!(refused.contains("closed"), "{refused}");
    });
}

#[test]
fn a_message_comes_while_nobody_waits_and_says_which_rank_sent_it() {
    let (to_first, from_second) = mpsc::channel();
    let (to_second, from_first) = mpsc::channel();
    let ends = [(to_second, from_second), (to_first, from_first)].map(|end| Mutex::new(Some(end)));
    on_two_ranks(|rank, _lane, session| {
        let station = Arc::new(Station::open(&session).unwrap());
        let (to, from) = ends[rank].lock().unwrap().take().unwrap();
        let gather = |record: &[u8]| {
            to.send(record.to_vec()).unwrap();
            let other = from.recv_timeout(LONG).unwrap();
            let records = if rank == 0 { [record, &other] } else { [&other, record] };
            Ok::<_, PoolError>(records.concat())
        };
        let channel = Channel::join(station, rank, gather).unwrap();
        channel.start_thread().unwrap();
        let (receives, buffer) = if rank == 0 { (false, vec![7; 100]) } else { (true, vec![0; 100]) };
        let what = if receives { "receive" } else { "send" };
        let other = (rank == 0).then_some(1);
        let sending = Sending {
            what,
            kind: MESSAGE,
            tag: 3,
            rank: other,
            receives,
            dtype: None,
            buffer,
            timeout: LONG,
        };
        let message = channel.start(sending).unwrap();
        assert_eq!(message.ticket.outcome_within(LONG), Some(Ok(())));
        assert_eq!(message.source.get().copied(), receives.then_some(0));
        expect_signals_blocked("polder-messages");
    });
}
