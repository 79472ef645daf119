//! The kernels of a rack, each a QEMU process, and the processes that run under them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use polder_lab::check::Failed;
use polder_lab::wire::{Order, Report};
use tempfile::TempDir;

use crate::{Arguments, Device};

/// Bytes of a CXL device's labels.
const LABEL_BYTES: u64 = 1 << 20;
/// A guest that says nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// What the kernels share, and what each boots from.
pub(crate) struct Rack {
    device: Device,
    kernel: PathBuf,
    initrd: PathBuf,
    logs: PathBuf,
    folder: TempDir,
    guard: Guard,
}

/// Removes the folder and ends the kernels when this process has ended, also by a signal: a process of its own, out of reach of Ctrl-C, that
/// waits until its maker is gone.
struct Guard(Child);

impl Guard {
    fn over(folder: &Path) -> Result<Self, Failed> {
        let mut guard = Command::new("sh");
        guard.args(["-c", "cat > /dev/null; rm -rf -- \"$1\"; kill -s KILL -- \"-$$\"", "sh"]).arg(folder);
        let guard = guard.stdin(Stdio::piped()).process_group(0).spawn();
        guard.map(Self).map_err(|error| format!("sh: {error}"))
    }

    /// The process group that it ends.
    fn group(&self) -> i32 {
        i32::try_from(self.0.id()).expect("Linux has ids below 2^22")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        drop(self.0.wait());
    }
}

impl Device {
    /// Bytes of the shared memory; the dax device is smaller by what the kernel keeps for its own note. A CXL region is a multiple of
    /// 256 MiB.
    const fn bytes(self) -> u64 {
        match self {
            Self::Nvdimm => 64 << 20,
            Self::Cxl => 256 << 20,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Nvdimm => "nvdimm",
            Self::Cxl => "cxl",
        }
    }

    /// How QEMU gives it to a guest. A root port alone loses writes under some kernels, so that there are two.
    fn arguments(self, memory: &str, labels: &str) -> Vec<String> {
        let shared = |id: &str, path: &str, bytes: u64| {
            format!("memory-backend-file,id={id},share=on,mem-path={path},size={bytes},align=2M")
        };
        let memory = shared("memory", memory, self.bytes());
        let words = match self {
            Self::Nvdimm => {
                "-M q35,nvdimm=on -cpu max -m 512M,slots=1,maxmem=2G -device nvdimm,id=pool,memdev=memory"
            }
            Self::Cxl => {
                "-M q35,cxl=on -cpu max,hypervisor=off -m 512M -device pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1 \
                 -device cxl-rp,port=0,bus=cxl.1,id=rp0,chassis=0,slot=2 \
                 -device cxl-rp,port=1,bus=cxl.1,id=rp1,chassis=0,slot=3 \
                 -device cxl-type3,bus=rp0,memdev=memory,lsa=labels,id=pool,sn=0x1 \
                 -M cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G"
            }
        };
        let mut list = vec!["-object".to_owned(), memory];
        if self == Self::Cxl {
            list.extend(["-object".to_owned(), shared("labels", labels, LABEL_BYTES)]);
        }
        list.extend(words.split_whitespace().map(str::to_owned));
        list
    }
}

impl Rack {
    pub(crate) fn new(arguments: &Arguments) -> Result<Self, Failed> {
        let folder = tempfile::Builder::new().prefix("polder-rack-").tempdir_in("/dev/shm").map_err(text)?;
        let Arguments { device, kernel, initrd, logs, .. } = arguments;
        for (name, bytes) in [("memory", device.bytes()), ("labels", LABEL_BYTES)] {
            let file = File::create(folder.path().join(name)).map_err(text)?;
            file.set_len(bytes).map_err(text)?;
        }
        let [kernel, initrd, logs] = [kernel, initrd, logs].map(Clone::clone);
        let guard = Guard::over(folder.path())?;
        Ok(Self { device: *device, kernel, initrd, logs, folder, guard })
    }

