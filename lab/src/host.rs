//! A guest as one host of a rack: it finds the memory that both share, joins their network, and does what is said on its second
//! serial line.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use polder_lab::check::Failed;
use polder_lab::wire::{Order, Report};
use rustix::mount::{MountFlags, mount};
use rustix::system::sethostname;
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use crate::machine::{DEVICE, read, tool};
use crate::slow::{load_drivers, make_region};

/// The name of the CXL region, in labels that all hosts see.
const UUID: &str = "6a0c1f6e-8f0a-4a43-9a52-3f1d0e0c27da";
/// Where a host starts what others ask it to: the port of rsh.
const PORT: u16 = 514;

/// Serves until the guest is ended.
pub(crate) fn serve(number: u16) -> Result<(), Failed> {
    let line = OpenOptions::new().read(true).write(true).open("/dev/ttyS1");
    let line = line.map_err(|error| format!("/dev/ttyS1: {error}"))?;
    let mut raw = tcgetattr(&line).map_err(|error| format!("/dev/ttyS1: {error}"))?;
    raw.make_raw();
    tcsetattr(&line, OptionalActions::Now, &raw).map_err(|error| format!("/dev/ttyS1: {error}"))?;
    let desk = Desk { line: Arc::new(Mutex::new(line.try_clone().map_err(text)?)) };
    match set_up(number) {
        Ok(ready) => desk.say(&ready),
        Err(why) => desk.say(&Report::Broken { why }),
    }
    let processes = Arc::new(Mutex::new(BTreeMap::new()));
    for order in BufReader::new(line).lines() {
        match serde_json::from_str(&order.map_err(text)?).map_err(text)? {
            Order::Run { id, words, env } => desk.run(id, &words, &env, &processes),
            Order::Kill { id } => {
                if let Some(process) = locked(&processes).get_mut(&id) {
                    // It may have ended.
                    drop(Child::kill(process));
                }
            }
        }
    }
    Err("/dev/ttyS1 ended".to_owned())
}

/// Modules, network and device.
fn set_up(number: u16) -> Result<Report, Failed> {
    drop(fs::create_dir_all("/dev/shm"));
    mount("tmpfs", "/dev/shm", "tmpfs", MountFlags::empty(), None).map_err(text)?;
    load_drivers()?;
    sethostname(format!("rack{number}").as_bytes()).map_err(text)?;
    fs::create_dir_all("/etc").map_err(text)?;
    fs::write("/etc/hosts", "127.0.0.1 localhost\n10.0.0.1 rack0\n10.0.0.2 rack1\n").map_err(text)?;
    fs::write("/etc/nsswitch.conf", "hosts: files\n").map_err(text)?;
    let address = format!("10.0.0.{}/24", number + 1);
    for words in ["link set lo up", &format!("addr add {address} dev eth0"), "link set eth0 up"] {
        tool(&format!("/bin/ip {words}"))?;
    }
    let listener = TcpListener::bind(("0.0.0.0", PORT)).map_err(text)?;
    std::thread::spawn(move || listener.incoming().flatten().for_each(start_for));
    let is_cxl = std::env::var("device").is_ok_and(|device| device == "cxl");
    if is_cxl {
        make_region("pmem", Some(UUID))?;
    }
    if number == 0 && !await_device(Duration::from_secs(1)) {
        make_device(is_cxl)?;
    }
    if !await_device(Duration::from_secs(30)) {
        return Err(format!("there is no {DEVICE}"));
    }
    let bytes = read("/sys/bus/dax/devices/dax0.0/size")?.trim().parse().map_err(text)?;
    let kernel = read("/proc/sys/kernel/osrelease")?.trim().to_owned();
    let boot = read("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    Ok(Report::Ready { kernel, boot, bytes })
}

/// Makes the namespace a dax device, once for all hosts. The kernel's pages for it are in each host's own memory (`-M mem`): in the
/// shared memory (`-M dev`) each host would overwrite those of the other.
fn make_device(is_cxl: bool) -> Result<(), Failed> {
    // What an nvdimm without labels holds from the beginning is one namespace, which is made anew.
    let existing = if is_cxl { "" } else { " -f -e namespace0.0" };
    tool(&format!("/bin/ndctl create-namespace{existing} -m devdax -M mem"))
}

/// Whether the device is there within `patience`; the kernel makes it when it has looked at the namespace.
fn await_device(patience: Duration) -> bool {
    let start = std::time::Instant::now();
    while !Path::new(DEVICE).exists() {
        if start.elapsed() > patience {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// The program that booted this host, at the other end of the serial line.
#[derive(Clone)]
struct Desk {
    line: Arc<Mutex<File>>,
}

type Processes = Arc<Mutex<BTreeMap<u64, Child>>>;

impl Desk {
    fn say(&self, report: &Report) {
        let words = serde_json::to_string(report).expect("a report is JSON") + "\n";
        if let Err(error) = locked(&self.line).write_all(words.as_bytes()) {
            println!("/dev/ttyS1: {error}");
        }
    }

    /// Starts a process; its lines and its end are told as they come.
    fn run(&self, id: u64, words: &[String], env: &BTreeMap<String, String>, processes: &Processes) {
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .envs(env)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                self.say(&Report::Line { id, text: format!("{}: {error}", words[0]) });
                return self.say(&Report::Ended { id, status: None });
            }
        };
        let [out, err]: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().expect("its output is a pipe")),
            Box::new(child.stderr.take().expect("its errors are a pipe")),
        ];
        locked(processes).insert(id, child);
        let (desk, processes) = (self.clone(), Arc::clone(processes));
        std::thread::spawn(move || {
            std::thread::scope(|scope| {
                for stream in [out, err] {
                    scope.spawn(|| {
                        for text in BufReader::new(stream).lines().map_while(Result::ok) {
                            desk.say(&Report::Line { id, text });
                        }
                    });
                }
            });
            let child = locked(&processes).remove(&id);
            let status = child.and_then(|mut child| child.wait().ok()).and_then(|status| status.code());
            desk.say(&Report::Ended { id, status });
        });
    }
}

/// Runs what another host asks for: its first line, in a shell whose output goes back.
fn start_for(stream: TcpStream) {
    std::thread::spawn(move || -> io::Result<()> {
        let mut line = String::new();
        BufReader::new(stream.try_clone()?).read_line(&mut line)?;
        let out = || stream.try_clone().map(|stream| Stdio::from(OwnedFd::from(stream)));
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(line).stdin(Stdio::null()).stdout(out()?).stderr(out()?);
        shell.status().map(drop)
    });
}

/// `rsh [-x] HOST WORDS...`: runs a command on another host, as launchers of MPI want it from ssh.
pub(crate) fn rsh(words: &[&str]) -> ExitCode {
    let mut words = words.iter().filter(|word| !word.starts_with("-x"));
    let host = words.next().copied().unwrap_or_default();
    let line = words.copied().collect::<Vec<_>>().join(" ") + "\n";
    let done = TcpStream::connect((host, PORT)).and_then(|mut stream| {
        stream.write_all(line.as_bytes())?;
        io::copy(&mut stream, &mut io::stdout())
    });
    match done {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rsh {host}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn text(error: impl std::fmt::Display) -> Failed {
    error.to_string()
}
