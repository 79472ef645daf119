//! Messages between two processes of two emulated hosts, beside the bare line operations that
//! they cannot do without.

use std::cell::Cell;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::ValueEnum;
use polder_attach::session::{self, Session};
use polder_attach::settings::CoherenceChoice;
use polder_mem::{Bell, LINE, Memory, Nanos, Offset, ProcessSlot};
use polder_pool::ring::{Consumer, Producer, RingLink, RingPlace, RingShape};
use polder_pool::wait::Patience;
use polder_pool::{Geometry, Peer, Pool, PoolError};

use crate::pair::{Bare, Helper, settings, timed};
use crate::{Better, Failure, Row, Sample, Scratch, size};

const NAME: &str = "/bench/ring";
/// Two rings of each shape, flags, and two megabyte buffers for the floor: nothing overlaps.
const OBJECT: u64 = 32 << 20;
const SAMPLES: usize = 15;
const MESSAGE: usize = 1 << 20;

/// The second process's side, for the hidden command that starts it.
#[derive(clap::Args)]
pub struct Second {
    path: PathBuf,
    /// Under a name of its own: `coherence` is what the user may give to every command.
    kind: CoherenceChoice,
    /// One case alone.
    #[arg(long)]
    only: Option<Only>,
}

/// A case that others ask for.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Only {
    /// The copies of long messages.
    Floor,
    /// There and back with a word.
    RoundTrip,
}

/// Measures one kind of pool after the other.
pub fn run() -> Result<Vec<Row>, Failure> {
    let kinds = [CoherenceChoice::Coherent, CoherenceChoice::Software];
    Ok(kinds.map(|kind| pair(kind, None)).into_iter().collect::<Result<Vec<_>, _>>()?.concat())
}

/// What long messages cannot do without: GB/s of their two copies.
pub fn floor(coherence: CoherenceChoice) -> Result<Option<f64>, Failure> {
    Ok(pair(coherence, Some(Only::Floor))?.first().map(|row| row.value))
}

/// Seconds that a message of 8 bytes takes one way.
pub fn one_way(coherence: CoherenceChoice) -> Result<Option<f64>, Failure> {
    Ok(pair(coherence, Some(Only::RoundTrip))?.first().map(|row| row.value / 2e6))
}

fn pair(coherence: CoherenceChoice, only: Option<Only>) -> Result<Vec<Row>, Failure> {
    let (mut rows, bytes) = (Vec::new(), 128 << 20);
    let scratch = Scratch::new()?;
    let path = scratch.path().join("pool");
    session::create(&path, bytes, &Geometry::for_region(bytes))?;
    let session = Session::open(&settings(&path, coherence, 0))?;
    session.pool().create(NAME, OBJECT).map(drop)?;
    let mut arguments: Vec<OsString> =
        vec!["second".into(), "ring".into(), path.into(), coherence.to_string().into()];
    if let Some(value) = only.and_then(|only| only.to_possible_value()) {
        arguments.extend(["--only".into(), value.get_name().into()]);
    }
    let helper = Helper::start(arguments)?;
    cases(session.pool(), &coherence.to_string(), (true, only), &mut rows)?;
    helper.finish()?;
    Ok(rows)
}

/// Runs the second process.
pub fn second(second: &Second) -> Result<(), Failure> {
    let session = Session::open(&settings(&second.path, second.kind, 1))?;
    cases(session.pool(), "", (false, second.only), &mut Vec::new())
}

fn cases<M: Memory>(
    pool: &Pool<M>,
    kind: &str,
    (first, only): (bool, Option<Only>),
    rows: &mut Vec<Row>,
) -> Result<(), Failure> {
    let at = pool.open(NAME)?.at();
    let bench = Bench { pool, at, first, cases: Cell::new(0) };
    if only == Some(Only::Floor) {
        return bench.bare_stream(kind, rows);
    }
    bench.round_trip(kind, 8, rows)?;
    if only == Some(Only::RoundTrip) {
        return Ok(());
    }
    bench.round_trip(kind, 4096, rows)?;
    for cell in [16, 32, 64, 128] {
        for message in [16 << 10, 64 << 10, MESSAGE] {
            bench.stream(kind, cell << 10, message, rows)?;
        }
    }
    Ok(())
}