    /// Boots host `number`, and waits until it has the device.
    pub(crate) fn boot(&self, number: u16) -> Result<Host, Failed> {
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        let net = |number: u16| path(&format!("net{number}"));
        // A socket that an earlier boot has left.
        drop(std::fs::remove_file(net(number)));
        let (here, there) = (net(number), net(1 - number));
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args("-accel tcg -smp 1 -nodefaults -display none -no-reboot".split(' '));
        qemu.args(self.device.arguments(&path("memory"), &path("labels")));
        let device = self.device.name();
        let log = self.logs.join(format!("{device}{number}.log"));
        qemu.args(["-chardev", &format!("file,id=log,path={},append=on", log.display())]);
        qemu.args("-serial chardev:log -chardev stdio,id=wire,signal=off -serial chardev:wire".split(' '));
        qemu.args([
            "-netdev",
            &format!("dgram,id=net,local.type=unix,local.path={here},remote.type=unix,remote.path={there}"),
        ]);
        qemu.args(["-device", &format!("e1000,bus=pcie.0,netdev=net,mac=52:54:00:00:00:0{number}")]);
        qemu.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&self.initrd);
        qemu.args([
            "-append",
            &format!(
                "console=ttyS0 panic=-1 quiet pcie_ports=compat no_timer_check rack={number} device={device}"
            ),
        ]);
        let errors = File::create(self.logs.join(format!("{device}{number}.qemu"))).map_err(text)?;
        let qemu = qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let qemu = qemu.process_group(self.guard.group());
        let mut child = qemu.spawn().map_err(|error| format!("qemu-system-x86_64: {error}"))?;
        let orders = child.stdin.take().expect("its input is a pipe");
        let reports = child.stdout.take().expect("its output is a pipe");
        let listeners = Listeners::default();
        let (say, ready) = channel();
        let ears = listeners.clone();
        std::thread::spawn(move || ears.listen(reports, &say));
        let mut host = Host { number, child, orders, listeners, next: 0, boot: String::new(), bytes: 0 };
        match received(&ready, number, "booting", PATIENCE)? {
            Report::Ready { kernel, boot, bytes } => {
                println!("host {number}: kernel {kernel}, /dev/dax0.0 of {} MiB", bytes >> 20);
                (host.boot, host.bytes) = (boot, bytes);
                Ok(host)
            }
            other => Err(format!("host {number}: {other:?}; its log is {}", log.display())),
        }
    }
}

/// By the number of a process, where its reports go.
#[derive(Clone, Default)]
struct Listeners(Arc<Mutex<BTreeMap<u64, Sender<Report>>>>);

