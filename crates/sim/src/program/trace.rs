//! What the tracer saw of an MPI program: `crates/mpi` writes it, docs/plan-programs.md describes it.
//!
//! Each rank has a text of its own. Lines are: the version; `rank RANK OF HOST`; calls as `BEGIN END CALL NUMBERS`, in nanoseconds since all
//! ranks had begun; `comm NUMBER RANKS`; and `end TIME`.

use std::collections::{BTreeMap, BTreeSet};

use polder_platform::{DataError, quoted};
use serde::Serialize;

use super::{Collective, Group, Operation, UNWAITED};

/// The first line of a trace.
const VERSION: &str = "polder-mpi-trace 1";

/// What a program was seen to do.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramTrace {
    /// What each rank does; what lies between two calls is computing.
    pub ranks: Vec<Vec<Operation>>,
    /// The host of each rank, by number.
    pub hosts: Vec<u32>,
    /// What each rank took.
    pub measured: Vec<MeasuredRank>,
    /// What calls took, by name.
    pub calls: BTreeMap<String, CallSeconds>,
}

/// What a rank took while it was traced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MeasuredRank {
    /// From the first to the last.
    pub total_s: f64,
    /// In calls of MPI.
    pub communication_s: f64,
}

/// Calls of one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CallSeconds {
    /// How many, of all ranks.
    pub count: u64,
    /// How long, of all ranks together.
    pub seconds: f64,
}

/// Bytes of all messages, at most: so many are counted one by one in 64-bit floats.
const MOST_BYTES: u64 = 1 << 53;

/// What is wrong in a line, without where.
type LineProblem = String;

