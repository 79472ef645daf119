//! Health of CXL memory: what devices report of themselves, and the cgroups whose pages lie on bad places.
//!
//! The kernel tells of poison and of a device's events by trace events alone. A tracing instance of our own takes them, so that no other tracer
//! is disturbed. A write to a device's `trigger_poison_list` has its whole list told.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{Cgroup, Kernel, KernelError, Settings, nodes, page_bytes};

/// What the kernel knows of CXL.
pub(crate) const DEVICES: &str = "/sys/bus/cxl/devices";
/// Trace events of CXL devices.
pub(crate) const EVENTS: &str = "/sys/kernel/tracing/events/cxl";
/// The cgroup of each page frame, as an inode.
pub(crate) const PAGE_CGROUPS: &str = "/proc/kpagecgroup";
/// The tracing instance that takes events.
const INSTANCE: &str = "/sys/kernel/tracing/instances/polder";
/// Bytes of memory that an event without a length is about: a line.
const LINE: u64 = 64;
/// From one look at the poison lists to the next.
const SCAN_MS: u64 = 60_000;
/// Page frames that are looked up for one place.
const MOST_PAGES: u64 = 1 << 18;

/// A place in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CxlPlace {
    /// Its address on the device.
    pub dpa: u64,
    /// Bytes from there on.
    pub bytes: u64,
    /// Its address on the host; [`None`] where no region has it, or the kernel does not say.
    pub hpa: Option<u64>,
}

/// How bad an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CxlKind {
    /// A place is on the device's poison list.
    Poison,
    /// Poison of a place was cleared.
    Cleared,
    /// A place could not be read or written correctly.
    Uncorrectable,
    /// The device as a whole is not well.
    Device,
    /// Worth counting.
    Note,
}

/// What a device reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CxlEvent {
    /// The device, such as `mem0`.
    pub device: String,
    /// How bad it is.
    pub kind: CxlKind,
    /// Where, if it is about a place.
    pub place: Option<CxlPlace>,
    /// What it is, in words.
    pub what: String,
}

/// What one look at the devices found.
#[derive(Debug, Default)]
pub struct CxlNews {
    /// Events, the oldest first.
    pub events: Vec<CxlEvent>,
    /// Devices whose whole poison list is among the events.
    pub listed: BTreeSet<String>,
    /// What could not be read or understood.
    pub failures: Vec<KernelError>,
}

/// Takes the events of the host's CXL memory devices.
#[derive(Debug)]
pub struct CxlWatch {
    next_scan_ms: u64,
    /// Devices that have no poison list to ask for.
    without_list: BTreeSet<String>,
}

impl CxlWatch {
    /// Makes the tracing instance, which is removed as settings are restored; [`None`] where the host has no CXL memory device.
    ///
    /// # Errors
    /// [`KernelError::Missing`] with what is lacking; otherwise as the kernel refuses.
    pub fn start<K: Kernel>(settings: &mut Settings<K>) -> Result<Option<Self>, KernelError> {
        if devices(settings.kernel()).is_empty() {
            return Ok(None);
        }
        if settings.is_dry() {
            return settings.make(INSTANCE).map(|()| None);
        }
        let outcome = settings.make(INSTANCE).and_then(|()| set_up(settings.kernel()));
        if let Err(error) = outcome {
            // The instance alone; what else was changed stays.
            drop(settings.restore_all_but(|path| path != INSTANCE));
            return Err(match error.is_gone() {
                true => KernelError::Missing(format!(
                    "Linux {} has no {EVENTS}: it needs 6.3 or later, tracefs at /sys/kernel/tracing, and the driver cxl_core",
                    nodes::release(settings.kernel())?
                )),
                false => error,
            });
        }
        Ok(Some(Self { next_scan_ms: 0, without_list: BTreeSet::new() }))
    }

