//! Messages that begin together on a fabric, and when they end at each fidelity: the one way from transfers to seconds.

use polder_platform::{Fabric, Link, Topology};
use serde::{Deserialize, Serialize};

use super::flits::{FlitFlow, FlitRun, FlitTiming, follow};
use super::network::{Network, NetworkError, Routing};
use super::sharing::{Flow, finish_times};
use crate::fidelity::Fidelity;

/// What flits need that a platform does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FlitOptions {
    /// Bytes of each message that are followed; the rest takes what the second half of them took. All of them when left out.
    pub window_bytes: Option<f64>,
    /// Virtual channels of a link; when left out 1 in a Clos, and elsewhere one for each link between switches of the longest way.
    pub channels: Option<u32>,
    /// Flits that the buffer of a channel holds; two round trips when left out.
    pub buffer: Option<u32>,
    /// The part of the flits that arrive damaged.
    pub error_rate: f64,
}

/// What was followed flit by flit, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FlitCount {
    /// Bytes of each message that were followed.
    pub window_bytes: f64,
    /// Flits times the links that each crossed.
    pub flit_hops: u64,
    /// Flits that were damaged and sent again.
    pub replays: u64,
    /// Virtual channels of a link.
    pub channels: u32,
    /// Flits that the buffer of a channel holds.
    pub buffer: u32,
}

/// Why messages cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The fabric is no such network, or has no way.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// What flits are given cannot be.
    #[error("{what}: expected {expected}, found {found}")]
    Invalid {
        /// Which value.
        what: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// Buffers that wait for each other.
    #[error(
        "deadlock with {channels} virtual channels of a link: {left} flits never arrive; these buffers wait for each other: {circle}; give more --virtual-channels"
    )]
    Deadlock {
        /// Virtual channels of a link.
        channels: u32,
        /// Flits that have not arrived.
        left: u64,
        /// The buffers.
        circle: String,
    },
    /// A window in which no steady rate can be seen.
    #[error("window: expected {least} or more, which are {flits} flits on each link of an accelerator")]
    Window {
        /// The least that may be.
        least: String,
        /// Flits on each link.
        flits: u64,
    },
    /// Too many messages to follow each.
    #[error(
        "{parts} flows are more than the {most} that are followed one by one; ask for fewer accelerators, or fidelity L1"
    )]
    TooManyFlows {
        /// How many there are.
        parts: u64,
        /// How many may be.
        most: u64,
    },
    /// Too many flits to follow each.
    #[error(
        "flit by flit it takes {hops} flit-hops, more than the {most} that are followed; give a window of {window} of each message, or fidelity L1"
    )]
    TooManyFlits {
        /// Flits times the links of each.
        hops: u64,
        /// How many may be.
        most: u64,
        /// What of each message would do.
        window: String,
    },
}

/// Flows that are followed one by one, at most: some seconds, and some hundred bytes each.
pub(crate) const MOST_FLOWS: u64 = 1 << 22;
/// Flits times their links that are followed at most: a minute.
const MOST_FLIT_HOPS: u64 = 500_000_000;
/// Flits of a window on each link, at least: fewer say nothing of a steady rate.
const LEAST_WINDOW: u64 = 8;

impl FlitOptions {
    /// Whether they can be, and are of use where communication is looked at so closely.
    ///
    /// # Errors
    /// Names the value that cannot.
    pub fn check(&self, fidelity: Fidelity) -> Result<(), TransferError> {
        let invalid = |what, expected, found| Err(TransferError::Invalid { what, expected, found });
        let Self { window_bytes, channels, buffer, error_rate } = *self;
        if let Some(bytes) = window_bytes.filter(|bytes| !(bytes.is_finite() && *bytes >= 1.0)) {
            return invalid("window", "1 B or more", format!("{bytes} B"));
        }
        if let Some(found) = channels.filter(|it| !(1..=64).contains(it)) {
            return invalid("virtual channels", "1 to 64", found.to_string());
        }
        if let Some(found) = buffer.filter(|it| *it == 0) {
            return invalid("buffer", "1 flit or more", found.to_string());
        }
        // A link of which half is damaged sends each flit twice.
        if !(0.0..=0.5).contains(&error_rate) {
            return invalid("error rate", "0 to 0.5", error_rate.to_string());
        }
        if fidelity != Fidelity::L2 && *self != Self::default() {
            let expected = "L2, which windows, channels, buffers and error rates are for";
            return invalid("fidelity", expected, fidelity.name().into());
        }
        Ok(())
    }
}

impl FlitTiming {
    /// Flits on such links, of whose payload this part is reached, with switches of so many seconds between them.
    pub(crate) fn of(
        link: &Link,
        reached: f64,
        switch_s: f64,
        channels: u32,
        options: &FlitOptions,
        seed: u64,
    ) -> Self {
        let flit_s = link.flit.bytes.value() / link.raw().value();
        let (interval_s, propagation_s) = (flit_s / reached, link.propagation.value());
        // Sent and across, through the switch, sent on, and the way back of the credit.
        let round = (2.0 * (flit_s + propagation_s) + switch_s) / interval_s;
        Self {
            flit_s,
            interval_s,
            propagation_s,
            switch_s,
            buffer: options.buffer.unwrap_or((2.0 * round).ceil() as u32),
            channels: options.channels.unwrap_or(channels),
            error_rate: options.error_rate,
            seed,
        }
    }