/// Reads the texts of all ranks, each with its name, in any order.
///
/// # Errors
/// When one is no trace, or there is not one of each rank.
pub fn read_trace(texts: &[(String, String)]) -> Result<ProgramTrace, DataError> {
    let mut ranks = BTreeMap::new();
    let mut calls = BTreeMap::new();
    for (name, text) in texts {
        let trace = RankTrace::read(name, text, &mut calls)?;
        let (rank, of) = (trace.rank, trace.of);
        if of as usize != texts.len() {
            let problem = format!("expected the files of all {of} ranks, found {}", texts.len());
            return Err(DataError::new(name, "rank", problem));
        }
        if rank >= of || ranks.insert(rank, trace).is_some() {
            return Err(DataError::new(
                name,
                "rank",
                format!("expected one file of each of {of} ranks, found rank {rank} again or beyond"),
            ));
        }
    }
    if ranks.is_empty() {
        return Err(DataError::new("trace", "", "expected the files of the ranks, found none"));
    }
    let mut hosts: Vec<&str> = ranks.values().map(|trace| trace.host.as_str()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let number =
        |trace: &RankTrace| hosts.iter().position(|host| *host == trace.host).map_or(0, |at| at as u32);
    expect_same_collectives(texts, &ranks)?;
    let bytes = |operation: &Operation| {
        if let Operation::Send { bytes, .. } = operation { u128::from(*bytes) } else { 0 }
    };
    let all: u128 = ranks.values().flat_map(|trace| &trace.operations).map(bytes).sum();
    if all > MOST_BYTES.into() {
        let problem = format!("expected messages of {MOST_BYTES} bytes in all or less, found {all}");
        return Err(DataError::new(&texts[0].0, "send", problem));
    }
    Ok(ProgramTrace {
        hosts: ranks.values().map(number).collect(),
        measured: ranks.values().map(|trace| trace.measured).collect(),
        ranks: ranks.into_values().map(|trace| trace.operations).collect(),
        calls,
    })
}

/// Whether the ranks of a communicator make the same collective calls in the same order.
fn expect_same_collectives(
    texts: &[(String, String)],
    ranks: &BTreeMap<u32, RankTrace>,
) -> Result<(), DataError> {
    let comms: BTreeSet<&Vec<u32>> = ranks.values().flat_map(|trace| trace.collectives.keys()).collect();
    let of = |rank: u32, members: &Vec<u32>| ranks.get(&rank)?.collectives.get(members);
    for members in comms {
        let calls_of = |rank| of(rank, members).map_or(&[][..], Vec::as_slice);
        let first = members[0];
        let expected = calls_of(first);
        for rank in &members[1..] {
            let calls = calls_of(*rank);
            let differs = (0..calls.len().max(expected.len())).find(|at| calls.get(*at) != expected.get(*at));
            let Some(at) = differs else { continue };
            let shown =
                |call: Option<&CollectiveCall>| call.map_or_else(|| "none".to_owned(), CollectiveCall::shown);
            let [expected, found] = [expected.get(at), calls.get(at)].map(shown);
            let problem = format!(
                "call {} of {} ranks: expected {expected}, as rank {first} has, found {found}",
                at + 1,
                members.len()
            );
            let head = format!("rank {rank} ");
            let is_of =
                |(_, text): &&(String, String)| text.lines().nth(1).is_some_and(|it| it.starts_with(&head));
            let name = texts.iter().find(is_of).map_or("trace", |(name, _)| name);
            return Err(DataError::new(name, "collective", problem));
        }
    }
    Ok(())
}

/// A collective call, as far as all ranks of it must agree.
#[derive(Clone, Debug, PartialEq)]
struct CollectiveCall {
    name: String,
    root: usize,
    /// Where each rank gives the same.
    bytes: Option<u64>,
}

impl CollectiveCall {
    fn shown(&self) -> String {
        let Self { name, root, bytes } = self;
        let bytes = bytes.map_or_else(String::new, |bytes| format!(" of {bytes} bytes"));
        format!("{name}{bytes} with root {root}")
    }
}

struct RankTrace {
    rank: u32,
    of: u32,
    host: String,
    operations: Vec<Operation>,
    measured: MeasuredRank,
    /// The ranks of each communicator.
    comms: BTreeMap<i64, Vec<u32>>,
    /// Collective calls by the ranks of their communicator, in their order.
    collectives: BTreeMap<Vec<u32>, Vec<CollectiveCall>>,
    /// Where receives whose sender was not yet known stand among the operations.
    open: BTreeMap<u32, usize>,
    /// The end of the last call, in nanoseconds.
    until: u64,
}

impl RankTrace {
    fn read(name: &str, text: &str, calls: &mut BTreeMap<String, CallSeconds>) -> Result<Self, DataError> {
        let mut lines = text.lines().enumerate();
        let wrong =
            |at: usize, problem: LineProblem| DataError::new(name, &format!("line {}", at + 1), problem);
        match lines.next() {
            Some((_, VERSION)) => {}
            found => {
                let found = found.map_or("nothing", |(_, line)| line);
                return Err(wrong(0, format!("expected {VERSION:?}, found \"{}\"", quoted(found))));
            }
        }
        let mut trace = match lines.next() {
            Some((at, line)) => Self::begin(line).map_err(|problem| wrong(at, problem))?,
            None => return Err(wrong(1, "expected rank RANK OF HOST, found the end".into())),
        };
        let mut ended = false;
        for (at, line) in lines {
            if ended {
                return Err(wrong(at, "expected nothing after end".into()));
            }
            ended = trace.line(line, calls).map_err(|problem| wrong(at, problem))?;
        }
        match ended {
            false => Err(DataError::new(
                name,
                "end",
                "expected a last line with end: the program was killed before MPI_Finalize",
            )),
            true => match trace.open.keys().next() {
                Some(request) => Err(DataError::new(
                    name,
                    "ireceive",
                    format!("request {request} of any source is never waited for"),
                )),
                None => Ok(trace),
            },
        }
    }

    fn begin(line: &str) -> Result<Self, LineProblem> {
        let wrong = || format!("expected rank RANK OF HOST, found \"{}\"", quoted(line));
        let mut words = line.split(' ');
        let (Some("rank"), Some(rank), Some(of), Some(host), None) =
            (words.next(), words.next(), words.next(), words.next(), words.next())
        else {
            return Err(wrong());
        };
        Ok(Self {
            rank: rank.parse().map_err(|_| wrong())?,
            of: of.parse().map_err(|_| wrong())?,
            host: host.into(),
            operations: vec![],
            measured: MeasuredRank::default(),
            comms: BTreeMap::new(),
            collectives: BTreeMap::new(),
            open: BTreeMap::new(),
            until: 0,
        })
    }

    /// Reads a line; whether it is the last.
    fn line(&mut self, line: &str, calls: &mut BTreeMap<String, CallSeconds>) -> Result<bool, LineProblem> {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["comm", number, ranks] => {
                let ranks: Result<Vec<u32>, _> = ranks.split(',').map(str::parse).collect();
                let ranks = ranks
                    .map_err(|_| format!("expected ranks with commas between, found \"{}\"", quoted(line)))?;
                if let Some(beyond) = ranks.iter().find(|rank| **rank >= self.of) {
                    return Err(format!("expected ranks below {}, found {beyond}", self.of));
                }
                self.comms.insert(whole(number)?, ranks);
                Ok(false)
            }
            ["end", time] => {
                let end: u64 =
                    time.parse().map_err(|_| format!("expected end TIME, found \"{}\"", quoted(line)))?;
                self.gap(end)?;
                self.measured.total_s = end as f64 * 1e-9;
                Ok(true)
            }
            [begin, end, call, ref numbers @ ..] => {
                let [begin, end] = [begin, end].map(str::parse::<u64>);
                let (Ok(begin), Ok(end)) = (begin, end) else {
                    return Err(format!("expected BEGIN END CALL, found \"{}\"", quoted(line)));
                };
                self.gap(begin)?;
                if end < begin {
                    return Err(format!("expected an end after {begin}, found {end}"));
                }
                self.until = end;
                let seconds = (end - begin) as f64 * 1e-9;
                self.measured.communication_s += seconds;
                let of_name = calls.entry(call.to_owned()).or_default();
                (of_name.count, of_name.seconds) = (of_name.count + 1, of_name.seconds + seconds);
                let numbers: Vec<i64> = numbers.iter().map(|text| whole(text)).collect::<Result<_, _>>()?;
                self.call(call, &numbers).map(|()| false)
            }
            _ => Err(format!("expected BEGIN END CALL, found \"{}\"", quoted(line))),
        }
    }

    /// What lies between two calls is computing.
    fn gap(&mut self, until: u64) -> Result<(), LineProblem> {
        let Some(gap) = until.checked_sub(self.until) else {
            return Err(format!("expected a time from {} on, found {until}", self.until));
        };
        if gap > 0 {
            self.operations.push(Operation::Compute { seconds: gap as f64 * 1e-9 });
        }
        Ok(())
    }

    /// A size of which each rank may have a piece.
    fn size(&self, number: i64) -> Result<u64, LineProblem> {
        let most = MOST_BYTES / u64::from(self.of.max(1));
        let size = u64::try_from(number).ok().filter(|it| *it <= most);
        size.ok_or_else(|| format!("expected a size from 0 to {most}, found {number}"))
    }

    fn call(&mut self, call: &str, numbers: &[i64]) -> Result<(), LineProblem> {
        let done = match (call, numbers) {
            ("send", [to, tag, bytes]) => {
                Operation::Send { to: small(*to)?, bytes: self.size(*bytes)?, tag: *tag, request: None }
            }
            ("isend", [to, tag, bytes, request]) => {
                let request = Some(if *request < 0 { UNWAITED } else { small(*request)? });
                Operation::Send { to: small(*to)?, bytes: self.size(*bytes)?, tag: *tag, request }
            }
            ("receive", [from, tag]) => Operation::Receive { from: small(*from)?, tag: *tag, request: None },
            ("ireceive", [from, tag, request]) => {
                let request = small(*request)?;
                if *from < 0 || *tag < 0 {
                    self.open.insert(request, self.operations.len());
                }
                // What is open is filled in by the wait.
                Operation::Receive { from: (*from).max(0) as u32, tag: *tag, request: Some(request) }
            }
            ("wait", [request]) => Operation::Wait { request: small(*request)? },
            ("wait", [request, from, tag]) => {
                let request = small(*request)?;
                if let Some(at) = self.open.remove(&request) {
                    self.operations[at] =
                        Operation::Receive { from: small(*from)?, tag: *tag, request: Some(request) };
                }
                Operation::Wait { request }
            }
            ("other", []) => return Ok(()),
            (_, [comm, bytes, root]) => {
                let kind = collective(call).ok_or_else(|| {
                    format!("{} is no call of this version, or has other numbers", quoted(call))
                })?;
                let members =
                    self.comms.get(comm).ok_or_else(|| format!("comm {comm} was not named before"))?;
                let place = members.iter().position(|it| *it == self.rank);
                let place = place.ok_or_else(|| format!("comm {comm} has not this rank, {}", self.rank))?;
                let root = usize::try_from(*root).ok().filter(|root| *root < members.len());
                let root = root.ok_or_else(|| format!("the root is none of the {} ranks", members.len()))?;
                let bytes = self.size(*bytes)?;
                let is_alike =
                    matches!(kind, Collective::Broadcast | Collective::Reduce | Collective::AllReduce);
                let called = CollectiveCall { name: call.into(), root, bytes: is_alike.then_some(bytes) };
                self.operations.extend(Group { members, place }.messages(kind, bytes, root));
                match self.collectives.get_mut(members) {
                    Some(calls) => calls.push(called),
                    None => drop(self.collectives.insert(members.clone(), vec![called])),
                }
                return Ok(());
            }
            _ => return Err(format!("{} is no call of this version, or has other numbers", quoted(call))),
        };
        self.operations.push(done);
        Ok(())
    }
}