impl Listeners {
    fn add(&self, id: u64, listener: Sender<Report>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id, listener);
    }

    /// Hands out what the host says until it is off. Then all who listen are told by the end of their channel.
    fn listen(&self, reports: ChildStdout, say: &Sender<Report>) {
        for line in BufReader::new(reports).lines().map_while(Result::ok) {
            let report: Report = match serde_json::from_str(line.trim()) {
                Ok(report) => report,
                Err(error) => Report::Broken { why: format!("it said {line:?}: {error}") },
            };
            let mut listeners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody may want to know.
            match report {
                Report::Line { id, .. } => drop(listeners.get(&id).map(|listener| listener.send(report))),
                Report::Ended { id, .. } => drop(listeners.remove(&id).map(|listener| listener.send(report))),
                Report::Ready { .. } | Report::Broken { .. } => drop(say.send(report)),
            }
        }
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// A kernel that runs. Dropping it kills it.
pub(crate) struct Host {
    number: u16,
    child: Child,
    orders: ChildStdin,
    listeners: Listeners,
    next: u64,
    /// Its kernel's boot id.
    pub(crate) boot: String,
    /// Bytes of its device.
    pub(crate) bytes: u64,
}

/// How a process ended, and what it had printed.
pub(crate) struct Ended {
    pub(crate) status: Option<i32>,
    pub(crate) said: String,
}

impl Ended {
    pub(crate) fn is_good(&self) -> bool {
        self.status == Some(0)
    }

    /// That it ended well.
    pub(crate) fn good(self) -> Result<String, Failed> {
        match self.is_good() {
            true => Ok(self.said),
            false => Err(format!("it ended with {:?} and said: {}", self.status, self.said)),
        }
    }
}

impl Host {
    /// Starts a process. `words` are separated by spaces.
    pub(crate) fn start(&mut self, words: &str, env: &[(&str, &str)]) -> Result<Process, Failed> {
        self.next += 1;
        let (listener, reports) = channel();
        self.listeners.add(self.next, listener);
        let env = env.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let list = words.split(' ').map(str::to_owned).collect();
        self.order(&Order::Run { id: self.next, words: list, env })?;
        Ok(Process {
            id: self.next,
            host: self.number,
            words: words.to_owned(),
            reports,
            said: String::new(),
        })
    }

    /// Runs a process to its end.
    pub(crate) fn run(&mut self, words: &str, env: &[(&str, &str)]) -> Result<Ended, Failed> {
        self.start(words, env)?.end()
    }

    /// Kills a process, and waits until it has ended.
    pub(crate) fn kill(&mut self, process: Process) -> Result<Ended, Failed> {
        self.order(&Order::Kill { id: process.id })?;
        process.end()
    }

    /// Cuts its power.
    pub(crate) fn cut(&mut self) -> Result<(), Failed> {
        self.child.kill().map_err(text)?;
        self.child.wait().map(drop).map_err(text)
    }

    /// Whether its power is off, or goes off now: the kernel itself may have gone down.
    pub(crate) fn is_off(&mut self) -> Result<bool, Failed> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            if self.child.try_wait().map_err(text)?.is_some() {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(false)
    }

    fn order(&mut self, order: &Order) -> Result<(), Failed> {
        let line = serde_json::to_string(order).expect("an order is JSON") + "\n";
        self.orders.write_all(line.as_bytes()).map_err(|error| format!("host {}: {error}", self.number))
    }
}

impl Drop for Host {
    /// As a host whose power is cut.
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A process of a host.
pub(crate) struct Process {
    id: u64,
    host: u16,
    words: String,
    reports: Receiver<Report>,
    said: String,
}

impl Process {
    /// Waits until it prints a line with `words` in it.
    pub(crate) fn await_line(&mut self, words: &str) -> Result<(), Failed> {
        loop {
            match received(&self.reports, self.host, &self.words, PATIENCE)? {
                Report::Line { text, .. } => {
                    self.said += &format!("{text}\n");
                    if text.contains(words) {
                        return Ok(());
                    }
                }
                other => {
                    return Err(format!(
                        "{}, before it said {words:?}: {other:?}; {}",
                        self.words, self.said
                    ));
                }
            }
        }
    }

    /// Waits until it has ended.
    pub(crate) fn end(self) -> Result<Ended, Failed> {
        self.end_within(PATIENCE)
    }

    /// Waits until it has ended, as one that may say nothing for `patience`.
    pub(crate) fn end_within(mut self, patience: Duration) -> Result<Ended, Failed> {
        loop {
            match received(&self.reports, self.host, &self.words, patience)? {
                Report::Line { text, .. } => self.said += &format!("{text}\n"),
                Report::Ended { status, .. } => return Ok(Ended { status, said: self.said }),
                other => return Err(format!("{}: {other:?}", self.words)),
            }
        }
    }
}

fn received(reports: &Receiver<Report>, host: u16, what: &str, patience: Duration) -> Result<Report, Failed> {
    reports.recv_timeout(patience).map_err(|error| match error {
        RecvTimeoutError::Timeout => {
            format!("host {host}, {what}: said nothing for {} s", patience.as_secs())
        }
        RecvTimeoutError::Disconnected => format!("host {host}, {what}: it is off"),
    })
}

fn text(error: impl std::fmt::Display) -> Failed {
    error.to_string()
}
