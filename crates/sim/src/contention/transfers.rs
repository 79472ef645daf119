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
    /// Bytes of a window that is long enough: its second half begins once flits have crossed the longest way. A shorter one sees rates that
    /// are not steady.
    pub steady_window_bytes: f64,
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
    /// A window in which no rate can be seen.
    #[error("window: expected {least} KiB or more, which are {flits} flits on each link of an accelerator")]
    Window {
        /// The least that may be, in KiB.
        least: u64,
        /// Flits on each link.
        flits: u64,
    },
    /// A way that needs more virtual channels than there may be.
    #[error(
        "the longest way crosses {needs} links between switches, each on a virtual channel of its own, and a link has {most} at most; take fidelity L1, or give --virtual-channels {most}, which may deadlock"
    )]
    TooManyChannels {
        /// How many it needs.
        needs: u32,
        /// How many may be.
        most: u32,
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
        "flit by flit it takes {hops} flit-hops, more than the {most} that are followed; {}",
        remedy(*window)
    )]
    TooManyFlits {
        /// Flits times the links of each.
        hops: u64,
        /// How many may be.
        most: u64,
        /// The longest window of each message that is followed, in KiB; nothing where none is short enough.
        window: Option<u64>,
    },
}

/// What to do about too many flits.
fn remedy(window: Option<u64>) -> String {
    match window {
        Some(kib) => format!("give --window {kib}KiB of each message, or fidelity L1"),
        None => "no --window of each message is short enough; take fidelity L1, or fewer accelerators".into(),
    }
}