    /// Seconds from the first bit of the first of so many flits to the last bit of the last, over so many links with nothing else on them.
    pub(crate) fn alone(&self, flits: u64, links: usize) -> f64 {
        let Self { flit_s, interval_s, propagation_s, switch_s, .. } = self;
        let switches = (links - 1) as f64;
        let sent = flit_s + (flits as f64 - 1.0) * interval_s;
        sent + links as f64 * propagation_s + switches * (switch_s + flit_s)
    }
}

/// What a flit of a link carries for the program.
pub(crate) fn flit_payload(link: &Link) -> f64 {
    link.flit.payload.value() * link.packet.efficiency()
}

/// Messages of one size that begin together on a fabric. Each is a part on each link of its accelerator.
#[derive(Clone, Copy, Debug)]
pub struct Transfers<'a> {
    /// The fabric.
    pub fabric: &'a Fabric,
    /// The part of its payload that is reached.
    pub reached: f64,
    /// Bytes of each message.
    pub bytes: f64,
    /// Seconds that software adds to the step which the messages are.
    pub step_s: f64,
    /// Which of the shortest ways they take.
    pub routing: Routing,
    /// What damage is drawn from.
    pub seed: u64,
    /// How closely they are looked at.
    pub fidelity: Fidelity,
    /// What flits need.
    pub flits: FlitOptions,
}

/// When each part of each message ends, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferTimes {
    /// Among the others.
    pub ends: Vec<f64>,
    /// If it were alone.
    pub alone: Vec<f64>,
    /// What was followed flit by flit.
    pub flits: Option<FlitCount>,
}

impl TransferTimes {
    /// How much later than alone the last ends.
    #[must_use]
    pub fn delay_s(&self) -> f64 {
        let last = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
        last(&self.ends) - last(&self.alone)
    }
}

