//! `polder-dev bench ranks`: many endpoints on emulated hosts send each other messages of each size, and what a rank and a pair
//! take of the pool. Beside each figure stands what three smaller jobs on as many hosts predict.
//!
//! Each host is a process with all endpoints of that host. In step `s` rank `r` sends to rank `r + s`, and receives from rank
//! `r - s`. Every byte that comes is held against the one that was sent.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polder_attach::session::{self, Session};
use polder_attach::settings::{ByteCount, CoherenceChoice};
use polder_mem::Memory;
use polder_pool::endpoint::{Address, Completion, Endpoint, EndpointOptions, Filter, Label};
use polder_pool::group::{Group, GroupOptions, JoinedGroup};
use polder_pool::wait::Patience;
use polder_pool::{Geometry, Pool, inspect};

use super::scaling::Scaling;
use crate::Failure;
use polder_measure::Scratch;
use polder_measure::pair::{Helper, settings};
use polder_measure::{Better, Row, Sample};

/// Steps that a rank is ahead of the slowest of its operations.
const AHEAD: usize = 2;
/// How long ranks wait for each other.
const PATIENCE: Duration = Duration::from_secs(600);
const ADDRESSES: &str = "/bench/addresses";
/// Bytes of an address, and of a figure of a host.
const ADDRESS: usize = 16;
const KIND: u8 = 1;
/// Ranks a host of the jobs that a larger one is predicted from, and how often each runs: the median counts.
const SMALLER: [u16; 3] = [1, 4, 16];
const RUNS: usize = 3;

/// How many ranks, and what they send.
#[derive(clap::Args, Clone)]
pub(super) struct Arguments {
    /// Ranks, each an endpoint.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u16).range(2..=4096))]
    ranks: u16,
    /// Emulated hosts, each a process.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    hosts: u16,
    /// Bytes of the pool.
    #[arg(long, default_value = "8GiB")]
    size: ByteCount,
    /// Bytes of the messages of each all-to-all.
    #[arg(long, value_delimiter = ',', default_value = "64,64KiB")]
    messages: Vec<ByteCount>,
    /// Bytes of the pool that a rank takes at most for rings of pairs [default: half of its part of the pool].
    #[arg(long)]
    memory_per_rank: Option<ByteCount>,
    /// How the pool is kept coherent.
    #[arg(long = "pool-coherence", default_value = "coherent")]
    kind: CoherenceChoice,
}

/// Another host's side, for the hidden command that starts it.
#[derive(clap::Args)]
pub(crate) struct Second {
    path: PathBuf,
    /// Under a name of its own: `coherence` is what the user may give to every command.
    kind: CoherenceChoice,
    host: u16,
    hosts: u16,
    ranks: u16,
    memory_per_rank: u64,
    messages: Vec<u64>,
}

/// Measures one all-to-all after the other.
pub(super) fn run(arguments: &Arguments) -> Result<Vec<Row>, Failure> {
    let Arguments { ranks, hosts, kind, .. } = arguments.clone();
    if !ranks.is_multiple_of(hosts) {
        return Err(Failure(format!(
            "{ranks} ranks are not as many on each of {hosts} hosts; give a multiple"
        )));
    }
    let each = ranks / hosts;
    let smaller = if each > SMALLER[2] { &SMALLER[..] } else { &[] };
    let smaller = smaller.iter().map(|each| median_of(arguments, each * hosts));
    let smaller = smaller.collect::<Result<Vec<_>, Failure>>()?;
    let job = run_job(arguments, ranks)?;
    let rows = job.into_iter().enumerate().filter_map(|(index, figure)| {
        let Figure { what, metric, value, unit, .. } = &figure;
        let case = format!("{what} {ranks} ranks {hosts} hosts {kind}");
        let row = Row::measured("ranks", case, metric, Sample::of(vec![*value])?, unit);
        let jobs = smaller.iter().zip(SMALLER).map(|(job, each)| (u32::from(each * hosts), job[index].total));
        let scaling = <[_; 3]>::try_from(jobs.collect::<Vec<_>>()).ok().and_then(Scaling::through);
        // A figure without a total is not predicted, such as memory for rings, which has a limit.
        let scaling = scaling.filter(|_| figure.total > 0.0);
        let predicted = scaling.map(|scaling| scaling.at(ranks.into()) * value / figure.total);
        Some(match predicted {
            Some(predicted) => row.beside("predicted", predicted, Better::Less),
            None => row,
        })
    });
    Ok(rows.collect())
}