    /// The folder that [`CxlWatch::start`] makes.
    #[must_use]
    pub const fn path() -> &'static str {
        INSTANCE
    }

    /// Has the poison lists told with the next look.
    pub const fn scan_next(&mut self) {
        self.next_scan_ms = 0;
    }

    /// What devices reported since the last look; each minute with the poison lists. `now_ms` is the time in ms since 1970.
    pub fn look(&mut self, kernel: &impl Kernel, now_ms: u64) -> CxlNews {
        let mut news = CxlNews::default();
        // A clock that was set back leaves the next scan further away than one can be.
        if !(self.next_scan_ms.saturating_sub(SCAN_MS)..self.next_scan_ms).contains(&now_ms) {
            self.next_scan_ms = now_ms + SCAN_MS;
            for device in devices(kernel) {
                match kernel.write(&format!("{DEVICES}/{device}/trigger_poison_list"), "1") {
                    Ok(()) => {
                        self.without_list.remove(&device);
                        news.listed.insert(device);
                    }
                    Err(error) if error.is_gone() => {
                        self.without_list.insert(device);
                    }
                    Err(error) => news.failures.push(error),
                }
            }
        }
        match kernel.drain(&format!("{INSTANCE}/trace_pipe")) {
            Ok(text) => {
                for line in text.lines() {
                    match CxlEvent::parse(line) {
                        Ok(Some(event)) => news.events.push(event),
                        Ok(None) => {}
                        Err(error) => news.failures.push(error),
                    }
                }
            }
            Err(error) => news.failures.push(error),
        }
        // A list with a gap in it proves nothing of what it lacks.
        if !news.failures.is_empty() {
            news.listed.clear();
        }
        news
    }

    /// Devices that have no poison list to ask for: the kernel is before 6.4, or the device keeps none.
    #[must_use]
    pub const fn without_list(&self) -> &BTreeSet<String> {
        &self.without_list
    }
}

/// CXL memory devices, such as `mem0`.
#[must_use]
pub fn devices(kernel: &impl Kernel) -> Vec<String> {
    let is_memory = |name: &String| name.strip_prefix("mem").is_some_and(|id| id.parse::<u32>().is_ok());
    kernel.list(DEVICES).unwrap_or_default().into_iter().filter(is_memory).collect()
}

fn set_up(kernel: &impl Kernel) -> Result<(), KernelError> {
    // Without the task that an event came in, a line begins with the event's name, and no task's name can look like one.
    kernel.write(&format!("{INSTANCE}/options/context-info"), "0")?;
    kernel.write(&format!("{INSTANCE}/buffer_size_kb"), "64")?;
    kernel.write(&format!("{INSTANCE}/events/cxl/enable"), "1")
}

impl CxlEvent {
    /// Reads a line of a tracing instance without context; [`None`] for one that is no event of CXL.
    ///
    /// # Errors
    /// [`KernelError::Format`] for an event of CXL without a device, or poison without an address; and for events that were lost.
    fn parse(line: &str) -> Result<Option<Self>, KernelError> {
        let wrong = |expected| KernelError::Format {
            path: format!("{INSTANCE}/trace_pipe"),
            text: line.chars().take(200).collect(),
            expected,
        };
        if line.contains("[LOST ") {
            return Err(wrong("complete: the kernel dropped events"));
        }
        let Some((name, rest)) =
            line.trim_start().split_once(": ").filter(|(name, _)| name.starts_with("cxl_"))
        else {
            return Ok(None);
        };
        let fields = fields(rest);
        let field = |key: &str| fields.get(key).copied().unwrap_or_default();
        let device = fields.get("memdev").or_else(|| fields.get("device")).copied();
        let device = device.filter(|device| !device.is_empty()).ok_or(wrong("an event with memdev=…"))?;
        let hex = |key: &str| u64::from_str_radix(field(key).trim_start_matches("0x"), 16).ok();
        let place = hex("dpa").map(|dpa| CxlPlace {
            dpa,
            bytes: hex("dpa_length").filter(|bytes| *bytes > 0).unwrap_or(LINE),
            hpa: hex("hpa").filter(|hpa| *hpa != u64::MAX),
        });
        let is_grave = matches!(field("log"), "Failure" | "Fatal");
        let kind = match name {
            "cxl_poison" if place.is_none() => return Err(wrong("poison with dpa=0x…")),
            "cxl_poison" if field("trace_type") == "Clear" => CxlKind::Cleared,
            "cxl_poison" => CxlKind::Poison,
            "cxl_general_media" | "cxl_dram"
                if place.is_some() && field("descriptor").contains("UNCORRECTABLE_EVENT") =>
            {
                CxlKind::Uncorrectable
            }
            "cxl_memory_module"
                if !field("health_status").is_empty() || !matches!(field("media_status"), "" | "Normal") =>
            {
                CxlKind::Device
            }
            "cxl_aer_uncorrectable_error" | "cxl_port_aer_uncorrectable_error" => CxlKind::Device,
            _ if is_grave => CxlKind::Device,
            _ => CxlKind::Note,
        };
        let words = ["source", "descriptor", "type", "event_type", "health_status", "media_status"];
        let given = words.iter().map(|key| field(key)).filter(|given| !given.is_empty()).collect::<Vec<_>>();
        let name = name.trim_start_matches("cxl_").replace('_', " ");
        let what = if given.is_empty() { name } else { format!("{name} ({})", given.join(", ")) };
        Ok(Some(Self { device: device.to_owned(), kind, place, what }))
    }
}

