//! A soak on two machines that share a device: one plays and judges, and the other runs the processes that it is told to.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::time::{Duration, Instant};

use polder_attach::settings::Settings;
use polder_mem::testing::{Child, Ended};

use super::acts::DEADLINE;
use super::task::Task;
use super::wire::Wire;
use crate::Failure;
use polder_cli::state_of;

/// Between two looks at what may have happened.
const POLL: Duration = Duration::from_millis(20);

/// The other machine, as the one that plays knows it.
pub(super) struct Remote {
    listener: TcpListener,
    control: Wire,
    started: u64,
}

/// A process that plays, on this machine or the other.
pub(super) enum Player {
    Here(Child),
    There { id: u64, pid: u32, remote: Rc<RefCell<Remote>> },
}

impl Remote {
    /// Waits until another machine joins.
    pub(super) fn listen(address: &str) -> Result<Self, Failure> {
        let listener =
            TcpListener::bind(address).map_err(|error| Failure(format!("--listen {address}: {error}")))?;
        println!("run on the other machine: polder-dev soak --pool DEVICE --join {address}");
        let control = joined(&listener)?;
        Ok(Self { listener, control, started: 0 })
    }

    /// Starts a process there, and returns its number, its process id and the conversation with it.
    pub(super) fn start(&mut self, task: &Task) -> Result<(u64, u32, Wire), Failure> {
        self.started += 1;
        let id = self.started;
        self.control.say(&format!("start {id} {task}"))?;
        let said = self.answer()?;
        let pid = said.strip_prefix("pid ").ok_or_else(|| Failure(format!("the other machine: {said}")))?;
        let mut wire = accepted(&self.listener)?;
        match wire.hear()? {
            Some(line) if line == format!("process {id}") => Ok((id, pid.parse()?, wire)),
            line => Err(Failure(format!("process {id} of the other machine said {line:?}"))),
        }
    }

    fn answer(&mut self) -> Result<String, Failure> {
        self.control.hear()?.ok_or_else(|| Failure("the other machine is gone".into()))
    }

    fn wait(&mut self, id: u64) -> Result<Ended, Failure> {
        self.control.say(&format!("wait {id}"))?;
        let said = self.answer()?;
        match said.split_once(' ') {
            Some(("exited", code)) => Ok(Ended::Exited(code.parse()?)),
            Some(("killed", signal)) => Ok(Ended::Killed(signal.parse()?)),
            _ => Err(Failure(format!("the other machine: {said}"))),
        }
    }

    /// Has the other machine tell when a process stands still, or has ended.
    pub(super) fn watch(&mut self, id: u64) -> Result<(), Failure> {
        self.control.say(&format!("watch {id}"))
    }

    /// Whether a process that is watched stands still, or has ended.
    pub(super) fn stands_still(&mut self) -> Result<bool, Failure> {
        match self.control.hear_soon(POLL)? {
            Some(Some(line)) if line == "over" => Ok(true),
            None => Ok(false),
            said => Err(Failure(format!("the other machine: {said:?}"))),
        }
    }

    /// Has the other machine's kernel restart at once, as when its power is cut.
    pub(super) fn cut(&mut self) -> Result<(), Failure> {
        self.control.say("cut")
    }

    /// Waits until the other machine has booted and joins again.
    pub(super) fn rejoin(&mut self) -> Result<(), Failure> {
        self.control = joined(&self.listener)?;
        Ok(())
    }
}

impl Player {
    pub(super) fn pid(&self) -> u32 {
        match self {
            Self::Here(child) => child.pid(),
            Self::There { pid, .. } => *pid,
        }
    }

    /// Waits until it ends.
    pub(super) fn wait(&mut self) -> Result<Ended, Failure> {
        match self {
            Self::Here(child) => Ok(child.wait()),
            Self::There { id, remote, .. } => remote.borrow_mut().wait(*id),
        }
    }