/// Flows that are followed one by one, at most: some seconds, and some hundred bytes each.
pub(crate) const MOST_FLOWS: u64 = 1 << 22;
/// Flits times their links that are followed at most: a minute.
const MOST_FLIT_HOPS: u64 = 500_000_000;
/// Flits of a window on each link, at least: fewer say nothing of a rate.
const LEAST_WINDOW: u64 = 8;
/// Flits of a part, at most: so many are counted one by one in 64-bit floats.
const MOST_FLITS: f64 = (1_u64 << 53) as f64;
/// Virtual channels of a link, at most.
const MOST_CHANNELS: u32 = 255;
const KIB: f64 = 1024.0;

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
        if let Some(channels) = channels.filter(|count| !(1..=MOST_CHANNELS).contains(count)) {
            return invalid("virtual channels", "1 to 255", channels.to_string());
        }
        if let Some(flits) = buffer.filter(|flits| *flits == 0) {
            return invalid("buffer", "1 flit or more", flits.to_string());
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
        Self::spaced([flit_s, flit_s / reached, link.propagation.value(), switch_s], channels, options, seed)
    }

    /// Flits with these delays: of a flit, from its begin to that of the next, of a link and of a switch.
    pub(crate) fn spaced(
        [flit_s, interval_s, propagation_s, switch_s]: [f64; 4],
        channels: u32,
        options: &FlitOptions,
        seed: u64,
    ) -> Self {
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

    /// The same, unless it is too slow to be followed.
    ///
    /// # Errors
    /// When a flit takes too long.
    pub(crate) fn checked(self) -> Result<Self, TransferError> {
        match self.longest_s() {
            (_, true) => Ok(self),
            (longest_s, false) => Err(TransferError::Invalid {
                what: "a flit on a link or in a switch",
                expected: "1000 s or less, or fidelity L1",
                found: format!("{longest_s} s"),
            }),
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

/// A message as parts, one on each link of its accelerator, and these as flits.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Parts {
    /// Bytes of the message.
    bytes: f64,
    links: f64,
    /// What a flit carries.
    payload: f64,
}

impl Parts {
    /// Bytes of a part.
    fn whole(&self) -> f64 {
        self.bytes / self.links
    }

    /// Flits of so many bytes of a part.
    fn flits(&self, bytes: f64) -> u64 {
        (bytes / self.payload).ceil() as u64
    }

    /// Bytes of a part that are followed with this window of the message, and whether that is not all.
    fn cut(&self, window: Option<f64>) -> (f64, bool) {
        let all = self.whole();
        let window = window.map_or(all, |it| (it / self.links).min(all));
        (window, window < all)
    }

    /// Flits of a part that are followed: of a window both halves, each from the start.
    fn followed(&self, window: Option<f64>) -> u64 {
        let (window, is_cut) = self.cut(window);
        self.flits(window) + if is_cut { self.flits(0.5 * window) } else { 0 }
    }

    /// The least window in which a rate can be seen, in KiB.
    fn least_kib(&self) -> u64 {
        (LEAST_WINDOW as f64 * self.payload * self.links / KIB).ceil() as u64
    }
}

/// Messages that are followed flit by flit, counted before any is.
#[derive(Clone, Debug, Default)]
pub(crate) struct FlitWork {
    /// Of messages that begin together: their parts, and the links that all parts cross together.
    groups: Vec<(Parts, u64)>,
}

impl FlitWork {
    pub(crate) fn add(&mut self, other: Self) {
        self.groups.extend(other.groups);
    }

    fn hops(&self, window: Option<f64>) -> u64 {
        let each = self.groups.iter().map(|(parts, crossed)| crossed.saturating_mul(parts.followed(window)));
        each.fold(0, u64::saturating_add)
    }

    /// Refuses what is not followed with this window.
    ///
    /// # Errors
    /// When there are more flits than are followed or counted, or the window is too short.
    pub(crate) fn check(&self, window: Option<f64>) -> Result<(), TransferError> {
        for (parts, _) in &self.groups {
            if parts.whole() / parts.payload > MOST_FLITS {
                let found = format!("{} B", parts.bytes);
                let (what, expected) = ("message", "9e15 flits on a link or fewer, or fidelity L1");
                return Err(TransferError::Invalid { what, expected, found });
            }
            let is_short = window.is_some_and(|it| it < parts.least_kib() as f64 * KIB);
            if is_short && parts.cut(window).1 {
                let least = self.groups.iter().map(|(parts, _)| parts.least_kib()).max().unwrap_or(0);
                return Err(TransferError::Window { least, flits: LEAST_WINDOW });
            }
        }
        match self.hops(window) {
            hops if hops <= MOST_FLIT_HOPS => Ok(()),
            hops => {
                let window = self.longest_window();
                Err(TransferError::TooManyFlits { hops, most: MOST_FLIT_HOPS, window })
            }
        }
    }

    /// The longest window that is followed, in whole KiB.
    fn longest_window(&self) -> Option<u64> {
        let fits = |kib: u64| self.hops(Some(kib as f64 * KIB)) <= MOST_FLIT_HOPS;
        let mut groups: Vec<_> = self.groups.iter().map(|(parts, _)| *parts).collect();
        groups.sort_by(|one, other| other.bytes.total_cmp(&one.bytes));
        // Between the sizes of two messages that follow one another, a longer window is more flits. A window that cuts neither half of a message
        // may be fewer.
        for (at, longer) in groups.iter().enumerate() {
            let shorter = groups[at + 1..].iter().map(|it| it.bytes).find(|it| *it < longer.bytes);
            let is_cut = |it: &&Parts| it.bytes >= longer.bytes;
            let least = groups.iter().filter(is_cut).map(Parts::least_kib).max().unwrap_or(1);
            let mut low = least.max((shorter.unwrap_or(1.0) / KIB).ceil() as u64);
            let mut high = (longer.bytes / KIB).ceil() as u64;
            if low >= high || !fits(low) {
                continue;
            }
            // `low` fits, and `high` would be all of the message.
            while low + 1 < high {
                let middle = low.midpoint(high);
                match fits(middle) {
                    true => low = middle,
                    false => high = middle,
                }
            }
            return Some(low);
        }
        None
    }
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

    fn parts(&self) -> Parts {
        let Fabric { link, links, .. } = self.fabric;
        Parts { bytes: self.bytes, links: f64::from(*links), payload: flit_payload(link) }
    }

    /// Bytes a second of a link.
    fn rate(&self) -> f64 {
        self.fabric.link.payload().value() * self.reached
    }

    /// By flows that share links, or each as if it were alone.
    fn flows(&self, network: &Network, ways: Vec<Vec<u32>>) -> TransferTimes {
        let (bytes, rate) = (self.parts().whole(), self.rate());
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

    /// What following parts takes that go these ways.
    pub(crate) fn work(&self, ways: &[Vec<u32>]) -> FlitWork {
        FlitWork { groups: vec![(self.parts(), ways.iter().map(|it| it.len() as u64).sum())] }
    }

    /// Flit by flit.
    fn followed(&self, network: &Network, ways: &[Vec<u32>]) -> Result<TransferTimes, TransferError> {
        let parts = self.parts();
        self.work(ways).check(self.flits.window_bytes)?;
        let (window, is_cut) = parts.cut(self.flits.window_bytes);
        let longest = ways.iter().map(|it| it.len() as u32).max().unwrap_or(1);
        let timing = self.timing(longest)?;
        let whole = self.follow(&timing, network, ways, window)?;
        // Half of it is under way while the first flit crosses the longest way.
        let under_way = timing.alone(1, longest as usize) / timing.interval_s;
        let mut count = FlitCount {
            window_bytes: window * parts.links,
            flit_hops: whole.flit_hops,
            replays: whole.replays,
            channels: timing.channels,
            buffer: timing.buffer,
            steady_window_bytes: 2.0 * under_way.ceil() * parts.payload * parts.links,
        };
        let mut ends = whole.ends_s;
        let flits = parts.flits(parts.whole());
        if is_cut {
            let half = self.follow(&timing, network, ways, 0.5 * window)?;
            count.flit_hops += half.flit_hops;
            count.replays += half.replays;
            let [all, halves] = [window, 0.5 * window].map(|bytes| parts.flits(bytes) as f64);
            let rest = flits as f64 - all;
            for (end, half) in ends.iter_mut().zip(half.ends_s) {
                *end += (*end - half) / (all - halves) * rest;
            }
        }
        let start_s = self.start_s(parts.whole());
        let alone = ways.iter().map(|links| start_s + timing.alone(flits, links.len())).collect();
        Ok(TransferTimes { ends, alone, flits: Some(count) })
    }

    fn timing(&self, longest: u32) -> Result<FlitTiming, TransferError> {
        let Fabric { link, switch, topology, .. } = self.fabric;
        let channels = match topology {
            Topology::SingleHop | Topology::Clos { .. } => 1,
            _ => longest.saturating_sub(2).max(1),
        };
        let timing =
            FlitTiming::of(link, self.reached, switch.latency.value(), channels, &self.flits, self.seed);
        if timing.channels > MOST_CHANNELS {
            return Err(TransferError::TooManyChannels { needs: channels, most: MOST_CHANNELS });
        }
        timing.checked()
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
        let (flits, start_s) = (self.parts().flits(bytes), self.start_s(bytes));
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

/// Refuses more flit-hops than are followed of messages of which no window says anything.
pub(crate) fn check_total_flit_hops(hops: u64) -> Result<(), String> {
    match hops <= MOST_FLIT_HOPS {
        true => Ok(()),
        false => Err(format!(
            "expected L0 or L1, found L2: flit by flit it takes {hops} flit-hops, more than the {MOST_FLIT_HOPS} that are followed"
        )),
    }
}

#[cfg(test)]
mod tests {
    use polder_platform::Bytes;

    use super::*;

    /// Of messages at random, the window that is offered is taken as it is typed, and no longer one would be; where none is offered, none would.
    #[test]
    fn an_offered_window_is_the_longest_that_is_taken() {
        let mut random = crate::random::Random::new(20_261);
        let (mut offered, mut none) = (0, 0);
        for _ in 0..2000 {
            let groups = (0..1 + random.bits() % 4).map(|_| {
                let links = [1.0, 2.0, 18.0][(random.bits() % 3) as usize];
                let payload = [4096.0, 256.0, 240.0 * 192.0 / 208.0, 64.0][(random.bits() % 4) as usize];
                let bytes = 1.0 + (random.bits() % 400_000) as f64;
                (Parts { bytes, links, payload }, 1 << (random.bits() % 28))
            });
            let work = FlitWork { groups: groups.collect() };
            let taken = |kib: u64| work.check(Some(kib as f64 * KIB)).is_ok();
            let longest = (1..400).rev().find(|kib| taken(*kib));
            match work.check(None) {
                Ok(()) => {}
                Err(TransferError::TooManyFlits { window, .. }) => {
                    assert_eq!(window, longest, "{work:?}");
                    let error = work.check(None).unwrap_err().to_string();
                    match window {
                        Some(_) => {
                            let (_, rest) = error.split_once("give --window ").unwrap();
                            let (typed, _) = rest.split_once(' ').unwrap();
                            work.check(Some(Bytes::parse(typed).unwrap().value())).unwrap();
                            offered += 1;
                        }
                        None => {
                            assert!(error.contains("no --window of each message is short enough"), "{error}");
                            none += 1;
                        }
                    }
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!(offered > 50 && none > 50, "{offered} {none}");
    }
}
