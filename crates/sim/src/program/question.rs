//! What is asked of a traced program: over which network it runs instead.

use std::borrow::Cow;
use std::path::Path;

use polder_platform::{DataError, Platform, files_of, quoted, recorded_text_of};
use serde::Deserialize;

use super::{
    HostLinks, Meeting, Network, Operation, ProgramTrace, ReplayError, Replayed, Way, read_trace, replay_over,
};
use crate::contention::{FlitOptions, TransferError, check_total_flit_hops};
use crate::fidelity::Fidelity;
use crate::given::GivenError;

/// A network, and how messages on it are looked at.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramQuestion {
    /// Seconds of an empty message between ranks of a host.
    pub latency_s: f64,
    /// Bytes a second of messages between ranks of a host.
    pub bytes_per_s: f64,
    /// The machine that hosts are joined as; without it all ranks run on one host.
    pub platform: Option<String>,
    /// The platform's path between two hosts.
    pub path: Option<String>,
    /// Hosts, each with ranks that follow one another, of which none has more than one above another's; those of the trace when left out.
    pub hosts: Option<u32>,
    /// How many times as long computing takes as in the trace.
    pub computing: f64,
    /// How closely messages between hosts are looked at: each as if it were alone, one after another at ports that they share, or flit by flit.
    pub fidelity: Fidelity,
    /// What flits need beside the platform; a program's messages are followed whole, and each crosses two links of one channel.
    #[serde(default)]
    pub flits: FlitOptions,
}

/// A program over a network.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictedProgram {
    /// The network.
    pub network: Network,
    /// What the program takes.
    pub replayed: Replayed,
}

