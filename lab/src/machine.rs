//! The guest as a scenario needs it: file systems, cgroups, services, and the bytes that the kernel counts.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use polder_lab::check::Failed;
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Signal, kill_process};
use rustix::system::{RebootCommand, reboot};

const CGROUPS: &str = "/sys/fs/cgroup";
const PAGE: usize = 4096;
/// The device that both hosts have.
pub(crate) const DEVICE: &str = "/dev/dax0.0";

/// Mounts what the kernel offers, and turns on the controllers that the agent needs.
pub(crate) fn mount_all() {
    for (source, target, kind) in [
        ("proc", "/proc", "proc"),
        ("sysfs", "/sys", "sysfs"),
        ("devtmpfs", "/dev", "devtmpfs"),
        ("tmpfs", "/run", "tmpfs"),
        ("tmpfs", "/tmp", "tmpfs"),
        ("cgroup2", CGROUPS, "cgroup2"),
        ("tracefs", "/sys/kernel/tracing", "tracefs"),
    ] {
        drop(fs::create_dir_all(target));
        if let Err(error) = mount(source, target, kind, MountFlags::empty(), None) {
            println!("mount {target}: {error}");
        }
    }
    write(&format!("{CGROUPS}/cgroup.subtree_control"), "+cpuset +memory")
        .unwrap_or_else(|error| println!("{error}"));
}

/// Ends the guest.
pub(crate) fn power_off() -> ExitCode {
    drop(std::io::stdout().flush());
    let Err(error) = reboot(RebootCommand::PowerOff) else { return ExitCode::SUCCESS };
    println!("power off: {error}");
    ExitCode::FAILURE
}

