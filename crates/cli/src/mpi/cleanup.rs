//! How a job is cleaned up after, by `polder mpi run` or by its guard.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use polder_attach::job_pool::JobPool;
use polder_attach::session::Session;
use polder_attach::settings::Settings;
use polder_mem::{HostPlan, Memory, ProcessSlot};
use polder_pool::{Member, Pool, PoolError, ProcessState, SweepReport, Uuid};
use serde::{Deserialize, Serialize};

use super::leftovers::{kill_marked, may_be_marked, remove_files};
use crate::Failure;
use crate::pool::removed;

/// What there is to clean up after a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Cleanup {
    pub(super) job: u64,
    /// What started it, as an error says it.
    pub(super) maker: String,
    /// What its processes have in their environment.
    pub(super) mark: String,
    /// The hosts of this machine; `None` is the one that the settings say.
    pub(super) hosts: Vec<Option<u16>>,
    /// Whether the pool is the job's own, and goes with it.
    pub(super) owns_pool: bool,
    /// Where its ranks write what they sent, if they do.
    pub(super) tally: PathBuf,
    pub(super) start: SystemTime,
}

impl Cleanup {
    /// Of a job that is started now, and leaves nothing in a pool.
    pub(super) fn new(job: u64, maker: String) -> Self {
        Self {
            job,
            maker,
            mark: format!("{:032x}", Uuid::fresh().0),
            hosts: vec![],
            owns_pool: false,
            tally: PathBuf::new(),
            // The clock of file systems may be a tick behind.
            start: SystemTime::now() - Duration::from_secs(1),
        }
    }

    /// Ends the processes of the job, and then as [`Cleanup::run`].
    pub(super) fn end(&self, settings: &Settings) -> Result<(), Failure> {
        kill_marked(&self.mark);
        self.run(settings)
    }

    /// Removes what the job has left on this machine and in the pool.
    pub(super) fn run(&self, settings: &Settings) -> Result<(), Failure> {
        // The file is there only where the job has run.
        drop(std::fs::remove_file(&self.tally));
        let files = remove_files(Path::new(HostPlan::DIRECTORY), self.start);
        if files > 0 {
            let noun = if files == 1 { "file" } else { "files" };
            eprintln!("polder: removed {files} {noun} of MPI libraries from {}", HostPlan::DIRECTORY);
        }
        let Some(pool) = settings.pool.as_ref().filter(|pool| pool.exists()) else { return Ok(()) };
        // The one that a killed run had is given back by now, and another run would take the pool for left.
        let _share = self.owns_pool.then(|| JobPool::share(pool));
        let swept = self.sweep_until_clean(settings);
        if self.owns_pool {
            std::fs::remove_file(pool)?;
        }
        swept
    }

    /// Sweeps as each of the hosts of this machine, until nothing of the job is left: ranks may outlive an mpiexec that was
    /// killed. For ranks of another run of this job it does not wait.
    fn sweep_until_clean(&self, settings: &Settings) -> Result<(), Failure> {
        let patience = settings.timeout.map_or(Member::new(0, 0).timeout, |span| span.0);
        let (start, mut swept) = (Instant::now(), SweepReport::default());
        loop {
            let (mut hosts, mut is_left, mut stays) = (0, true, false);
            for (number, host) in (1..).zip(&self.hosts) {
                // Not of the job: nobody waits for this process.
                let settings = Settings { host: *host, job: Some(0), ..settings.clone() };
                let session = Session::open(&settings)?;
                let pool = session.pool();
                let has_job = || pool.jobs().map(|jobs| jobs.contains(&self.job));
                // A look or a sweep reads the whole directory, and the first sweep mostly finds all: the hosts of one kernel know which of
                // each other's processes are gone. What processes of a host alone have, its files, goes as the session ends.
                is_left = is_left && has_job()?;
                if is_left {
                    let SweepReport { objects, dead, .. } = pool.sweep_job(self.job)?;
                    swept.objects.extend(objects);
                    swept.dead.extend(dead);
                }
                pool.maintain()?;
                hosts |= 1 << pool.member().host;
                // Only what is left after all of them is a rank's that lives.
                stays = is_left && number == self.hosts.len() && has_job()? && self.waits(pool, hosts)?;
            }
            if !stays || start.elapsed() > patience {
                if !swept.objects.is_empty() {
                    eprintln!("polder: removed {}", removed(&swept));
                }
                if stays {
                    let job = self.job;
                    let remedy = format!("end them, then run `polder pool sweep --job {job}`");
                    eprintln!(
                        "polder: ranks of job {job} outlive mpiexec and keep objects in the pool; {remedy}"
                    );
                }
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether what the job has in the pool is worth waiting for: processes of this run on `hosts` have it, or none that is left.
    /// It asks processes of which job they are. Asking each object for its holders would read what all processes announce each time.
    fn waits<M: Memory>(&self, pool: &Pool<M>, hosts: u64) -> Result<bool, PoolError> {
        let (geometry, mut others_live) = (pool.layout().geometry(), false);
        for (host, slot) in
            (0..geometry.hosts).flat_map(|host| (0..geometry.processes).map(move |slot| (host, slot)))
        {
            let slot = ProcessSlot(slot);
            // Nothing is known of one whose line is damaged.
            let Ok(process) = pool.process(host, slot) else { continue };
            let is_here = hosts >> host & 1 == 1;
            if process.job != self.job
                || process.state != ProcessState::Live
                || (is_here && !pool.peer_alive(host, slot)?)
            {
                continue;
            }
            // The ids of another host's processes are for that host to judge.
            if is_here && may_be_marked(process.pid, &self.mark) {
                return Ok(true);
            }
            others_live = true;
        }
        Ok(!others_live)
    }
}

#[cfg(test)]
mod tests {
    use polder_mem::{Heap, HeapShape};
    use polder_pool::local::LocalLayout;
    use polder_pool::{Geometry, Layout, Overwrite};

    use super::*;

    const BYTES: u64 = 16 << 20;

    /// What a look whether to wait costs in operations on memory, where a rank of another run has made so many objects.
    fn operations(objects: u32) -> u64 {
        let geometry = Geometry { hosts: 4, processes: 64, ..Geometry::for_region(BYTES) };
        let layout = Layout::new(&geometry, BYTES).unwrap();
        let local_words = LocalLayout::new(&layout).words();
        let memory =
            Heap::new(HeapShape { bytes: BYTES, hosts: 4, processes: 64, local_words, bells: 4 * 64 });
        polder_pool::format(&memory, &geometry, Uuid(1), Overwrite::Refuse).unwrap();
        let rank = Pool::attach(memory.clone(), Member { job: 7, ..Member::new(0, 1) }).unwrap();
        let names = (0..objects).map(|number| format!("/endpoint/7/{number}"));
        let held: Vec<_> = names.map(|name| rank.create(&name, 64).unwrap()).collect();
        let of_sweep = memory.process(1, ProcessSlot(0));
        let sweep = Pool::attach(of_sweep.clone(), Member::new(1, 1)).unwrap();
        let before = of_sweep.counts().all();
        let waits = Cleanup::new(7, String::new()).waits(&sweep, 1 << 1).unwrap();
        assert!(!waits, "the rank is another run's");
        let after = of_sweep.counts().all();
        held.into_iter().for_each(|object| rank.close(object));
        after - before
    }

    #[test]
    fn a_look_whether_to_wait_costs_the_same_however_many_objects_a_job_has() {
        assert_eq!(operations(1), operations(200));
    }
}