/// Why a traced program cannot be predicted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// A file is damaged.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A given value cannot be.
    #[error(transparent)]
    Given(#[from] GivenError),
    /// Its messages cannot be followed flit by flit.
    #[error(transparent)]
    Transfers(#[from] TransferError),
    /// The program cannot be followed to its end.
    #[error(transparent)]
    Replay(#[from] ReplayError),
}

/// How many times as long computing takes, at most.
const MOST_COMPUTING: f64 = 1e6;

impl ProgramTrace {
    /// Reads the files of all ranks of a folder.
    ///
    /// # Errors
    /// When the folder has none, or not one of each rank, or one is damaged.
    pub fn load(folder: &Path) -> Result<Self, DataError> {
        let remedy = "no file rank-0: run the program with POLDER_MPI_TRACE and the window shim, see docs/plan-programs.md";
        let text = |name: String| {
            let text = recorded_text_of(&name)?;
            Ok((name, text))
        };
        let files = files_of(folder, |name| name.starts_with("rank-"), remedy)?;
        read_trace(&files.into_iter().map(text).collect::<Result<Vec<_>, DataError>>()?)
    }

    /// Seconds of the slowest rank, and those in calls, the mean of all ranks.
    #[must_use]
    pub fn measured_s(&self) -> (f64, f64) {
        let total_s = self.measured.iter().map(|it| it.total_s).fold(0.0, f64::max);
        let in_calls_s = self.measured.iter().map(|it| it.communication_s).sum::<f64>();
        (total_s, in_calls_s / self.measured.len() as f64)
    }

    /// Follows the program over another network.
    ///
    /// # Errors
    /// When the network cannot be, or a rank waits for ever.
    pub fn predict(&self, question: &ProgramQuestion) -> Result<PredictedProgram, ProgramError> {
        let ProgramQuestion { latency_s, bytes_per_s, computing, .. } = *question;
        GivenError::expect_above_zero("bandwidth", bytes_per_s)?;
        for (key, value, most) in [("latency", latency_s, f64::MAX), ("computing", computing, MOST_COMPUTING)]
        {
            if !(0.0..=most).contains(&value) {
                let up_to = if most < f64::MAX { format!("to {most}") } else { "on".into() };
                let problem = format!("expected a number from 0 {up_to}, found {value}");
                return Err(GivenError::new(key, problem).into());
            }
        }
        question.flits.check(question.fidelity)?;
        if question.flits.window_bytes.is_some() {
            let problem =
                "a program's messages differ and wait for each other; expected none, or fidelity L1";
            return Err(GivenError::new("window", problem).into());
        }
        if question.flits.channels.is_some() {
            let problem = "a message between hosts takes one channel, because it crosses no link between switches; expected none";
            return Err(GivenError::new("virtual-channels", problem).into());
        }
        let (network, links) = self.network(question)?;
        let mut ranks = Cow::Borrowed(&self.ranks);
        if computing != 1.0 {
            for done in ranks.to_mut().iter_mut().flatten() {
                if let Operation::Compute { seconds } = done {
                    *seconds *= computing;
                }
            }
        }
        if let Some(links) = &links {
            check_total_flit_hops(links.flit_hops(&ranks, &network.hosts))
                .map_err(|problem| GivenError::new("fidelity", problem))?;
        }
        let meeting = match (question.fidelity, links) {
            (Fidelity::L0, _) => Meeting::Alone,
            (_, Some(links)) => Meeting::ByFlits(links),
            (_, None) => Meeting::InTurn,
        };
        let replayed = replay_over(&ranks, &network, meeting)?;
        Ok(PredictedProgram { network, replayed })
    }

    /// The network, and the links of hosts if flits go over them.
    fn network(&self, question: &ProgramQuestion) -> Result<(Network, Option<HostLinks>), ProgramError> {
        let hosts = self.hosts_of(question.hosts)?;
        let inside = Way::new(question.latency_s, question.bytes_per_s);
        let is_followed = question.fidelity == Fidelity::L2;
        let is_apart = hosts.iter().any(|host| *host > 0);
        if is_followed && !is_apart {
            let problem = "expected L0 or L1, found L2: all ranks run on one host, and no flit leaves it";
            return Err(GivenError::new("fidelity", problem).into());
        }
        let (Some(name), Some(wanted)) = (&question.platform, &question.path) else {
            if is_apart {
                let problem = "ranks run on several hosts; give a platform with servers, and --path";
                return Err(GivenError::new("platform", problem).into());
            }
            return Ok((Network { hosts, inside, between: inside, factors: vec![] }, None));
        };
        let platform = Platform::load(name)?;
        let named = platform.server.values().find_map(|server| Some((server, server.path.get(wanted)?)));
        let Some((server, path)) = named else {
            let known: Vec<_> =
                platform.server.values().flat_map(|server| server.path.keys()).map(String::as_str).collect();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            let problem = format!("expected one of {name}, which has {known}; found \"{}\"", quoted(wanted));
            return Err(GivenError::new("path", problem).into());
        };
        let between = Way::of(server, path);
        let links = match is_followed {
            true => Some(HostLinks::of(server, path, &between, &question.flits).map_err(|why| {
                GivenError::new("fidelity", format!("expected L0 or L1, found L2: path {wanted} {why}"))
            })?),
            false => None,
        };
        Ok((Network { hosts, inside, between, factors: vec![] }, links))
    }

    fn hosts_of(&self, asked: Option<u32>) -> Result<Vec<u32>, GivenError> {
        let ranks = self.ranks.len() as u32;
        match asked {
            None => Ok(self.hosts.clone()),
            Some(hosts) if hosts > 0 && hosts <= ranks => {
                let host = |rank: u32| u64::from(rank) * u64::from(hosts) / u64::from(ranks);
                Ok((0..ranks).map(|rank| host(rank) as u32).collect())
            }
            Some(hosts) => {
                let problem = format!("expected 1 to {ranks}, the ranks of the trace, found {hosts}");
                Err(GivenError::new("hosts", problem))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks on one host that compute for a microsecond.
    fn trace(ranks: u32) -> ProgramTrace {
        let file = |rank: u32| {
            let name = format!("rank-{rank}");
            (name, format!("polder-mpi-trace 1\nrank {rank} {ranks} here\nend 1000\n"))
        };
        read_trace(&(0..ranks).map(file).collect::<Vec<_>>()).unwrap()
    }

    fn question(hosts: u32, fidelity: Fidelity, flits: FlitOptions) -> ProgramQuestion {
        let (platform, path) = (Some("cmpi".into()), Some("roce-smartnic".into()));
        let (latency_s, bytes_per_s, computing) = (1e-6, 1e9, 1.0);
        let hosts = Some(hosts);
        ProgramQuestion { latency_s, bytes_per_s, platform, path, hosts, computing, fidelity, flits }
    }

    #[test]
    fn ranks_run_on_as_many_hosts_as_are_given() {
        for (ranks, hosts) in [(5, 4), (8, 4), (7, 3), (3, 1)] {
            let question = question(hosts, Fidelity::L1, FlitOptions::default());
            let found = trace(ranks).predict(&question).unwrap().network.hosts;
            let each: Vec<_> = found.chunk_by(|one, other| one == other).map(<[u32]>::len).collect();
            assert_eq!(each.len(), hosts as usize, "{found:?}");
            assert!(each.iter().max().unwrap() - each.iter().min().unwrap() <= 1, "{found:?}");
        }
    }

    #[test]
    fn what_no_flit_of_a_program_takes_is_refused() {
        let channels = FlitOptions { channels: Some(8), ..FlitOptions::default() };
        for (hosts, flits, why) in [
            (1, FlitOptions::default(), "fidelity: expected L0 or L1, found L2: all ranks run on one host"),
            (2, channels, "virtual-channels: a message between hosts takes one channel"),
        ] {
            let error = trace(2).predict(&question(hosts, Fidelity::L2, flits)).unwrap_err().to_string();
            assert!(error.starts_with(why), "{error}");
        }
    }
}
