//! Whether a pool has room for the ranks of a job: for the small rings between them, with which any job goes on.

use std::path::Path;

use polder_attach::job_pool::{self, JobPool};
use polder_attach::session;
use polder_pool::format::{Layout, MAX_HOSTS, MAX_PROCESSES};
use polder_pool::{Geometry, endpoint};

use crate::Failure;
use crate::pool::bytes;

/// The ranks of a job, as far as they take room in a pool.
#[derive(Clone, Debug)]
pub(super) struct Ranks {
    /// How many there are on each host.
    pub(super) on_hosts: Vec<u16>,
    /// Whether ranks of one host have rings to one another too.
    pub(super) within_hosts: bool,
    /// To how many others a rank sends, at most.
    pub(super) partners: Option<u16>,
    /// Processes of the pool that each rank is.
    pub(super) places: u16,
}

impl Ranks {
    fn count(&self) -> u16 {
        self.on_hosts.iter().sum()
    }

    /// The pairs in which the ranks of a host that has so many send to others.
    fn pairs(&self, on_host: u16) -> u64 {
        let others = self.count() - if self.within_hosts { 1 } else { on_host };
        u64::from(on_host) * u64::from(others.min(self.partners.unwrap_or(u16::MAX)))
    }

    /// Whether the endpoints of all ranks fit into a pool of so many bytes, with a small ring for each pair.
    fn fit(&self, geometry: &Geometry, size: u64) -> bool {
        let chunks = |&ranks| endpoint::least_chunks(geometry, u64::from(ranks), self.pairs(ranks));
        let needed: u64 = self.on_hosts.iter().map(chunks).sum();
        Layout::new(geometry, size).is_ok_and(|layout| needed <= layout.chunks().into())
    }

    /// The least power of two of bytes that is enough for a pool, if any is.
    fn least_size(&self) -> Option<u64> {
        let sizes = (22..44).map(|power| 1 << power);
        sizes.into_iter().find(|&size| self.fit(&self.geometry(size), size))
    }

    /// What suits a pool of this size for these ranks.
    fn geometry(&self, size: u64) -> Geometry {
        let usual = Geometry::for_region(size);
        let most = self.on_hosts.iter().max().copied().unwrap_or(1).saturating_mul(self.places);
        Geometry {
            hosts: usual.hosts.max(self.on_hosts.len() as u16).min(MAX_HOSTS),
            processes: usual.processes.max(most).min(MAX_PROCESSES),
            ..usual
        }
    }

    /// Refuses a pool that is too small for the small rings between all ranks.
    pub(super) fn expect_room(&self, pool: &Path, geometry: &Geometry, size: u64) -> Result<(), Failure> {
        if self.fit(geometry, size) {
            return Ok(());
        }
        let pairs: u64 = self.on_hosts.iter().map(|&ranks| self.pairs(ranks)).sum();
        let (pool, ranks, has) = (pool.display(), self.count(), bytes(size));
        let remedy = self.least_size().map_or_else(
            || "take fewer ranks".to_owned(),
            |least| format!("format one with --size {}MiB, or take fewer ranks", least >> 20),
        );
        let partners = match self.partners {
            None => ", or give --partners if a rank sends to few others".to_owned(),
            Some(1) => String::new(),
            Some(given) => format!(", or give fewer --partners than {given} if a rank sends to fewer others"),
        };
        Err(Failure(format!(
            "{pool} of {has} is too small for the {pairs} small rings between {ranks} ranks; {remedy}{partners}"
        )))
    }

    /// Makes a pool of the job's own, and takes a share of it: until that is dropped, no other job takes the pool for left.
    pub(super) fn make_pool(&self, pool: &Path) -> Result<JobPool, Failure> {
        let folder = pool.parent().unwrap_or(pool);
        let free =
            session::free_bytes(folder).map_err(|error| Failure(format!("{}: {error}", folder.display())))?;
        let least = self.least_size().unwrap_or(u64::MAX);
        if least > free {
            return Err(Failure(format!(
                "{} has {} free, and {} ranks need a pool of {}; make room there, take fewer ranks, or name a pool elsewhere with --pool",
                folder.display(),
                bytes(free),
                self.count(),
                bytes(least)
            )));
        }
        let usual = job_pool::usual_bytes(free, self.count());
        let size = if self.fit(&self.geometry(usual), usual) { usual } else { least };
        Ok(JobPool::make_as(pool, size, &self.geometry(size))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partners_that_were_given_are_not_asked_for_again() {
        let why = |partners| {
            let ranks = Ranks { on_hosts: vec![128; 2], within_hosts: true, partners, places: 2 };
            let (pool, size) = (Path::new("/dev/shm/small"), 4 << 20);
            ranks.expect_room(pool, &ranks.geometry(size), size).unwrap_err().0
        };
        assert!(why(None).ends_with(", or give --partners if a rank sends to few others"), "{}", why(None));
        let given = why(Some(26));
        assert!(
            given.ends_with("or give fewer --partners than 26 if a rank sends to fewer others"),
            "{given}"
        );
    }

    #[test]
    fn the_sizes_in_the_docs_are_the_least_that_are_enough() {
        let page = include_str!("../../../../docs/mpi.md");
        let table = page.split("| ranks, all through the pool |").nth(1).expect("a table of sizes");
        let rows: Vec<_> = table.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
        for row in &rows {
            let cells: Vec<_> = row.split('|').map(str::trim).collect();
            let [_, count, pairs, size, _] = cells[..] else { panic!("{row}") };
            let count: u16 = count.parse().unwrap();
            let ranks = Ranks { on_hosts: vec![count / 2; 2], within_hosts: true, partners: None, places: 2 };
            let reckoned: u64 = ranks.on_hosts.iter().map(|&on_host| ranks.pairs(on_host)).sum();
            assert_eq!(reckoned.to_string(), pairs.replace(',', ""), "{row}");
            let size: polder_attach::settings::ByteCount = size.parse().unwrap();
            assert_eq!(ranks.least_size(), Some(size.0), "{row}");
        }
        assert_eq!(rows.len(), 6);
    }
}