fn collective(call: &str) -> Option<Collective> {
    Some(match call {
        "barrier" => Collective::Barrier,
        "broadcast" => Collective::Broadcast,
        "reduce" => Collective::Reduce,
        "all-reduce" => Collective::AllReduce,
        "gather" => Collective::Gather,
        "all-gather" => Collective::AllGather,
        "scatter" => Collective::Scatter,
        "all-to-all" => Collective::AllToAll,
        "reduce-scatter" => Collective::ReduceScatter,
        _ => return None,
    })
}

fn whole(word: &str) -> Result<i64, LineProblem> {
    word.parse().map_err(|_| format!("expected a whole number, found \"{}\"", quoted(word)))
}

fn small(number: i64) -> Result<u32, LineProblem> {
    u32::try_from(number).map_err(|_| format!("expected a number from 0 on, found {number}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Network, Way, replay};

    fn texts(of: &[&str]) -> Vec<(String, String)> {
        let text = |(rank, body): (usize, &&str)| {
            (format!("rank-{rank}"), format!("{VERSION}\nrank {rank} {} here\ncomm 0 0,1\n{body}", of.len()))
        };
        of.iter().enumerate().map(text).collect()
    }

    const SENDER: &str = "1000 2000 send 1 7 1000000\n3000 4000 all-reduce 0 8 0\nend 5000\n";

    #[test]
    fn a_receive_of_any_source_is_that_of_its_wait() {
        let other = "0 10 ireceive -1 -1 3\n20 2500 wait 3 0 7\n2500 4000 all-reduce 0 8 0\nend 4000\n";
        let trace = read_trace(&texts(&[SENDER, other])).unwrap();
        assert_eq!(trace.ranks[1][0], Operation::Receive { from: 0, tag: 7, request: Some(3) });
        assert_eq!(trace.calls["all-reduce"].count, 2);
        assert!((trace.measured[1].communication_s - 3.99e-6).abs() < 1e-15);
        let way = Way::new(1e-6, 1e9);
        let network = Network { hosts: trace.hosts.clone(), inside: way, between: way, factors: vec![] };
        let replayed = replay(&trace.ranks, &network).unwrap();
        // 1 us of computing, then the message; rank 0 has computed 1 us more when its bytes have left.
        // The two messages of the all-reduce go through the memory of the host in turn.
        let expected = 1e-6 + 1e-3 + 1e-6 + 1.016e-6 + 1e-6;
        assert!((replayed.ranks[0].total_s - expected).abs() < 1e-8, "{replayed:?}");
    }

    #[test]
    fn what_is_no_trace_is_named_with_its_line() {
        for (body, expected) in [
            ("end 1\n", "rank-0: rank: expected the files of all 2 ranks, found 1"),
            ("5 4 send 1 7 1\nend 9\n", "rank-0: line 4: expected an end after 5, found 4"),
            ("5 9 jump 1\nend 9\n", "rank-0: line 4: jump is no call"),
            ("5 9 barrier 4 0 0\nend 9\n", "rank-0: line 4: comm 4 was not named before"),
            ("5 9 send 1 7 1\n", "rank-0: end: expected a last line"),
            ("0 1 ireceive -1 -1 3\nend 4\n", "rank-0: ireceive: request 3 of any source"),
            ("x\n", "rank-0: line 4: expected BEGIN END CALL"),
            (
                "5 9 scatter 0 9223372036854775807 0\nend 9\n",
                "rank-0: line 4: expected a size from 0 to 4503599627370496, found 9223372036854775807",
            ),
        ] {
            let one = vec![("rank-0".to_owned(), format!("{VERSION}\nrank 0 2 here\ncomm 0 0,1\n{body}"))];
            let error = read_trace(&one).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        let sends = "5 9 send 1 7 4503599627370496\n".repeat(3) + "end 9\n";
        let error = read_trace(&texts(&[&sends.replace("5 9", "9 9"), "end 9\n"])).unwrap_err().to_string();
        assert!(error.contains("expected messages of 9007199254740992 bytes in all or less"), "{error}");
        let error = read_trace(&[("a".into(), "elf".into())]).unwrap_err().to_string();
        assert!(error.starts_with("a: line 1: expected \"polder-mpi-trace 1\""), "{error}");
    }

    #[test]
    fn ranks_that_call_different_collectives_are_no_program() {
        for (one, other, expected) in [
            (
                "5 9 broadcast 0 8 0\nend 9\n",
                "5 9 reduce 0 8 0\nend 9\n",
                "rank-1: collective: call 1 of 2 ranks: expected broadcast of 8 bytes with root 0, as rank 0 has, found reduce",
            ),
            ("5 9 broadcast 0 8 0\nend 9\n", "5 9 broadcast 0 16 0\nend 9\n", "rank-1: collective: call 1"),
            ("5 9 gather 0 8 0\nend 9\n", "5 9 gather 0 8 1\nend 9\n", "rank-1: collective: call 1"),
            (
                "5 7 barrier 0 0 0\n7 9 broadcast 0 8 1\nend 9\n",
                "5 7 barrier 0 0 0\nend 9\n",
                "rank-1: collective: call 2 of 2 ranks: expected broadcast of 8 bytes with root 1, as rank 0 has, found none",
            ),
            ("end 9\n", "5 7 barrier 0 0 0\nend 9\n", "rank-1: collective: call 1 of 2 ranks: expected none"),
        ] {
            let refusal = read_trace(&texts(&[one, other])).unwrap_err().to_string();
            assert!(refusal.starts_with(expected), "{refusal}");
        }
        // What each rank gives may differ where each has a piece of its own.
        read_trace(&texts(&["5 9 gather 0 8 0\nend 9\n", "5 9 gather 0 16 0\nend 9\n"])).unwrap();
    }

    #[test]
    fn a_line_of_megabytes_is_quoted_in_part() {
        let long = "x".repeat(1 << 20);
        let head = format!("{VERSION}\nrank 0 1 here\n");
        for text in [
            long.clone(),
            format!("{VERSION}\n{long}"),
            format!("{VERSION}\nrank {long} 1 here\n"),
            format!("{head}{long}"),
            format!("{head}comm 0 {long}\n"),
            format!("{head}comm {long} 0\n"),
            format!("{head}end {long}\n"),
            format!("{head}1 {long} send 1 7 1\n"),
            format!("{head}1 2 {long} 1 7 1\n"),
            format!("{head}1 2 send {long} 7 1\n"),
        ] {
            let refusal = read_trace(&[("rank-0".into(), text.clone())]).unwrap_err().to_string();
            assert!(refusal.len() < 500, "{}: {} bytes", &text[..60], refusal.len());
        }
    }
}