/// What a job had: one of its figures.
struct Figure {
    what: String,
    metric: &'static str,
    value: f64,
    unit: &'static str,
    /// That of the whole job, which more ranks make larger; 0 where nothing predicts it.
    total: f64,
}

/// The figures of a job of so many ranks, each the median of a few runs.
fn median_of(arguments: &Arguments, ranks: u16) -> Result<Vec<Figure>, Failure> {
    let runs = (0..RUNS).map(|_| run_job(arguments, ranks)).collect::<Result<Vec<_>, _>>()?;
    let median = |index: usize| Sample::of(runs.iter().map(|figures| figures[index].total).collect());
    let totals: Vec<_> = (0..runs[0].len()).filter_map(median).collect();
    let figures = runs.into_iter().next().unwrap_or_default();
    Ok(figures
        .into_iter()
        .zip(totals)
        .map(|(figure, total)| Figure { total: total.median, ..figure })
        .collect())
}

/// Runs a job of so many ranks in a pool of its own.
fn run_job(arguments: &Arguments, ranks: u16) -> Result<Vec<Figure>, Failure> {
    let Arguments { hosts, kind, .. } = arguments.clone();
    let bytes = arguments.size.0;
    let usual = Geometry::for_region(bytes);
    // The announcements of a process: each endpoint, with its objects of blocks, and the rings of pairs.
    let geometry = Geometry { hosts, processes: (ranks / hosts).max(2), opens: 1 << 16, ..usual };
    let scratch = Scratch::new()?;
    let path = scratch.path().join("pool");
    session::create(&path, bytes, &geometry)?;
    // That of the job which is asked for, so that smaller ones have no more room for each rank.
    let memory_per_rank =
        arguments.memory_per_rank.map_or(bytes / u64::from(arguments.ranks) / 2, |ByteCount(bytes)| bytes);
    let messages: Vec<u64> = arguments.messages.iter().map(|size| size.0).collect();
    let second = |host| Second {
        path: path.clone(),
        kind,
        host,
        hosts,
        ranks,
        memory_per_rank,
        messages: messages.clone(),
    };
    let helpers = (1..hosts).map(|host| start(&second(host))).collect::<Result<Vec<_>, _>>()?;
    let figures = host(&second(0))?;
    helpers.into_iter().try_for_each(Helper::finish)?;
    Ok(figures)
}

fn start(second: &Second) -> Result<Helper, Failure> {
    let Second { path, kind, host, hosts, ranks, memory_per_rank, messages } = second;
    let numbers = [(*host).into(), (*hosts).into(), (*ranks).into(), *memory_per_rank];
    let words = ["second", "ranks"].map(OsString::from).into_iter();
    let words = words.chain([path.clone().into(), kind.to_string().into()]);
    Helper::start(words.chain(numbers.iter().chain(messages).map(|number| number.to_string().into())))
}

/// Runs another host.
pub(crate) fn second(second: &Second) -> Result<(), Failure> {
    host(second).map(drop)
}

fn host(second: &Second) -> Result<Vec<Figure>, Failure> {
    let session = Session::open(&settings(&second.path, second.kind, second.host))?;
    Host::new(Arc::clone(session.pool()), second)?.measure()
}

type End<M> = Endpoint<M, Vec<u8>, usize>;

/// All ranks of one host.
struct Host<'a, M: Memory> {
    pool: Arc<Pool<M>>,
    second: &'a Second,
    group: JoinedGroup<M>,
    ranks: Vec<Rank<M>>,
}

/// One rank of the all-to-all that runs.
struct Rank<M: Memory> {
    rank: usize,
    end: End<M>,
    /// The number of each rank among the peers.
    peers: Vec<u32>,
    /// Steps that were begun, and operations of them that are over.
    begun: usize,
    over: usize,
    /// Buffers that nothing uses.
    free: Vec<Vec<u8>>,
}

