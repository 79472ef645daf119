//! Slow memory that a guest brings online by itself: a CXL Type-3 region, or an nvdimm's dax device. An operator does it with cxl-cli and daxctl.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use polder_lab::check::Failed;
use rustix::system::finit_module;

use crate::machine::{DEVICE, read, tool, write};

/// What the kernel says of CXL.
pub(crate) const CXL: &str = "/sys/bus/cxl/devices";
/// Bytes of the CXL region.
pub(crate) const REGION_BYTES: u64 = 256 << 20;
/// The kernel takes some seconds to bring devices up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Loads the drivers of the initrd.
pub(crate) fn load_drivers() -> Result<(), Failed> {
    let mut modules: Vec<_> =
        fs::read_dir("/drivers").map_err(text)?.flatten().map(|entry| entry.path()).collect();
    // Their names begin with their place in the order of loading.
    modules.sort();
    for module in modules {
        let file = fs::File::open(&module).map_err(text)?;
        finit_module(&file, c"", 0).map_err(|error| format!("{}: {error}", module.display()))?;
    }
    Ok(())
}

/// Has the host's CXL decoders show the memory of a device, as each host must after its boot: what `cxl create-region -t KIND -m mem0` does.
/// Persistent regions have a name that all hosts give, because the labels on the device go by it.
pub(crate) fn make_region(kind: &str, uuid: Option<&str>) -> Result<String, Failed> {
    let root = format!("{CXL}/decoder0.0");
    let is_of_device = |path: &PathBuf| {
        let name = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"decoder"));
        name && path.canonicalize().is_ok_and(|path| path.to_string_lossy().contains("/endpoint"))
    };
    let find = || fs::read_dir(CXL).ok()?.flatten().map(|entry| entry.path()).filter(is_of_device).min();
    let decoder = await_some(find).ok_or_else(|| format!("{CXL} has no decoder of a device"))?;
    let name = decoder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let region = read(&format!("{root}/create_{kind}_region"))?.trim().to_owned();
    write(&format!("{root}/create_{kind}_region"), &region)?;
    let granularity = read(&format!("{root}/interleave_granularity"))?;
    let set = |key: &str, value: &str| write(&format!("{CXL}/{region}/{key}"), value);
    if let Some(uuid) = uuid {
        // With the end of the line, which the kernel counts.
        set("uuid", &format!("{uuid}\n"))?;
    }
    set("interleave_granularity", granularity.trim())?;
    set("interleave_ways", "1")?;
    set("size", &REGION_BYTES.to_string())?;
    write(&format!("{}/mode", decoder.display()), kind)?;
    write(&format!("{}/dpa_size", decoder.display()), &REGION_BYTES.to_string())?;
    set("target0", &name)?;
    set("commit", "1")?;
    write("/sys/bus/cxl/drivers/cxl_region/bind", &region)?;
    Ok(region)
}

/// Brings the slow memory of this guest online as system RAM: `cxl` is a volatile Type-3 device, `nvdimm` an nvdimm.
pub(crate) fn bring(kind: &str) -> Result<(), Failed> {
    println!("lab: kernel {}", read("/proc/sys/kernel/osrelease")?.trim());
    load_drivers()?;
    write("/sys/devices/system/memory/auto_online_blocks", "online_movable")?;
    match kind {
        // Its region becomes system RAM as the driver finds it.
        "cxl" => drop(make_region("ram", None)?),
        "nvdimm" => {
            tool("/bin/ndctl create-namespace -f -e namespace0.0 -m devdax -M mem")?;
            await_some(|| Path::new(DEVICE).exists().then_some(()))
                .ok_or_else(|| format!("there is no {DEVICE}"))?;
            // What daxctl reconfigure-device --mode=system-ram does.
            write("/sys/bus/dax/drivers/device_dax/unbind", "dax0.0")?;
            write("/sys/bus/dax/drivers/kmem/new_id", "dax0.0")?;
        }
        other => return Err(format!("slow={other} is none of cxl and nvdimm")),
    }
    let is_there = || (read("/sys/devices/system/node/has_memory").ok()?.trim() == "0-1").then_some(());
    await_some(is_there).ok_or_else(|| {
        let names = |folder: &str| {
            let entries = fs::read_dir(folder)
                .map(|entries| entries.flatten().map(|entry| entry.file_name()).collect());
            entries.unwrap_or_else(|_| Vec::new())
        };
        let nodes = read("/sys/devices/system/node/has_memory").unwrap_or_default();
        let dax = names("/sys/bus/dax/devices");
        format!("no second node came online: memory on nodes {}, {:?}, {dax:?}", nodes.trim(), names(CXL))
    })?;
    println!("slow memory: {kind} through dax_kmem, as node 1");
    Ok(())
}

/// What `found` finds, once it does.
pub(crate) fn await_some<T>(mut found: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        match found() {
            None if start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(20)),
            other => return other,
        }
    }
}

fn text(error: impl std::fmt::Display) -> Failed {
    error.to_string()
}