/// One side of the cases. The object is divided so that nothing overlaps: flags of the floor, its two buffers, a ring each
/// way.
struct Bench<'a, M: Memory> {
    pool: &'a Pool<M>,
    at: Offset,
    first: bool,
    cases: Cell<u64>,
}

type Alive<'a> = Box<dyn Fn() -> Result<(), PoolError> + 'a>;

impl<'a, M: Memory> Bench<'a, M> {
    const BUFFERS: u64 = 1 << 16;
    const RINGS: u64 = Self::BUFFERS + 2 * MESSAGE as u64;
    const RING: u64 = 8 << 20;

    /// Lines for the next case, and its number.
    fn bare(&self) -> (Bare<'a, M>, u32) {
        let case = self.cases.get() + 1;
        self.cases.set(case);
        (Bare::new(self.pool.memory(), self.at.lines(8 * case), self.first), case as u32)
    }

    fn link(&self) -> RingLink<Alive<'a>> {
        let processes = u32::from(self.pool.superblock().geometry.processes);
        let bell = |host: u32| Bell(host * processes);
        let (own, other) = if self.first { (0, 1) } else { (1, 0) };
        let (pool, host) = (self.pool, other as u16);
        RingLink {
            peer: Peer::new(host, 0),
            epoch: 0,
            bell: bell(own),
            wakes: Some(bell(other)),
            patience: Patience::DEDICATED,
            alive: Box::new(move || match pool.peer_alive(host, ProcessSlot(0))? {
                true => Ok(()),
                false => Err(PoolError::PeerDead {
                    peer: Peer::new(host, 0),
                    what: "a message",
                    epoch: 0,
                    sequence: 0,
                }),
            }),
        }
    }

    /// The ring from the first side (0) or from the second (1), of one generation.
    fn place(&self, from: u64, generation: u32) -> RingPlace {
        let lines = self.at + Self::RINGS + from * Self::RING;
        RingPlace { lines: lines + LINE * 2, credits: lines, generation }
    }

    fn ends(&self, shape: RingShape, generation: u32) -> (Producer<M, Alive<'a>>, Consumer<M, Alive<'a>>) {
        let (out, back) = if self.first { (0, 1) } else { (1, 0) };
        let memory = self.pool.memory();
        // The credit line belongs to the consumer: each side writes the head of the extent that it reads from.
        let producer = Producer::new(memory.clone(), shape, self.place(out, generation), self.link());
        let consumer = Consumer::new(memory.clone(), shape, self.place(back, generation), self.link());
        (producer, consumer)
    }

    fn round_trip(&self, kind: &str, bytes: usize, rows: &mut Vec<Row>) -> Result<(), Failure> {
        const TURNS: u64 = 2000;
        let (bare, generation) = self.bare();
        let (mut producer, mut consumer) = self.ends(RingShape::default(), generation);
        let message = vec![7; bytes];
        let mut back = vec![0; bytes];
        let (mut floor, mut ring) = (Vec::new(), Vec::new());
        for sample in 0..=SAMPLES as u64 {
            let turns = (sample * TURNS + 1)..=(sample + 1) * TURNS;
            floor.push(timed(|| turns.clone().try_for_each(|turn| bare.turn(turn)))? / TURNS as f64 * 1e6);
            let deadline = self.deadline();
            let mut turn = || self.turn(&mut producer, &mut consumer, &message, &mut back, deadline);
            ring.push(timed(|| turns.clone().try_for_each(|_| turn()))? / TURNS as f64 * 1e6);
        }
        let (Some(floor), Some(ring)) = (sample(floor), sample(ring)) else { return Ok(()) };
        let case = format!("round trip {} 2 procs {kind}", size(bytes));
        let row = Row::measured("ring", case, "latency", ring, "us");
        rows.push(if bytes == 8 { row.beside("floor", floor.median, Better::Less) } else { row });
        Ok(())
    }

    fn deadline(&self) -> Nanos {
        self.pool.memory().now() + self.pool.member().timeout
    }

    fn turn(
        &self,
        producer: &mut Producer<M, Alive<'a>>,
        consumer: &mut Consumer<M, Alive<'a>>,
        message: &[u8],
        back: &mut [u8],
        deadline: Nanos,
    ) -> Result<(), PoolError> {
        if self.first {
            producer.push(0, 0, message, deadline)?;
        }
        consumer.pop_slice(back, deadline)?;
        if !self.first {
            producer.push(0, 0, message, deadline)?;
        }
        Ok(())
    }

    /// A stream of messages one way, beside the two copies that each of them needs, in two buffers used in turn.
    fn stream(&self, kind: &str, cell: u32, bytes: usize, rows: &mut Vec<Row>) -> Result<(), Failure> {
        let (bare, generation) = self.bare();
        let shape = RingShape::new((4 << 20) / cell, cell)?;
        let (mut producer, mut consumer) = self.ends(shape, generation);
        let count = (64 << 20) / bytes as u64;
        let mut message = vec![7; bytes];
        let (mut floor, mut ring) = (Vec::new(), Vec::new());
        for sample in 0..=SAMPLES as u64 {
            let numbers = (sample * (count + 1) + 1)..=(sample * (count + 1) + count);
            let last = (sample + 1) * (count + 1);
            floor.push(timed(|| self.copies(&bare, numbers, &mut message))?);
            bare.turn(last)?;
            ring.push(timed(|| self.messages(&mut producer, &mut consumer, count, &mut message))?);
        }
        let rate = |seconds: f64| count as f64 * bytes as f64 / seconds / 1e9;
        let rates = |seconds: Vec<f64>| sample(seconds.into_iter().map(rate).collect());
        let (Some(floor), Some(ring)) = (rates(floor), rates(ring)) else { return Ok(()) };
        let case = format!("stream {} 2 procs {kind} cells {}", size(bytes), size(cell as usize));
        rows.push(Row::measured("ring", case, "bandwidth", ring, "GB/s").beside(
            "floor",
            floor.median,
            Better::More,
        ));
        Ok(())
    }

    /// The copies of long messages alone.
    fn bare_stream(&self, kind: &str, rows: &mut Vec<Row>) -> Result<(), Failure> {
        const COUNT: u64 = 64;
        let (bare, _) = self.bare();
        let (mut message, mut rates) = (vec![7; MESSAGE], Vec::new());
        for sample in 0..=3 {
            let (begin, end) = (sample * (COUNT + 1) + 1, (sample + 1) * (COUNT + 1));
            let seconds = timed(|| self.copies(&bare, begin..=end - 1, &mut message))?;
            bare.turn(end)?;
            rates.push((COUNT * MESSAGE as u64) as f64 / seconds / 1e9);
        }
        rows.extend(sample(rates).map(|rates| Row::measured("ring", kind, "bandwidth", rates, "GB/s")));
        Ok(())
    }

    fn copies(
        &self,
        bare: &Bare<'_, M>,
        numbers: std::ops::RangeInclusive<u64>,
        message: &mut [u8],
    ) -> Result<(), PoolError> {
        let memory = self.pool.memory();
        let begin = *numbers.start();
        for number in numbers {
            let buffer = self.at + Self::BUFFERS + number % 2 * MESSAGE as u64;
            if self.first {
                if number > begin + 1 {
                    bare.hear(number - 2)?;
                }
                memory.copy_in_nt(buffer, message)?;
                memory.sfence();
                bare.say(number);
            } else {
                bare.hear(number)?;
                memory.invalidate(buffer, message.len() as u64);
                memory.fence_invalidations();
                memory.copy_out(buffer, message)?;
                bare.say(number);
            }
        }
        Ok(())
    }

    fn messages(
        &self,
        producer: &mut Producer<M, Alive<'a>>,
        consumer: &mut Consumer<M, Alive<'a>>,
        count: u64,
        message: &mut [u8],
    ) -> Result<(), PoolError> {
        let deadline = self.deadline();
        for _ in 0..count {
            match self.first {
                true => producer.push(0, 0, message, deadline)?,
                false => drop(consumer.pop_slice(message, deadline)?),
            }
        }
        // The time ends when the last message has been read.
        match self.first {
            true => drop(consumer.pop_slice(&mut [0; 8], deadline)?),
            false => producer.push(0, 0, &[0; 8], deadline)?,
        }
        Ok(())
    }
}

/// The samples without the first, which warmed up.
fn sample(mut values: Vec<f64>) -> Option<Sample> {
    values.remove(0);
    Sample::of(values)
}