impl Transfers<'_> {
    /// When messages between these accelerators end, over a network of the fabric.
    ///
    /// # Errors
    /// When there is no way; of flits also when they are too many, wait for each other, or are given what cannot be.
    pub fn times(&self, network: &mut Network, pairs: &[(u32, u32)]) -> Result<TransferTimes, TransferError> {
        self.flits.check(self.fidelity)?;
        let ways = self.ways(network, pairs)?;
        match self.fidelity {
            Fidelity::L0 | Fidelity::L1 => Ok(self.flows(network, ways)),
            Fidelity::L2 => self.followed(network, &ways),
        }
    }

    /// The links of each part of each message.
    ///
    /// # Errors
    /// When there is no way.
    pub(crate) fn ways(
        &self,
        network: &mut Network,
        pairs: &[(u32, u32)],
    ) -> Result<Vec<Vec<u32>>, NetworkError> {
        let links = self.fabric.links;
        let mut ways = Vec::with_capacity(pairs.len() * links as usize);
        for (from, to) in pairs {
            for link in 0..links {
                let [from, to] = [from, to].map(|it| it * links + link);
                ways.push(network.route(from, to, self.routing)?);
            }
        }
        Ok(ways)
    }

    /// Bytes of a part.
    fn part(&self) -> f64 {
        self.bytes / f64::from(self.fabric.links)
    }

    /// Bytes a second of a link.
    fn rate(&self) -> f64 {
        self.fabric.link.payload().value() * self.reached
    }

    /// By flows that share links, or each as if it were alone.
    fn flows(&self, network: &Network, ways: Vec<Vec<u32>>) -> TransferTimes {
        let (bytes, rate) = (self.part(), self.rate());
        let flow = |links: Vec<u32>| {
            let start_s = self.fabric.latency_over((links.len() - 1) as f64).value() + self.step_s;
            Flow { links, bytes, start_s }
        };
        let flows: Vec<_> = ways.into_iter().map(flow).collect();
        let alone: Vec<_> = flows.iter().map(|it| it.start_s + bytes / rate).collect();
        let ends = match self.fidelity {
            Fidelity::L0 => alone.clone(),
            _ => finish_times(&vec![rate; network.len()], &flows),
        };
        TransferTimes { ends, alone, flits: None }
    }

    /// Flits of so many bytes of a part.
    fn flits_of(&self, bytes: f64) -> u64 {
        (bytes / flit_payload(&self.fabric.link)).ceil() as u64
    }

    /// Bytes of a part that are followed, and whether that is not all.
    fn window(&self) -> (f64, bool) {
        let (all, links) = (self.part(), f64::from(self.fabric.links));
        let window = self.flits.window_bytes.map_or(all, |it| (it / links).min(all));
        (window, window < all)
    }

    /// Flit-hops that following parts takes which cross so many links together, and the same a byte of a window of each message.
    pub(crate) fn flit_hops(&self, crossed: u64) -> (u64, f64) {
        let (window, is_cut) = self.window();
        // Both halves of a window are followed.
        let flits = self.flits_of(window) + if is_cut { self.flits_of(0.5 * window) } else { 0 };
        let payload = flit_payload(&self.fabric.link) * f64::from(self.fabric.links);
        (crossed.saturating_mul(flits), 1.5 * crossed as f64 / payload)
    }

    /// Flit by flit.
    fn followed(&self, network: &Network, ways: &[Vec<u32>]) -> Result<TransferTimes, TransferError> {
        let links = f64::from(self.fabric.links);
        let (window, is_cut) = self.window();
        if is_cut && self.flits_of(window) < LEAST_WINDOW {
            let least = LEAST_WINDOW as f64 * flit_payload(&self.fabric.link) * links;
            let least = format!("{} KiB", (least / 1024.0).ceil());
            return Err(TransferError::Window { least, flits: LEAST_WINDOW });
        }
        let (hops, by_byte) = self.flit_hops(ways.iter().map(|it| it.len() as u64).sum());
        expect_few(hops, by_byte)?;
        let longest = ways.iter().map(|it| it.len() as u32).max().unwrap_or(1);
        let timing = self.timing(longest);
        let whole = self.follow(&timing, network, ways, window)?;
        let mut count = FlitCount {
            window_bytes: window * links,
            flit_hops: whole.flit_hops,
            replays: whole.replays,
            channels: timing.channels,
            buffer: timing.buffer,
        };
        let mut ends = whole.ends_s;
        let flits = self.flits_of(self.part());
        if is_cut {
            let half = self.follow(&timing, network, ways, 0.5 * window)?;
            count.flit_hops += half.flit_hops;
            count.replays += half.replays;
            let [all, halves] = [window, 0.5 * window].map(|bytes| self.flits_of(bytes) as f64);
            let rest = flits as f64 - all;
            for (end, half) in ends.iter_mut().zip(half.ends_s) {
                *end += (*end - half) / (all - halves) * rest;
            }
        }
        let start_s = self.start_s(self.part());
        let alone = ways.iter().map(|links| start_s + timing.alone(flits, links.len())).collect();
        Ok(TransferTimes { ends, alone, flits: Some(count) })
    }

    fn timing(&self, longest: u32) -> FlitTiming {
        let Fabric { link, switch, topology, .. } = self.fabric;
        let channels = match topology {
            Topology::SingleHop | Topology::Clos { .. } => 1,
            _ => longest.saturating_sub(2).max(1),
        };
        FlitTiming::of(link, self.reached, switch.latency.value(), channels, &self.flits, self.seed)
    }

    /// When a port can send the first flit of a part: once software has run and all bytes of the flit are there, at the link's rate.
    fn start_s(&self, bytes: f64) -> f64 {
        let first = bytes.min(flit_payload(&self.fabric.link)) / self.rate();
        self.fabric.software.message.value() + self.step_s + first
    }

    /// When the last of so many bytes of each part has arrived.
    fn follow(
        &self,
        timing: &FlitTiming,
        network: &Network,
        ways: &[Vec<u32>],
        bytes: f64,
    ) -> Result<FlitRun, TransferError> {
        let (flits, start_s) = (self.flits_of(bytes), self.start_s(bytes));
        // The channel of a link is how many links between switches lie before it: so no circle of channels can wait.
        let flow = |links: &Vec<u32>| {
            let channel = |place: usize| (place.saturating_sub(1) as u32).min(timing.channels - 1);
            let way = links.iter().enumerate().map(|(place, link)| (*link, channel(place))).collect();
            FlitFlow { way, flits, start_s }
        };
        let flows: Vec<_> = ways.iter().map(flow).collect();
        follow(timing, network.len(), &flows).map_err(|deadlock| TransferError::Deadlock {
            channels: timing.channels,
            left: deadlock.left,
            circle: deadlock.named(|link| network.ends(link)),
        })
    }
}

/// Refuses more flit-hops than are followed, and says which window would do by what each of its bytes takes.
pub(crate) fn expect_few(hops: u64, by_byte: f64) -> Result<(), TransferError> {
    let most = MOST_FLIT_HOPS;
    if hops <= most {
        return Ok(());
    }
    let window = format!("{} KiB", ((most as f64 / by_byte / 1024.0) as u64).max(1));
    Err(TransferError::TooManyFlits { hops, most, window })
}

/// The same of messages of which no window says anything.
pub(crate) fn expect_few_of_all(hops: u64) -> Result<(), String> {
    match hops <= MOST_FLIT_HOPS {
        true => Ok(()),
        false => Err(format!(
            "expected L0 or L1, found L2: flit by flit it takes {hops} flit-hops, more than the {MOST_FLIT_HOPS} that are followed"
        )),
    }
}
