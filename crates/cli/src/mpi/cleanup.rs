//! How a job is cleaned up after, by `polder mpi run` or by its guard.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use polder_attach::job_pool::JobPool;
use polder_attach::session::Session;
use polder_attach::settings::Settings;
use polder_mem::{HostPlan, Memory};
use polder_pool::{Member, Pool, PoolError, SweepReport, Uuid};
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
            let mut stays = false;
            for host in &self.hosts {
                // Not of the job: nobody waits for this process.
                let settings = Settings { host: *host, job: Some(0), ..settings.clone() };
                let session = Session::open(&settings)?;
                let pool = session.pool();
                // Before the sweep, which then removes all of those that have ended.
                let (lives, others_live) = self.live(pool)?;
                let SweepReport { objects, dead, .. } = pool.sweep_job(self.job)?;
                swept.objects.extend(objects);
                swept.dead.extend(dead);
                pool.maintain()?;
                stays |= pool.jobs()?.contains(&self.job) && (lives || !others_live);
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

    /// Whether ranks of this run have something of the job in the pool, and whether others have.
    fn live<M: Memory>(&self, pool: &Pool<M>) -> Result<(bool, bool), PoolError> {
        let (mut lives, mut others_live) = (false, false);
        for of in ["endpoint", "window", "memory"] {
            for listed in pool.list(&format!("/{of}/{}/", self.job))? {
                let holders = match pool.holders(&listed.name) {
                    Err(PoolError::NotFound { .. }) => continue,
                    holders => holders?,
                };
                for peer in holders {
                    // The ids of another host's processes are for that host to judge.
                    let is_own = peer.host == pool.member().host && may_be_marked(peer.pid, &self.mark);
                    lives |= is_own;
                    others_live |= !is_own;
                }
            }
            if lives && others_live {
                break;
            }
        }
        Ok((lives, others_live))
    }
}
