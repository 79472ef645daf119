//! `polder-dev bench sync`: what two proxies of a parameter service sum in a second, beside the same additions on plain memory.

use std::iter::repeat_n;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polder_attach::session::{self, Session};
use polder_attach::settings::CoherenceChoice;
use polder_kernels::Dtype;
use polder_mem::{LINE, Memory};
use polder_pool::group::{Group, GroupOptions, RankPlace};
use polder_pool::service::{Agreement, Client, Proxy, ServiceOptions};
use polder_pool::wait::Patience;
use polder_pool::{Geometry, Pool, PoolError};
use polder_schedule::{Exchange, Shard};

use crate::Failure;
use polder_measure::Scratch;
use polder_measure::pair::settings;
use polder_measure::size;
use polder_measure::{Better, Row, Sample};

const BYTES: u64 = 128 << 20;
const SHARD: u64 = 2 << 20;
const CLIENTS: usize = 2;
const PROXIES: u16 = 2;
/// Rounds, the first of which does not count: Polder and the floor in turn.
const ROUNDS: usize = 8;
/// Room of a part for its lines and queues.
const HEAD: u64 = 1 << 16;

/// How long a look at the sums may be late: less than a hundredth of a round.
const NAP: Duration = Duration::from_micros(50);

/// Measures one kind of pool after the other.
pub(super) fn run() -> Result<Vec<Row>, Failure> {
    [CoherenceChoice::Coherent, CoherenceChoice::Software].into_iter().map(measure).collect()
}

fn measure(coherence: CoherenceChoice) -> Result<Row, Failure> {
    let bytes = 1 << 30;
    let scratch = Scratch::new()?;
    let path = scratch.path().join("pool");
    session::create(&path, bytes, &Geometry::for_region(bytes))?;
    let session = Session::open(&settings(&path, coherence, 0))?;
    let mut floor = Floor::new();
    let (mut ours, mut theirs) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let seconds = round(session.pool())?;
        ours.push(BYTES as f64 / seconds / 1e9);
        theirs.push(BYTES as f64 / floor.seconds() / 1e9);
    }
    let sample = |rates: Vec<f64>| Sample::of(rates[1..].to_vec()).expect("there are rounds");
    let case = format!("sum {} {CLIENTS} clients {PROXIES} proxies {coherence}", size(BYTES as usize));
    let row = Row::measured("sync", case, "sums", sample(ours), "GB/s");
    Ok(row.beside("floor", sample(theirs).median, Better::More))
}

/// Seconds from the first push that is there to the last sum that is published: all were pushed before the proxies begin.
fn round<M: Memory + Send + Sync + 'static>(pool: &Arc<Pool<M>>) -> Result<f64, PoolError> {
    let alone = Group::join(Arc::clone(pool), "/bench/alone", 0, 1, GroupOptions::default(), None)?;
    let process = alone.members()[0];
    let proxied = |shard: u64| (shard % u64::from(PROXIES)) as u16;
    let shards = (0..BYTES / SHARD)
        .map(|shard| Shard { tensor: 0, start: shard * SHARD, bytes: SHARD, proxy: proxied(shard) })
        .collect();
    let exchange = Exchange::new(shards, PROXIES).expect("shards that lie side by side");
    let agreed = Arc::new(Agreement::new(exchange, Dtype::F32));
    // A client has all shards, a proxy its part of them.
    let proxied_bytes = HEAD + BYTES / u64::from(PROXIES);
    let sizes: Vec<_> =
        repeat_n(HEAD + BYTES, CLIENTS).chain(repeat_n(proxied_bytes, PROXIES.into())).collect();
    let object = pool.create("/bench/sync", sizes.iter().sum::<u64>() + LINE)?;
    let (mut at, mut members) = (object.at(), vec![]);
    for bytes in sizes {
        members.push(RankPlace { at, bytes, bell: None, ..process });
        at = at + bytes;
    }
    let patience = Patience { spins: 1, yields: 1, nap: NAP };
    let options = ServiceOptions { patience, ..ServiceOptions::default() };
    let memory = pool.memory();
    let client =
        |own| Client::over(memory.clone(), members.clone(), CLIENTS, own, Arc::clone(&agreed), options);
    let mut clients = (0..CLIENTS).map(client).collect::<Result<Vec<_>, _>>()?;
    let gradients = vec![0; SHARD as usize];
    for client in &mut clients {
        (0..(BYTES / SHARD) as u32).try_for_each(|shard| client.push(shard, &gradients))?;
    }
    let proxy =
        |own| Proxy::over(memory.clone(), members.clone(), CLIENTS, own, Arc::clone(&agreed), options);
    let proxies = (0..PROXIES).map(proxy).collect::<Result<Vec<_>, _>>()?;
    let seconds = std::thread::scope(|scope| {
        let begin = Instant::now();
        let running: Vec<_> =
            proxies.into_iter().map(|mut proxy| scope.spawn(move || proxy.serve())).collect();
        let summed: Result<(), PoolError> = clients.iter_mut().try_for_each(|client| {
            while client.wait()?.is_some() {}
            Ok(())
        });
        let seconds = begin.elapsed().as_secs_f64();
        clients.iter_mut().for_each(Client::leave);
        for proxy in running {
            proxy.join().expect("a proxy does not panic")?;
        }
        summed.map(|()| seconds)
    })?;
    pool.destroy("/bench/sync")?;
    pool.close(object);
    alone.leave()?;
    Ok(seconds)
}

/// The least code with the same memory traffic: as many threads as proxies read two arrays and write their mean.
struct Floor {
    parts: Vec<[Vec<f32>; 3]>,
}

impl Floor {
    fn new() -> Self {
        let length = (BYTES / u64::from(PROXIES) / 4) as usize;
        Self { parts: (0..PROXIES).map(|_| [1.0, 2.0, 0.0].map(|value| vec![value; length])).collect() }
    }

    fn seconds(&mut self) -> f64 {
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for [one, other, mean] in &mut self.parts {
                scope.spawn(move || {
                    for ((mean, one), other) in mean.iter_mut().zip(one).zip(other) {
                        *mean = (*one + *other) * 0.5;
                    }
                });
            }
        });
        begin.elapsed().as_secs_f64()
    }
}
