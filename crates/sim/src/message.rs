//! Messages between two hosts: through a network's link, or through memory that both share.

use polder_platform::{MessagePath, Server, Time};

/// Seconds from a process that sends to the one that has received, while as many as `senders` do so at once.
///
/// # Panics
/// When `path` is over nothing that `server` has: no path of its own is.
#[must_use]
pub fn latency(server: &Server, path: &MessagePath, bytes: f64, senders: f64) -> f64 {
    let Carrier { one, all, wires, flush } = Carrier::of(server, path);
    let flushes = cells(path, bytes) * f64::from(path.flushes) * flush;
    // The copies of one message follow one another; those of others go by meanwhile.
    let moved = (f64::from(path.copies) * bytes / one).max(senders * bytes / all);
    path.message.value() + wires + flushes + moved
}

/// Bytes a second of so many senders, each with many messages of this size under way.
///
/// # Panics
/// As [`latency`].
#[must_use]
pub fn throughput(server: &Server, path: &MessagePath, bytes: f64, senders: f64) -> f64 {
    let Carrier { one, all, .. } = Carrier::of(server, path);
    let busy = cells(path, bytes) * path.gap.value() + bytes / one;
    (senders * bytes / busy).min(all)
}

/// What carries messages from one host to another.
struct Carrier {
    /// Bytes a second of one copy.
    one: f64,
    /// Bytes a second of all messages together.
    all: f64,
    /// Seconds on wires.
    wires: f64,
    /// Seconds of a line that is flushed.
    flush: f64,
}

impl Carrier {
    fn of(server: &Server, path: &MessagePath) -> Self {
        if let Some(link) = server.nic.get(&path.over) {
            let payload = link.payload().value();
            return Self { one: payload, all: payload, wires: link.propagation.value(), flush: 0.0 };
        }
        let memory = &server.tiers[&path.over];
        // One host writes through its port; where another copies out through its own, the channels see both.
        let (writes, shared) = (memory.port_bandwidth(0.0), memory.channel_bandwidth(0.0));
        Self {
            one: writes.min(shared),
            all: writes.min(shared / f64::from(path.copies)),
            wires: 0.0,
            flush: memory.flushed.map_or(0.0, Time::value),
        }
    }
}

/// Cells that a message is cut into: one that fills a cell has no room for its header.
fn cells(path: &MessagePath, bytes: f64) -> f64 {
    path.cell.map_or(1.0, |cell| (bytes / cell.value()).floor() + 1.0)
}