    /// The process, where it is on this machine: those that are stopped are.
    pub(super) fn here(&mut self) -> &mut Child {
        match self {
            Self::Here(child) => child,
            Self::There { .. } => unreachable!("processes are stopped on one machine alone"),
        }
    }
}

/// The next that joins. It has to boot before, so this waits for as long as that takes.
fn joined(listener: &TcpListener) -> Result<Wire, Failure> {
    loop {
        let mut wire = Wire::to_machine(listener.accept()?.0)?;
        // What a process of an earlier boot sent may still be on its way.
        if wire.hear()?.as_deref() == Some("joins") {
            return Ok(wire);
        }
    }
}

/// The connection of a process that was started a moment ago.
fn accepted(listener: &TcpListener) -> Result<Wire, Failure> {
    listener.set_nonblocking(true)?;
    let start = Instant::now();
    let accepted = loop {
        match listener.accept() {
            Ok((stream, _)) => break Ok(stream),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && start.elapsed() < DEADLINE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => break Err(error),
        }
    };
    listener.set_nonblocking(false)?;
    let stream = accepted?;
    stream.set_nonblocking(false)?;
    Wire::to_machine(stream)
}

/// Runs what the machine at `address` says, until it has said all.
pub(super) fn join(settings: &Settings, address: &str) -> Result<(), Failure> {
    let mut control = Wire::to_machine(connected(address)?)?;
    control.say("joins")?;
    let (mut children, mut watched) = (BTreeMap::new(), None);
    loop {
        let patience = if watched.is_some() { POLL } else { Duration::from_secs(1) };
        match control.hear_soon(patience)? {
            Some(None) => return Ok(()),
            Some(Some(line)) => obey(&line, settings, address, &mut control, &mut children, &mut watched)?,
            None => {}
        }
        if let Some(id) = watched
            && children.get_mut(&id).is_none_or(stands_still)
        {
            watched = None;
            control.say("over")?;
        }
    }
}

fn obey(
    line: &str,
    settings: &Settings,
    address: &str,
    control: &mut Wire,
    children: &mut BTreeMap<u64, Child>,
    watched: &mut Option<u64>,
) -> Result<(), Failure> {
    let unclear = || Failure(format!("this machine does not understand {line:?}"));
    let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
    match command {
        "start" => {
            let (id, task) = rest.split_once(' ').ok_or_else(unclear)?;
            let task = Task::parse(task).ok_or_else(unclear)?;
            let child = Child::fork_tied(|| {
                let wire = TcpStream::connect(address).map_err(Failure::from).and_then(Wire::to_machine);
                let mut wire = wire.unwrap_or_else(|failure| panic!("{address}: {failure}"));
                wire.say(&format!("process {id}")).unwrap_or_else(|failure| panic!("{address}: {failure}"));
                task.play(settings, &mut wire);
            });
            control.say(&format!("pid {}", child.pid()))?;
            children.insert(id.parse()?, child);
            Ok(())
        }
        "wait" => {
            let mut child = children.remove(&rest.parse()?).ok_or_else(unclear)?;
            control.say(&match child.wait() {
                Ended::Exited(code) => format!("exited {code}"),
                Ended::Killed(signal) => format!("killed {signal}"),
            })
        }
        "watch" => {
            *watched = Some(rest.parse()?);
            Ok(())
        }
        "cut" => Ok(std::fs::write("/proc/sysrq-trigger", "b")?),
        _ => Err(unclear()),
    }
}

/// Whether a process stands still, or has ended.
pub(super) fn stands_still(child: &mut Child) -> bool {
    matches!(state_of(child.pid()), Some('T' | 'Z') | None)
}

fn connected(address: &str) -> Result<TcpStream, Failure> {
    let start = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return Ok(stream),
            Err(error) if start.elapsed() > DEADLINE => {
                return Err(Failure(format!("--join {address}: {error}; has --listen been started there?")));
            }
            Err(_) => std::thread::sleep(POLL),
        }
    }
}
