//! Services as those see them that look from outside: what clients and proxies say of themselves in their parts.

use std::collections::BTreeMap;

use polder_mem::{LINE, Memory};
use serde::Serialize;

use super::place::{HEAD, state_line};
use crate::group::Mark;
use crate::owned::{Identity, Kind};
use crate::{ObjectStat, PoolError, line};

/// A service in a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ServiceStat {
    /// Its name.
    pub name: String,
    /// Which exchange it is in; they count from 1.
    pub exchange: u64,
    /// How many clients it has.
    pub clients: u64,
    /// The clients whose parts are there.
    pub workers: Vec<WorkerStat>,
    /// The proxies whose parts are there.
    pub proxies: Vec<SumStat>,
}

/// What a client says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct WorkerStat {
    /// Its number among the clients.
    pub rank: u64,
    /// Its host.
    pub host: u16,
    /// Its process id.
    pub pid: u32,
    /// Steps that it has done.
    pub steps: u64,
    /// Nanoseconds that its training thread waited in the last step.
    pub blocked_ns: u64,
    /// Bytes a step that the proxies sum: the paper's m.
    pub proxied_bytes: u64,
    /// Bytes of all gradients in a step.
    pub total_bytes: u64,
    /// The size from which shards go to the proxies of higher latency and bandwidth; 0 for none.
    pub threshold_bytes: u64,
    /// Whether it has not said that it left, or gave up.
    pub takes_part: bool,
}

/// What a proxy says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SumStat {
    /// Its number among the proxies.
    pub proxy: u64,
    /// Its host.
    pub host: u16,
    /// Its process id.
    pub pid: u32,
    /// Steps that it has summed in this exchange.
    pub steps: u64,
    /// Shards that it has summed.
    pub shards: u64,
    /// Bytes of sums that it has written.
    pub bytes: u64,
    /// Whether it has not said that it left, or gave up.
    pub takes_part: bool,
}

/// The services among these objects of a pool, by name, each in its last exchange. What is damaged or gone meanwhile is left out.
///
/// # Errors
/// [`PoolError::Memory`].
pub fn services<M: Memory>(memory: &M, objects: &[ObjectStat]) -> Result<Vec<ServiceStat>, PoolError> {
    let mut by_name: BTreeMap<&str, ServiceStat> = BTreeMap::new();
    for object in objects.iter().filter(|object| object.bytes >= HEAD * LINE) {
        let Some((name, number)) = parse(&object.name) else { continue };
        let identity = line::read(memory, object.at)?.and_then(|words| Identity::decode(&words, Kind::Part));
        let Some(Identity { process, own: [exchange, clients, _], .. }) = identity else { continue };
        let Some([end, words @ ..]) = line::read(memory, state_line(object.at))? else { continue };
        let new =
            || ServiceStat { name: name.to_owned(), exchange, clients, workers: vec![], proxies: vec![] };
        let service = by_name.entry(name).or_insert_with(new);
        if service.exchange > exchange {
            continue;
        }
        if service.exchange < exchange {
            *service = new();
        }
        let (host, pid, takes_part) = (process.host, process.pid, Mark::parse(end).is_none());
        let [steps, second, third, total_bytes, threshold_bytes, _] = words;
        match number.checked_sub(clients) {
            None => service.workers.push(WorkerStat {
                rank: number,
                host,
                pid,
                steps,
                blocked_ns: second,
                proxied_bytes: third,
                total_bytes,
                threshold_bytes,
                takes_part,
            }),
            Some(proxy) => service.proxies.push(SumStat {
                proxy,
                host,
                pid,
                steps,
                shards: second,
                bytes: third,
                takes_part,
            }),
        }
    }
    let mut services: Vec<_> = by_name.into_values().collect();
    for service in &mut services {
        service.workers.sort_by_key(|worker| worker.rank);
        service.proxies.sort_by_key(|proxy| proxy.proxy);
    }
    Ok(services)
}

/// The service and the number of a part, by its object's name.
fn parse(name: &str) -> Option<(&str, u64)> {
    let (rest, number) = name.rsplit_once('/')?;
    let (service, exchange) = rest.rsplit_once('/')?;
    exchange.parse::<u64>().ok()?;
    Some((service, number.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_name_of_a_part_names_its_service_and_its_number() {
        assert_eq!(parse("/sync/ab12/3/1"), Some(("/sync/ab12", 1)));
        for other in ["/sync/ab12", "/a/b/c", "/a/1", "/a/x/1"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