impl<'a, M: Memory + 'static> Host<'a, M> {
    fn new(pool: Arc<Pool<M>>, second: &'a Second) -> Result<Self, Failure> {
        let options =
            GroupOptions { patience: Patience::SHARED, timeout: PATIENCE, ..GroupOptions::default() };
        let (host, hosts) = (usize::from(second.host), usize::from(second.hosts));
        let group = Group::join(Arc::clone(&pool), "/bench/group", host, hosts, options, None)?;
        Ok(Self { pool, second, group, ranks: vec![] })
    }

    fn measure(mut self) -> Result<Vec<Figure>, Failure> {
        let ranks = f64::from(self.second.ranks);
        let pairs = ranks * (ranks - 1.0) / 2.0;
        let figure =
            |what: &str, metric, value, unit, total| Figure { what: what.into(), metric, value, unit, total };
        let mut figures = vec![];
        let joined = self.timed(Self::open)?;
        let mut before = self.taken()?;
        figures.push(figure("open and exchange addresses", "time", joined, "s", joined));
        figures.push(figure("open", "memory a rank", before / ranks, "B", before));
        for (index, &bytes) in self.second.messages.iter().enumerate() {
            let what = format!("all-to-all {bytes} B");
            let seconds = self.timed(|host| host.exchange(bytes as usize))?;
            let after = self.taken()?;
            // The first makes a small ring for each pair. Others make rings of pairs, as long as there is room.
            let [rank, pair] = if index == 0 { [after, after - before] } else { [0.0; 2] };
            figures.push(figure(&what, "time", seconds, "s", seconds));
            figures.push(figure(&what, "bandwidth", 2.0 * pairs * bytes as f64 / seconds / 1e9, "GB/s", 0.0));
            figures.push(figure(&what, "memory a rank", after / ranks, "B", rank));
            figures.push(figure(&what, "memory a pair more", (after - before) / pairs, "B", pair));
            before = after;
        }
        let Self { ranks: ends, mut group, .. } = self;
        group.barrier()?;
        drop(ends);
        group.barrier()?;
        Ok(figures)
    }

    /// Seconds that all hosts take for this.
    fn timed(&mut self, what: impl FnOnce(&mut Self) -> Result<(), Failure>) -> Result<f64, Failure> {
        self.group.barrier()?;
        let began = Instant::now();
        what(self)?;
        self.group.barrier()?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Bytes of all objects of the pool: counted when all hosts are still.
    fn taken(&mut self) -> Result<f64, Failure> {
        self.group.barrier()?;
        let bytes = if self.second.host == 0 { inspect(self.pool.memory())?.stat.object_bytes } else { 0 };
        self.group.barrier()?;
        Ok(bytes as f64)
    }

    /// Opens the endpoints of this host, and learns the addresses of all.
    fn open(&mut self) -> Result<(), Failure> {
        let (host, hosts) = (usize::from(self.second.host), usize::from(self.second.hosts));
        let all = usize::from(self.second.ranks);
        let each = all / hosts;
        let options = EndpointOptions {
            memory_bytes: self.second.memory_per_rank,
            timeout: PATIENCE,
            ..EndpointOptions::default()
        };
        let ends = (0..each).map(|_| Ok(End::open(Arc::clone(&self.pool), options)?));
        let ends = ends.collect::<Result<Vec<_>, Failure>>()?;
        // Each host writes whole lines.
        let part = (each * ADDRESS).next_multiple_of(64);
        let mut own = vec![0; part];
        for (place, end) in own.chunks_mut(ADDRESS).zip(&ends) {
            place.copy_from_slice(&end.address().encode());
        }
        if host == 0 {
            self.pool.close(self.pool.create(ADDRESSES, (hosts * part) as u64)?);
        }
        self.group.barrier()?;
        let object = self.pool.open(ADDRESSES)?;
        object.write_at(self.pool.memory(), (host * part) as u64, &own)?;
        self.group.barrier()?;
        let mut read = vec![0; hosts * part];
        object.read_at(self.pool.memory(), 0, &mut read)?;
        self.pool.close(object);
        let addresses = read.chunks(part).flat_map(|part| part.chunks(ADDRESS).take(each));
        let decode = |bytes: &[u8]| Address::decode(bytes.try_into().ok()?);
        let addresses: Option<Vec<_>> = addresses.map(decode).collect();
        let addresses = addresses.ok_or_else(|| Failure("a host has written no address".into()))?;
        let rank = |(index, mut end): (usize, End<M>)| {
            let peers = addresses.iter().map(|&address| end.connect(address)).collect();
            Rank { rank: host * each + index, end, peers, begun: 0, over: 0, free: vec![] }
        };
        self.ranks = ends.into_iter().enumerate().map(rank).collect();
        Ok(())
    }

    /// Sends a message of so many bytes from each rank to each other.
    fn exchange(&mut self, bytes: usize) -> Result<(), Failure> {
        let deadline = Instant::now() + PATIENCE;
        for rank in &mut self.ranks {
            (rank.begun, rank.over) = (0, 0);
            rank.free.clear();
        }
        loop {
            let (mut moved, mut done) = (false, true);
            for rank in &mut self.ranks {
                moved |= rank.go_on(bytes)?;
                done &= rank.is_done();
            }
            if done {
                return Ok(());
            }
            if !moved {
                std::thread::yield_now();
                // Others may have begun to talk meanwhile.
                self.ranks.iter_mut().for_each(|rank| rank.end.read_news_next());
            }
            if Instant::now() > deadline {
                return Err(Failure(format!("an all-to-all of {bytes} B takes more than {PATIENCE:?}")));
            }
        }
    }
}

