//! Messages between hosts flit by flit: over a link from the sender's host, through a switch or the memory that hosts share, and over a link
//! to the receiver's host.

use polder_platform::{MessagePath, Server};

use super::{Operation, Way};
use crate::contention::{FlitFlow, FlitOptions, FlitTiming, Flits, flit_payload};

/// What flits go over between two hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostLinks {
    timing: FlitTiming,
    /// What a flit carries for the program.
    payload: f64,
}

/// Links on the way of a message.
const CROSSED: usize = 2;

impl HostLinks {
    /// The links of a path on which messages take `way`.
    ///
    /// A message alone takes what `way` says: software, and its bytes at the port's rate. Both links, and a last flit that is not full, come to
    /// three flits at most. Where software takes less than that, flits are so many equal parts of a frame that it does not.
    ///
    /// # Errors
    /// Why there are none, as what follows the path's name: it goes over no link, or no part of a frame is short enough.
    pub fn of(server: &Server, path: &MessagePath, way: &Way, options: &FlitOptions) -> Result<Self, String> {
        let port = || Some(&server.tiers.get(&path.over)?.port.as_ref()?.link);
        let link = server.nic.get(&path.over).or_else(port);
        let link = link.ok_or_else(|| format!("goes over {}, which no link leads to", path.over))?;
        let payload = flit_payload(link);
        // What a host's messages reach together, in place of what the link carries.
        let interval_s = payload / way.port_bytes_per_s;
        let flit_s = (link.flit.bytes.value() / link.raw().value()).min(interval_s);
        let software_s = way.latency_s - link.propagation.value();
        let pieces = (3.0 * interval_s / software_s).ceil().max(1.0);
        if software_s <= 0.0 || pieces > payload {
            return Err("has messages of which software takes less time than a byte on its links".into());
        }
        let [flit_s, interval_s, payload] = [flit_s, interval_s, payload].map(|it| it / pieces);
        // The way's propagation is that of both links.
        let propagation_s = 0.5 * link.propagation.value();
        let timing = FlitTiming::spaced([flit_s, interval_s, propagation_s, 0.0], 1, options, 0);
        let timing = timing.checked().map_err(|error| format!("is too slow: {error}"))?;
        Ok(Self { timing, payload })
    }

    /// Flits of a message: also of an empty one.
    fn flits(&self, bytes: u64) -> u64 {
        ((bytes as f64 / self.payload).ceil() as u64).max(1)
    }

    /// Flit-hops of all messages between hosts.
    #[must_use]
    pub fn flit_hops(&self, programs: &[Vec<Operation>], hosts: &[u32]) -> u64 {
        let between = |rank: usize, operation: &Operation| match *operation {
            Operation::Send { to, bytes, .. } if hosts.get(to as usize) != Some(&hosts[rank]) => {
                CROSSED as u64 * self.flits(bytes)
            }
            _ => 0,
        };
        let each = programs.iter().enumerate().map(|(rank, program)| {
            program.iter().map(|operation| between(rank, operation)).fold(0_u64, u64::saturating_add)
        });
        each.fold(0, u64::saturating_add)
    }
}

/// A message on its way.
pub(super) struct OnWire {
    /// Its channel, and which of its messages it is.
    pub(super) channel: usize,
    pub(super) index: usize,
    /// Seconds from its last flit's arrival until it is received: what software and copies take.
    pub(super) later_s: f64,
    /// When its bytes have left the host, once they have; and the rank that waits for it.
    pub(super) left: Option<f64>,
    pub(super) waits: Option<usize>,
}

/// The links of all hosts, and the messages on them.
pub(super) struct Wires {
    links: HostLinks,
    hosts: u32,
    pub(super) flits: Flits,
    pub(super) messages: Vec<OnWire>,
}

impl Wires {
    pub(super) fn new(links: HostLinks, hosts: u32) -> Self {
        let flits = Flits::new(&links.timing, CROSSED * hosts as usize);
        Self { links, hosts, flits, messages: vec![] }
    }

    /// Sends a message that takes `alone_s` if it is alone; its number.
    pub(super) fn send(
        &mut self,
        [from, to]: [u32; 2],
        bytes: u64,
        now: f64,
        alone_s: f64,
        [channel, index]: [usize; 2],
    ) -> usize {
        let flits = self.links.flits(bytes);
        let way = vec![(from, 0), (self.hosts + to, 0)];
        let flow = self.flits.add(&FlitFlow { way, flits, start_s: now });
        self.flits.start(flow, now);
        // Flits never outlast a message alone, but for what their times are rounded by.
        let later_s = (alone_s - self.links.timing.alone(flits, CROSSED)).max(0.0);
        self.messages.push(OnWire { channel, index, later_s, left: None, waits: None });
        flow as usize
    }
}