/// Pairs such as `dpa=1000` and `type='ECC Error'`. Words between them are passed over.
fn fields(mut text: &str) -> BTreeMap<&str, &str> {
    let mut fields = BTreeMap::new();
    loop {
        text = text.trim_start();
        let Some(end) = text.find(|c: char| c == '=' || c.is_whitespace()) else { return fields };
        let (key, rest) = text.split_at(end);
        let Some(value) = rest.strip_prefix('=') else {
            text = rest;
            continue;
        };
        let (value, rest) = match value.strip_prefix('\'') {
            Some(quoted) => quoted.split_once('\'').unwrap_or((quoted, "")),
            None => value.split_at(value.find(char::is_whitespace).unwrap_or(value.len())),
        };
        fields.entry(key).or_insert(value);
        text = rest;
    }
}

/// Inodes of the cgroups that the pages of `place` belong to. A page that is free, or the kernel's own, belongs to none.
///
/// # Errors
/// As reading `/proc/kpagecgroup` fails, which takes root.
pub fn page_owners(kernel: &impl Kernel, place: &CxlPlace) -> Result<BTreeSet<u64>, KernelError> {
    let Some(hpa) = place.hpa else { return Ok(BTreeSet::new()) };
    let page = page_bytes(kernel);
    let first = hpa / page;
    let last = hpa.saturating_add(place.bytes.max(1) - 1) / page;
    let count = (last - first + 1).min(MOST_PAGES);
    let inodes = kernel.words(PAGE_CGROUPS, first, count)?;
    Ok(inodes.into_iter().filter(|inode| *inode != 0).collect())
}

/// Whether this kernel survives moving a poisoned page: from Linux 6.11 on it copies pages so that a machine check is an error of the move.
///
/// # Errors
/// As reading the release fails.
pub fn moves_poison(kernel: &impl Kernel) -> Result<bool, KernelError> {
    Ok(nodes::version(&nodes::release(kernel)?) >= (6, 11))
}