impl<M: Memory> Rank<M> {
    fn steps(&self) -> usize {
        self.peers.len() - 1
    }

    fn is_done(&self) -> bool {
        self.over == 2 * self.steps()
    }

    /// Begins what it may, and takes what is over; whether there was anything.
    fn go_on(&mut self, bytes: usize) -> Result<bool, Failure> {
        let (before, all) = (self.over + self.begun, self.peers.len());
        while self.begun < self.steps() && self.begun < self.over / 2 + AHEAD {
            self.begun += 1;
            let (to, from) = ((self.rank + self.begun) % all, (self.rank + all - self.begun) % all);
            let mut buffers = [(); 2].map(|()| self.free.pop().unwrap_or_else(|| vec![0; bytes]));
            let [out, into] = &mut buffers;
            fill(out, self.rank, to);
            into.fill(0);
            let [out, into] = buffers;
            let filter = Filter { from: Some(self.peers[from]), kind: KIND, tag: bytes as u64, ignore: 0 };
            self.end.receive(filter, into, from);
            let label = Label { kind: KIND, tag: bytes as u64, data: None };
            self.end.send(self.peers[to], label, out, to)?;
        }
        let mut over = self.end.step()?;
        while let Some(completion) = over {
            self.over += 1;
            self.free.push(self.judge(completion, bytes)?);
            over = self.end.completion();
        }
        Ok(self.over + self.begun > before)
    }

    /// Returns the buffer of an operation that is over, or says what is wrong with it.
    fn judge(&self, completion: Completion<Vec<u8>, usize>, bytes: usize) -> Result<Vec<u8>, Failure> {
        match completion {
            Completion::Sent { buffer, .. } => Ok(buffer),
            Completion::Received { buffer, context, arrival } if arrival.bytes == bytes as u64 => {
                match differs(&buffer, context, self.rank) {
                    None => Ok(buffer),
                    Some(at) => Err(Failure(format!(
                        "byte {at} of {bytes} from rank {context} to rank {} is wrong",
                        self.rank
                    ))),
                }
            }
            Completion::Failed { error, .. } => Err(error.into()),
            other => Err(Failure(format!("rank {} has {other:?}", self.rank))),
        }
    }
}

/// The words of a message from one rank to another: each byte depends on both, and on where it stands.
fn words(from: usize, to: usize) -> impl Iterator<Item = [u8; 8]> {
    let salt = (from as u64) << 32 | to as u64 | 1 << 63;
    (0u64..).map(move |index| (salt.wrapping_add(index)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
}

fn fill(message: &mut [u8], from: usize, to: usize) {
    for (place, word) in message.chunks_mut(8).zip(words(from, to)) {
        place.copy_from_slice(&word[..place.len()]);
    }
}

/// The first byte that is not as it was sent.
fn differs(message: &[u8], from: usize, to: usize) -> Option<usize> {
    let wrong = |(found, word): (&[u8], [u8; 8])| found != &word[..found.len()];
    message.chunks(8).zip(words(from, to)).position(wrong).map(|index| index * 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_that_is_wrong_or_of_another_pair_is_found() {
        let mut message = vec![0; 1001];
        fill(&mut message, 3, 5);
        assert_eq!(differs(&message, 3, 5), None);
        assert_eq!(differs(&message, 5, 3), Some(0));
        message[1000] ^= 1;
        assert_eq!(differs(&message, 3, 5), Some(1000));
    }
}