/// A service of the guest: fills memory, says so, and goes on touching what is hot.
pub(crate) fn serve(cgroup: &str, bytes: &str, hot: &str) -> ExitCode {
    let parsed = (
        bytes.parse::<usize>(),
        hot.parse::<usize>(),
        write(&format!("{CGROUPS}{cgroup}/cgroup.procs"), "0"),
    );
    let (Ok(bytes), Ok(hot), Ok(())) = parsed else {
        eprintln!("service {cgroup} {bytes} {hot}: {parsed:?}");
        return ExitCode::FAILURE;
    };
    let mut memory = vec![1_u8; bytes];
    println!("ready");
    loop {
        for page in memory[..hot].chunks_mut(PAGE) {
            page[0] = page[0].wrapping_add(1);
        }
        std::hint::black_box(&memory);
        // The pace of its requests: the guest's two emulated cores are shared with the agent.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A service that runs in a cgroup of its own; it ends with this value.
pub(crate) struct Service {
    pub(crate) cgroup: &'static str,
    child: Child,
}

impl Service {
    /// Starts one on these CPUs, and returns once its memory is filled.
    pub(crate) fn start_on(
        cpus: &str,
        cgroup: &'static str,
        mib: usize,
        hot_mib: usize,
    ) -> Result<Self, Failed> {
        fs::create_dir_all(format!("{CGROUPS}{cgroup}")).map_err(|error| format!("{cgroup}: {error}"))?;
        write(&format!("{CGROUPS}{cgroup}/cpuset.cpus"), cpus)?;
        Self::start(cgroup, mib, hot_mib)
    }

    /// Starts one, and returns once its memory is filled.
    pub(crate) fn start(cgroup: &'static str, mib: usize, hot_mib: usize) -> Result<Self, Failed> {
        fs::create_dir_all(format!("{CGROUPS}{cgroup}")).map_err(|error| format!("{cgroup}: {error}"))?;
        let size = |mib: usize| (mib << 20).to_string();
        let mut command = Command::new("/init");
        command.args(["service", cgroup, &size(mib), &size(hot_mib)]).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("service {cgroup}: {error}"))?;
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("its output is a pipe"));
        out.read_line(&mut line).map_err(|error| format!("service {cgroup}: {error}"))?;
        match line.trim() {
            "ready" => Ok(Self { cgroup, child }),
            other => Err(format!("service {cgroup} said {other:?} in place of ready")),
        }
    }

    /// The process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Bytes of user memory on nodes 0 and 1.
    pub(crate) fn bytes(&self) -> Result<[u64; 2], Failed> {
        let nodes = self.nodes()?;
        Ok(["N0", "N1"].map(|node| nodes.get(node).copied().unwrap_or(0)))
    }

    /// Bytes of user memory on each node, by names such as `N0`.
    pub(crate) fn nodes(&self) -> Result<BTreeMap<String, u64>, Failed> {
        // Linux 6.12 sums up then what each CPU has counted; without that the last pages may be missing for 2 s.
        read(&format!("{CGROUPS}{}/cpu.stat", self.cgroup))?;
        let text = read(&format!("{CGROUPS}{}/memory.numa_stat", self.cgroup))?;
        let mut bytes: BTreeMap<String, u64> = BTreeMap::new();
        for line in text.lines().filter(|line| line.starts_with("anon ") || line.starts_with("file ")) {
            for field in line.split_ascii_whitespace().skip(1) {
                let (node, count) = field.split_once('=').ok_or_else(|| format!("numa_stat: {field}"))?;
                *bytes.entry(node.to_owned()).or_default() +=
                    count.parse::<u64>().map_err(|error| format!("numa_stat: {field}: {error}"))?;
            }
        }
        Ok(bytes)
    }

    /// Prints what the kernel counts of its memory on `node`, such as `N1=`, and which of its mappings have pages there.
    pub(crate) fn show_places(&self, node: &str) -> Result<(), Failed> {
        let counted = format!("{CGROUPS}{}/memory.numa_stat", self.cgroup);
        for file in [counted, format!("/proc/{}/numa_maps", self.pid())] {
            println!("{file}:");
            let none = format!("{node}0");
            let is_there = |line: &&str| {
                line.split_ascii_whitespace().any(|field| field.starts_with(node) && field != none)
            };
            read(&file)?.lines().filter(is_there).for_each(|line| println!("  {line}"));
        }
        Ok(())
    }

    /// Sends the process a signal.
    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Failed> {
        kill_process(Pid::from_child(&self.child), signal)
            .map_err(|error| format!("{}: kill: {error}", self.cgroup))
    }

    /// Asks the kernel to take so many MiB from the service, as pressure on the host would.
    pub(crate) fn reclaim(&self, mib: u64) -> Result<(), Failed> {
        match write(&format!("{CGROUPS}{}/memory.reclaim", self.cgroup), &format!("{mib}M")) {
            // EAGAIN: the kernel took less.
            Err(error) if !error.contains("os error 11") => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Every setting that the agent may change, with its value; of `cpuset.mems` the effective nodes, because the kernel
/// refuses to empty it again while a cgroup has processes.
pub(crate) fn settings(services: &[&Service]) -> Result<Vec<(String, String)>, Failed> {
    let mut paths = vec![
        polder_linux::DEMOTION.to_owned(),
        polder_linux::BALANCING.to_owned(),
        polder_linux::PROMOTION_LIMIT.to_owned(),
    ];
    // Kernels before 6.9 have no weights, and kernels before 6.16 do not derive them.
    for name in ["node0", "node1", "auto"] {
        let path = format!("{}/{name}", polder_linux::INTERLEAVE);
        paths.extend(Path::new(&path).exists().then_some(path));
    }
    paths.extend(services.iter().map(|service| format!("{CGROUPS}{}/cpuset.mems.effective", service.cgroup)));
    paths.into_iter().map(|path| read(&path).map(|text| (path, text))).collect()
}

/// The text of a file.
pub(crate) fn read(path: &str) -> Result<String, Failed> {
    fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

/// Writes a file in one call.
pub(crate) fn write(path: &str, text: &str) -> Result<(), Failed> {
    let opened = fs::OpenOptions::new().write(true).open(Path::new(path));
    opened.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| format!("{path}: {error}"))
}

/// Runs a tool that must end well.
pub(crate) fn tool(words: &str) -> Result<(), Failed> {
    let mut list = words.split(' ');
    let output = Command::new(list.next().unwrap_or_default()).args(list).output();
    let output = output.map_err(|error| format!("{words}: {error}"))?;
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{words}: {}\n{said}", output.status);
    if output.status.success() { Ok(()) } else { Err(format!("{words}: {}: {said}", output.status)) }
}