impl Cgroup {
    /// Inodes of the cgroup and of all below it.
    ///
    /// # Errors
    /// As the folder of the cgroup itself is read; one below that goes meanwhile is left out.
    pub fn inodes(&self, kernel: &impl Kernel) -> Result<BTreeSet<u64>, KernelError> {
        /// Cgroups below one service.
        const MOST: usize = 10_000;
        let mut inodes = BTreeSet::from([kernel.inode(&self.folder())?]);
        let mut folders = vec![self.folder()];
        while let Some(folder) = folders.pop() {
            for name in kernel.list(&folder).unwrap_or_default() {
                let below = format!("{folder}/{name}");
                // A file has no list of names.
                if inodes.len() < MOST && kernel.list(&below).is_ok() {
                    inodes.extend(kernel.inode(&below));
                    folders.push(below);
                }
            }
        }
        Ok(inodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POISON: &str = "cxl_poison: memdev=mem1 host=0000:0d:00.0 serial=2 trace_type=List region=region0 \
        region_uuid=00000000-0000-0000-0000-000000000000 hpa=0x110001000 dpa=0x1000 dpa_length=0x40 source=Injected flags= overflow_time=0";
    const MEDIA: &str = "cxl_general_media: memdev=mem0 host=0000:0d:00.0 serial=1 log=Failure : time=1 \
        uuid=fbcd0a77-c260-417f-85a9-088b1621eba6 len=128 flags='PERMANENT_CONDITION | MAINTENANCE_NEEDED' handle=1 related_handle=0 \
        maint_op_class=0 : dpa=2000 dpa_flags='VOLATILE' descriptor='UNCORRECTABLE_EVENT|THRESHOLD_EVENT' type='ECC Error' \
        transaction_type='Host Read' channel=3 rank=17 device=1 comp_id=00 00 validity_flags='CHANNEL' hpa=110002000 region=region0 \
        region_uuid=00000000-0000-0000-0000-000000000000";

    fn read(line: &str) -> CxlEvent {
        CxlEvent::parse(line).unwrap().expect(line)
    }

    #[test]
    fn poison_and_events_are_read_with_their_places() {
        let poison = read(POISON);
        assert_eq!((poison.device.as_str(), poison.kind), ("mem1", CxlKind::Poison));
        assert_eq!(poison.place, Some(CxlPlace { dpa: 0x1000, bytes: 64, hpa: Some(0x1_1000_1000) }));
        assert_eq!(poison.what, "poison (Injected)");
        let media = read(MEDIA);
        assert_eq!((media.device.as_str(), media.kind), ("mem0", CxlKind::Uncorrectable));
        assert_eq!(media.place, Some(CxlPlace { dpa: 0x2000, bytes: 64, hpa: Some(0x1_1000_2000) }));
        assert_eq!(media.what, "general media (UNCORRECTABLE_EVENT|THRESHOLD_EVENT, ECC Error)");
        let unmapped = POISON.replace("0x110001000", "0xffffffffffffffff");
        assert_eq!(read(&unmapped).place.unwrap().hpa, None, "no region has it");
        assert_eq!(read(&POISON.replace("=List", "=Clear")).kind, CxlKind::Cleared);
        let corrected = MEDIA.replace("UNCORRECTABLE_EVENT|", "");
        assert_eq!(read(&corrected).kind, CxlKind::Device, "the device logs it as a failure");
        assert_eq!(read(&corrected.replace("Failure", "Informational")).kind, CxlKind::Note);
    }

    #[test]
    fn a_device_that_is_not_well_is_told_from_one_that_counts() {
        let module = |health: &str, media: &str| {
            read(&format!(
                "cxl_memory_module: memdev=mem0 log=Warning : event_type='Health Status Change' health_status='{health}' \
                 media_status='{media}' as_life_used=Normal life_used=7 device_temp=30"
            ))
        };
        assert_eq!(module("", "Normal").kind, CxlKind::Note);
        assert_eq!(module("REPLACEMENT_NEEDED", "Normal").kind, CxlKind::Device);
        assert_eq!(module("", "All Data Lost").kind, CxlKind::Device);
        let aer = read(
            "cxl_aer_uncorrectable_error: memdev=mem0 host=x serial=1: status: 'Cache Data Parity Error' first_error: 'a=b'",
        );
        assert_eq!((aer.kind, aer.place), (CxlKind::Device, None));
        let port = read("cxl_port_aer_correctable_error: device=port1 host=x status='CRC Threshold Hit'");
        assert_eq!((port.device.as_str(), port.kind), ("port1", CxlKind::Note));
    }

    #[test]
    fn what_is_no_event_is_passed_over_and_a_broken_one_is_named() {
        for other in
            ["", "# tracer: nop", "sched_switch: prev_comm=x", "cxl_poison", "Cxl_poison: memdev=mem0"]
        {
            assert_eq!(CxlEvent::parse(other).unwrap(), None, "{other}");
        }
        for (broken, expected) in [
            ("cxl_poison: host=x dpa=0x1000", "memdev="),
            ("cxl_poison: memdev= dpa=0x1000", "memdev="),
            ("cxl_poison: memdev=mem0 dpa=0xzz", "dpa=0x"),
            ("cxl_poison: memdev=mem0 dpa=0x11112222333344445", "dpa=0x"),
            ("CPU:0 [LOST 12 EVENTS]", "dropped events"),
        ] {
            let error = CxlEvent::parse(broken).expect_err(broken).to_string();
            assert!(error.contains(expected) && error.contains("trace_pipe"), "{error}");
        }
        // Whatever a line is cut short to, it is an event, an error or nothing.
        for line in [POISON, MEDIA] {
            let outcomes = (0..line.len()).map(|end| CxlEvent::parse(&line[..end]).is_ok());
            assert!(outcomes.filter(|is_read| *is_read).count() > 10);
        }
        assert_eq!(fields("a='b c d"), BTreeMap::from([("a", "b c d")]), "a quote that does not end");
    }
}
