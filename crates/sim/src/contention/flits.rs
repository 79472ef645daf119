//! Flits over links: credits, virtual channels, arbitration and link-layer replay.
//!
//! A flit waits in a queue of its own input, output and virtual channel (virtual output queues), so that no flit waits behind one that goes
//! elsewhere. A link takes queues in turn, virtual channel by virtual channel (round robin). It sends a flit only if the buffer at its
//! other end has room, which credits count (Dally and Towles, 2004, chapters 13 and 17). A switch forwards a flit once all of it has
//! arrived.
//!
//! Every delay is the same on all links. So each kind of event comes in the order in which it was caused, and a queue for each kind takes
//! the place of a heap.

use std::collections::{HashMap, VecDeque};

use super::network::Node;
use crate::random::Random;

/// What links, switches and buffers are like: the same everywhere.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlitTiming {
    /// Seconds in which a link sends a flit.
    pub flit_s: f64,
    /// Seconds from the begin of a flit to that of the next: longer where links never reach their rate.
    pub interval_s: f64,
    /// Seconds from one end of a link to the other.
    pub propagation_s: f64,
    /// Seconds in a switch, from the last bit in to the first bit out.
    pub switch_s: f64,
    /// Flits that the buffer of a virtual channel holds, at the end of each link.
    pub buffer: u32,
    /// Virtual channels of each link.
    pub channels: u32,
    /// The part of the flits that arrive damaged; the link sends them again (go-back-N).
    pub error_rate: f64,
    /// What damage is drawn from.
    pub seed: u64,
}

/// Flits from one port to another.
#[derive(Clone, Debug, PartialEq)]
pub struct FlitFlow {
    /// The links on its way, in order, with the virtual channel on each.
    pub way: Vec<(u32, u32)>,
    /// How many flits.
    pub flits: u64,
    /// When the first can be sent, in seconds.
    pub start_s: f64,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct FlitRun {
    /// When the last flit of each flow has arrived, in seconds.
    pub ends_s: Vec<f64>,
    /// Flits times the links that each crossed.
    pub flit_hops: u64,
    /// Flits that were damaged and sent again.
    pub replays: u64,
}

/// Buffers that wait for each other in a circle, so that nothing moves any more: links, each with its virtual channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// The links and channels whose buffers are full, each waiting for the next, the last for the first.
    pub circle: Vec<(u32, u32)>,
    /// Flits that have not arrived.
    pub left: u64,
}

impl Deadlock {
    /// The circle in the words of a network.
    #[must_use]
    pub fn named(&self, ends: impl Fn(u32) -> (Node, Node)) -> String {
        let mut words: Vec<_> = self
            .circle
            .iter()
            .map(|(link, channel)| {
                let (from, to) = ends(*link);
                format!("{from} to {to} (channel {channel})")
            })
            .collect();
        if words.len() > 6 {
            let more = words.len() - 6;
            words.truncate(6);
            words.push(format!("{more} more"));
        }
        words.join(", ")
    }
}

/// A second in the simulator's own unit, femtoseconds: a flit takes thousands of them.
const SECOND: f64 = 1e15;
/// Where the clock begins anew, after 2.6 hours: so it never ends, and every delay fits behind.
const LATEST: u64 = u64::MAX / 2;
/// Seconds that a flit takes on a link or in a switch, at most.
const LONGEST_S: f64 = 1000.0;

/// No channel: what a port itself sends comes over no link.
const NONE: u32 = u32::MAX;

/// A link on the way of a flow.
#[derive(Clone, Copy)]
struct Hop {
    queue: u32,
    link: u32,
    flow: u32,
    is_last: bool,
}

/// Flits that came over one channel and leave by one other; or those of a flow that its port has not sent.
struct Queue {
    /// The channel that they came over, to which a credit goes back for each.
    input: u32,
    /// The channel that they leave by.
    output: u32,
    /// Each flit by its hop.
    waiting: VecDeque<u32>,
    /// Of a port: how many there are of its flow's first hop.
    unsent: u64,
}

/// Events of one kind, which come in the order in which they were caused.
struct Line {
    delay: u64,
    events: VecDeque<(u64, u32)>,
}

impl Line {
    const fn new(delay: u64) -> Self {
        Self { delay, events: VecDeque::new() }
    }

    fn cause(&mut self, now: u64, what: u32) {
        self.events.push_back((now + self.delay, what));
    }

    fn next(&self) -> u64 {
        self.events.front().map_or(u64::MAX, |(at, _)| *at)
    }
}

/// What happened to a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FlowEvent {
    /// Its port has sent all of it, at this second.
    Left(u32, f64),
    /// All of it has arrived, at this second.
    Arrived(u32, f64),
}

/// The state of all links.
pub(crate) struct Flits {
    /// When the clock began that times of events are of, in femtoseconds.
    epoch: u128,
    /// When the last event was, and what happened that nobody was told.
    now: u64,
    news: Vec<FlowEvent>,
    channels: usize,
    error: u64,
    seed: u64,
    flit: u64,
    propagation: u64,
    hops: Vec<Hop>,
    queues: Vec<Queue>,
    /// The queue from a channel to another, and the first hop of each flow.
    known: HashMap<(u32, u32), u32>,
    firsts: Vec<u32>,
    /// Of each channel: room in the buffer at its end, and the queues that have something for it, in turn.
    credits: Vec<u32>,
    ready: Vec<VecDeque<u32>>,
    /// Of each link: whether it sends, the channel that comes next, how many flits it has sent, and the flit that it sends again.
    is_busy: Vec<bool>,
    turn: Vec<u8>,
    sent: Vec<u64>,
    again: Vec<u32>,
    /// Flits of each flow that have not arrived, and when the last did.
    left: Vec<u64>,
    ends: Vec<f64>,
    /// Flits that arrive in a switch; links that become free; links that hear of damage; credits.
    arrivals: Line,
    frees: Line,
    replays: Line,
    returns: Line,
    flit_hops: u64,
    replayed: u64,
}

/// Follows each flit of some flows over each link on its way; `links` is how many links there are.
///
/// # Errors
/// When buffers wait for each other in a circle.
///
/// # Panics
/// When a flow has no way, more channels than there are, or no flits; when a buffer holds nothing, or a delay is longer than 1,000 s. The
/// caller checks that.
pub fn follow(timing: &FlitTiming, links: usize, flows: &[FlitFlow]) -> Result<FlitRun, Deadlock> {
    let mut flits = Flits::new(timing, links);
    let mut starts: Vec<_> = flows.iter().map(|it| (femtoseconds(it.start_s), flits.add(it))).collect();
    starts.sort_unstable();
    flits.run(&starts);
    let left: u64 = flits.left.iter().sum();
    if left > 0 {
        return Err(Deadlock { circle: flits.circle(), left });
    }
    flits.check_credits(timing.buffer);
    Ok(FlitRun { ends_s: flits.ends, flit_hops: flits.flit_hops, replays: flits.replayed })
}

fn femtoseconds(seconds: f64) -> u128 {
    (seconds * SECOND).round() as u128
}

impl FlitTiming {
    /// The longest of its delays, and whether it is one that can be followed.
    pub(crate) fn longest_s(&self) -> (f64, bool) {
        let delays = [self.flit_s, self.interval_s, self.propagation_s, self.switch_s];
        let longest = delays.into_iter().fold(0.0, f64::max);
        (longest, longest <= LONGEST_S)
    }
}

impl Flits {
    /// So many links, with no flow on them.
    ///
    /// # Panics
    /// When a buffer holds nothing, there are no channels or too many, or a delay is too long.
    pub(crate) fn new(timing: &FlitTiming, links: usize) -> Self {
        assert!(timing.buffer > 0 && (1..=255).contains(&timing.channels), "buffers and channels");
        assert!(timing.longest_s().1, "delays");
        let [flit, interval, propagation, switch] =
            [timing.flit_s, timing.interval_s, timing.propagation_s, timing.switch_s]
                .map(|it| femtoseconds(it) as u64);
        let channels = timing.channels as usize;
        // A draw below it is damage.
        let error = (timing.error_rate.clamp(0.0, 1.0) * u64::MAX as f64) as u64;
        Self {
            epoch: 0,
            now: 0,
            news: vec![],
            channels,
            error,
            seed: timing.seed,
            flit,
            propagation,
            hops: vec![],
            queues: vec![],
            known: HashMap::new(),
            firsts: vec![],
            credits: vec![timing.buffer; links * channels],
            ready: vec![VecDeque::new(); links * channels],
            is_busy: vec![false; links],
            turn: vec![0; links],
            sent: vec![0; links],
            again: vec![NONE; links],
            left: vec![],
            ends: vec![],
            arrivals: Line::new(flit + propagation + switch),
            frees: Line::new(interval),
            // The damage is seen once all of the flit is there, and said so.
            replays: Line::new(flit + 2 * propagation),
            returns: Line::new(flit + propagation),
            flit_hops: 0,
            replayed: 0,
        }
    }

    /// A flow that has not started; its number.
    ///
    /// # Panics
    /// When it has no way, no flits, or a channel that there is not.
    pub(crate) fn add(&mut self, asked: &FlitFlow) -> u32 {
        assert!(!asked.way.is_empty() && asked.flits > 0, "a flow of flits over links");
        let (flow, channels) = (self.left.len() as u32, self.channels as u32);
        self.firsts.push(self.hops.len() as u32);
        let mut input = NONE;
        for (place, (link, channel)) in asked.way.iter().enumerate() {
            assert!(*channel < channels, "channel {channel} of {channels}");
            let output = *link * channels + channel;
            let fresh = self.queues.len() as u32;
            let queue = match place {
                0 => fresh,
                _ => *self.known.entry((input, output)).or_insert(fresh),
            };
            if queue == fresh {
                self.queues.push(Queue { input, output, waiting: VecDeque::new(), unsent: 0 });
            }
            self.hops.push(Hop { queue, link: *link, flow, is_last: place + 1 == asked.way.len() });
            input = output;
        }
        self.left.push(asked.flits);
        self.ends.push(0.0);
        flow
    }

    /// Lets a flow start at this second, or now if that is later. All that happens until then has to be done.
    pub(crate) fn start(&mut self, flow: u32, start_s: f64) {
        self.begin(flow, femtoseconds(start_s));
    }

    /// Does the next event if it is not later than this second; says whether it did.
    pub(crate) fn advance_until(&mut self, until_s: Option<f64>) -> bool {
        let until = until_s.map_or(u128::MAX, femtoseconds);
        self.near(until).is_some_and(|near| self.advance(near))
            || self.rebase_before(until) && self.near(until).is_some_and(|near| self.advance(near))
    }

    /// What happened since it was asked last.
    pub(crate) fn news(&mut self) -> std::vec::Drain<'_, FlowEvent> {
        self.news.drain(..)
    }

    /// Flits times the links that each crossed.
    pub(crate) const fn flit_hops(&self) -> u64 {
        self.flit_hops
    }

    /// Until nothing happens any more.
    fn run(&mut self, starts: &[(u128, u32)]) {
        for (at, flow) in starts {
            self.run_until(*at);
            self.begin(*flow, *at);
        }
        self.run_until(u128::MAX);
    }

    fn run_until(&mut self, until: u128) {
        while let Some(near) = self.near(until) {
            while self.advance(near) {}
            if !self.rebase_before(until) {
                break;
            }
        }
    }

    /// The time by this clock, at its end if it is later; nothing where it is before its begin.
    fn near(&self, until: u128) -> Option<u64> {
        Some(until.checked_sub(self.epoch)?.min(LATEST.into()) as u64)
    }

    /// Lets the clock begin anew if the next event is beyond its end, but not later than this; says whether it did.
    fn rebase_before(&mut self, until: u128) -> bool {
        let next = self.next();
        let is_beyond = next > LATEST && next < u64::MAX && self.epoch + u128::from(next) <= until;
        if is_beyond {
            self.rebase_clock(next.into());
        }
        is_beyond
    }

    /// Lets the clock begin anew at this time by it, which no event is before.
    fn rebase_clock(&mut self, to: u128) {
        for line in [&mut self.arrivals, &mut self.frees, &mut self.replays, &mut self.returns] {
            line.events.iter_mut().for_each(|(at, _)| *at -= to as u64);
        }
        (self.epoch, self.now) = (self.epoch + to, 0);
    }

    /// When the next event is; the end of time if there is none.
    fn next(&self) -> u64 {
        let lines = [&self.arrivals, &self.frees, &self.replays, &self.returns];
        lines.into_iter().map(Line::next).fold(u64::MAX, u64::min)
    }

    /// A port is its first hop's queue.
    fn begin(&mut self, flow: u32, at: u128) {
        let mut after = at.saturating_sub(self.epoch).max(self.now.into());
        if after > LATEST.into() {
            let next = self.next();
            let to = if next < u64::MAX { after.min(next.into()) } else { after };
            self.rebase_clock(to);
            after -= to;
        }
        self.now = after as u64;
        self.offer(self.firsts[flow as usize], self.left[flow as usize], self.now);
    }

    fn advance(&mut self, until: u64) -> bool {
        let events = [self.returns.next(), self.frees.next(), self.replays.next(), self.arrivals.next()];
        let now = events.into_iter().fold(u64::MAX, u64::min);
        if now > until || now == u64::MAX {
            return false;
        }
        self.now = now;
        // Credits first, so that a link that becomes free at the same time sees them.
        if events[0] == now {
            let (_, channel) = self.returns.events.pop_front().expect("an event");
            self.credits[channel as usize] += 1;
            self.try_send(channel / self.channels as u32, now);
        } else if events[1] == now {
            let (_, link) = self.frees.events.pop_front().expect("an event");
            self.is_busy[link as usize] = false;
            self.try_send(link, now);
        } else if events[2] == now {
            let (_, link) = self.replays.events.pop_front().expect("an event");
            let hop = std::mem::replace(&mut self.again[link as usize], NONE);
            self.send(hop, now);
        } else {
            let (_, hop) = self.arrivals.events.pop_front().expect("an event");
            self.offer(hop, 0, now);
        }
        true
    }

    /// Lets a flit wait for its next link, or so many of a port's.
    fn offer(&mut self, hop: u32, unsent: u64, now: u64) {
        let Hop { queue, link, .. } = self.hops[hop as usize];
        let buffer = &mut self.queues[queue as usize];
        if buffer.waiting.is_empty() {
            self.ready[buffer.output as usize].push_back(queue);
        }
        buffer.waiting.push_back(hop);
        buffer.unsent = unsent;
        self.try_send(link, now);
    }

    /// Sends the next flit of a link, if it is idle and the next buffer has room.
    fn try_send(&mut self, link: u32, now: u64) {
        let at = link as usize;
        if self.is_busy[at] {
            return;
        }
        for step in 0..self.channels {
            let channel = (self.turn[at] as usize + step) % self.channels;
            let output = at * self.channels + channel;
            if self.credits[output] == 0 {
                continue;
            }
            let Some(queue) = self.ready[output].pop_front() else { continue };
            self.turn[at] = ((channel + 1) % self.channels) as u8;
            let chosen = &mut self.queues[queue as usize];
            let hop = *chosen.waiting.front().expect("a queue that is ready");
            if chosen.unsent > 1 {
                chosen.unsent -= 1;
            } else {
                chosen.waiting.pop_front();
            }
            if !chosen.waiting.is_empty() {
                self.ready[output].push_back(queue);
            }
            self.is_busy[at] = true;
            // A port takes whatever arrives.
            if !self.hops[hop as usize].is_last {
                self.credits[output] -= 1;
            }
            self.send(hop, now);
            return;
        }
    }

    /// Sends a flit over a link that is its own.
    fn send(&mut self, hop: u32, now: u64) {
        let Hop { queue, link, flow, is_last } = self.hops[hop as usize];
        let at = link as usize;
        self.sent[at] += 1;
        if self.error > 0 && mixed(self.seed, link, self.sent[at]) < self.error {
            self.replayed += 1;
            self.again[at] = hop;
            self.replays.cause(now, link);
            return;
        }
        self.flit_hops += 1;
        self.frees.cause(now, link);
        let Queue { input, waiting, .. } = &self.queues[queue as usize];
        let (input, is_all) = (*input, waiting.is_empty());
        if input != NONE {
            self.returns.cause(now, input);
        } else if is_all {
            // A port's queue has one flow.
            self.push_event(FlowEvent::Left, flow, now + self.flit);
        }
        if !is_last {
            self.arrivals.cause(now, hop + 1);
            return;
        }
        let left = &mut self.left[flow as usize];
        *left -= 1;
        if *left == 0 {
            let end = now + self.flit + self.propagation;
            self.ends[flow as usize] = self.seconds(end);
            self.push_event(FlowEvent::Arrived, flow, end);
        }
    }

    fn push_event(&mut self, what: fn(u32, f64) -> FlowEvent, flow: u32, at: u64) {
        self.news.push(what(flow, self.seconds(at)));
    }

    fn seconds(&self, at: u64) -> f64 {
        (self.epoch + u128::from(at)) as f64 / SECOND
    }

    /// Channels whose full buffers wait for each other.
    fn circle(&self) -> Vec<(u32, u32)> {
        let mut next = HashMap::new();
        for queue in self.queues.iter().filter(|queue| queue.input != NONE && !queue.waiting.is_empty()) {
            next.entry(queue.input).or_insert_with(Vec::new).push(queue.output);
        }
        let mut starts: Vec<_> = next.keys().copied().collect();
        starts.sort_unstable();
        let channels = self.channels as u32;
        for start in starts {
            // Each of them waits for all that it leads to; some walk of them comes back.
            let mut walk = vec![start];
            while let Some(on) = next
                .get(&walk[walk.len() - 1])
                .and_then(|them| them.iter().find(|channel| self.credits[**channel as usize] == 0))
            {
                if let Some(first) = walk.iter().position(|channel| channel == on) {
                    return walk[first..]
                        .iter()
                        .map(|channel| (channel / channels, channel % channels))
                        .collect();
                }
                walk.push(*on);
            }
        }
        vec![]
    }

    /// Every buffer is empty, and every credit is back: none was lost or made.
    fn check_credits(&self, buffer: u32) {
        assert!(self.queues.iter().all(|it| it.waiting.is_empty()), "a flit was left");
        assert!(self.credits.iter().all(|it| *it == buffer), "a credit was lost or made");
    }
}

/// What is drawn for flit number `count` of a link.
fn mixed(seed: u64, link: u32, count: u64) -> u64 {
    let flit = seed ^ (u64::from(link) << 40) ^ count;
    // Spread first: seeds one apart would draw one number after the other.
    Random::new(flit.wrapping_mul(0x9e37_79b9_7f4a_7c15)).bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing() -> FlitTiming {
        FlitTiming {
            flit_s: 2e-9,
            interval_s: 2e-9,
            propagation_s: 25e-9,
            switch_s: 250e-9,
            buffer: 400,
            channels: 1,
            error_rate: 0.0,
            seed: 1,
        }
    }

    fn flow(way: &[u32], flits: u64, start_s: f64) -> FlitFlow {
        FlitFlow { way: way.iter().map(|link| (*link, 0)).collect(), flits, start_s }
    }

    #[test]
    fn a_flow_alone_takes_the_sum_of_its_delays() {
        let timing = timing();
        for flits in [1, 2, 1000, 100_000] {
            let run = follow(&timing, 3, &[flow(&[0, 1, 2], flits, 1e-6)]).unwrap();
            let expected = 1e-6 + 3.0 * (2e-9 + 25e-9) + 2.0 * 250e-9 + (flits - 1) as f64 * 2e-9;
            assert!((run.ends_s[0] / expected - 1.0).abs() < 1e-9, "{flits}: {run:?}");
            assert_eq!((run.flit_hops, run.replays), (3 * flits, 0));
        }
    }

    /// The same flows at any hour take as long, also over the clock's end, whether links are idle then or not.
    #[test]
    fn a_clock_that_begins_anew_changes_nothing() {
        let timing = FlitTiming { propagation_s: 100.0, flit_s: 10.0, interval_s: 10.0, ..timing() };
        let flows = |from: f64| [flow(&[0, 1], 50, from), flow(&[2, 1], 50, from + 5.0)];
        let early = follow(&timing, 3, &flows(0.0)).unwrap().ends_s;
        for from in [9_000.0, 9_200.0, 18_400.0, 40_000.0, 1e9] {
            let [first, later] = [flows(0.0), flows(from)].map(|it| it.to_vec());
            let run = follow(&timing, 3, &[first, later].concat()).unwrap();
            for (at, end) in run.ends_s.iter().enumerate() {
                let expected = early[at % 2] + if at < 2 { 0.0 } else { from };
                assert!((end - expected).abs() < 1e-6, "{from}: {run:?}, not {early:?}");
            }
        }
    }

    /// A buffer that holds less than a round trip slows a link to a buffer a round trip.
    #[test]
    fn a_small_buffer_slows_a_link() {
        // Sent, across, through the switch, sent on, and the credit's way back.
        let timing = FlitTiming { buffer: 10, ..timing() };
        let round = 2.0 * 2e-9 + 2.0 * 25e-9 + 250e-9;
        let run = follow(&timing, 2, &[flow(&[0, 1], 10_000, 0.0)]).unwrap();
        assert!((run.ends_s[0] / (10_000.0 / 10.0 * round) - 1.0).abs() < 0.01, "{run:?}");
    }

    #[test]
    fn flows_that_share_a_link_get_equal_parts_of_it() {
        let run = follow(
            &timing(),
            5,
            &[flow(&[0, 3], 10_000, 0.0), flow(&[1, 3], 10_000, 0.0), flow(&[2, 3], 5_000, 0.0)],
        );
        let ends = run.unwrap().ends_s;
        for (end, flits) in ends.iter().zip([25_000.0, 25_000.0, 15_000.0]) {
            assert!((end / (flits * 2e-9) - 1.0).abs() < 0.02, "{ends:?}");
        }
    }

    /// Single flits that arrive at random at one link from many: the mean wait is that of M/D/1, `load / (2 (1 - load))` flits
    /// (Pollaczek and Khinchine).
    #[test]
    fn the_mean_wait_at_a_shared_link_is_that_of_a_queue_with_random_arrivals() {
        let (sources, count) = (64u32, 400_000u32);
        let timing = FlitTiming { buffer: 4000, ..timing() };
        for load in [0.1, 0.3, 0.5, 0.7, 0.8] {
            let mut now = 0.0;
            let flows: Vec<_> = (0..count)
                .map(|index| {
                    let draw = (mixed(7, 0, u64::from(index) * 2) >> 11) as f64 / (1u64 << 53) as f64;
                    now -= (1.0 - draw).ln() * timing.flit_s / load;
                    let source = (mixed(8, 1, u64::from(index)) % u64::from(sources)) as u32;
                    flow(&[source, sources], 1, now)
                })
                .collect();
            let run = follow(&timing, sources as usize + 1, &flows).unwrap();
            let alone = 2.0 * (timing.flit_s + timing.propagation_s) + timing.switch_s;
            let waits = run.ends_s.iter().zip(&flows).map(|(end, flow)| end - flow.start_s - alone);
            let mean = waits.sum::<f64>() / f64::from(count) / timing.flit_s;
            // At each source too, where the load is a 64th of it.
            let wait = |load: f64| load / (2.0 * (1.0 - load));
            let expected = wait(load) + wait(load / f64::from(sources));
            assert!((mean / expected - 1.0).abs() < 0.10, "at {load}: {mean} flits, expected {expected}");
        }
    }

    #[test]
    fn damaged_flits_are_sent_again_and_cost_a_round_trip_each() {
        let timing = FlitTiming { error_rate: 0.01, ..timing() };
        let flits = 100_000;
        let run = follow(&timing, 1, &[flow(&[0], flits, 0.0)]).unwrap();
        let expected = 0.01 * flits as f64 / 0.99;
        assert!((run.replays as f64 / expected - 1.0).abs() < 0.1, "{run:?}");
        let seconds = flits as f64 * 2e-9 + run.replays as f64 * (2e-9 + 2.0 * 25e-9) + 25e-9;
        assert!((run.ends_s[0] / seconds - 1.0).abs() < 1e-6, "{run:?} {seconds}");
    }

    /// A ring of switches, of which each sends half around: with one channel the buffers fill and wait in a circle; with a channel a
    /// hop they cannot.
    #[test]
    fn a_circle_of_full_buffers_is_named() {
        let switches = 6u32;
        let flows = |channels: u32| {
            let of = |from: u32| {
                let between = (0..3).map(|step| 2 * switches + (from + step) % switches);
                let way = std::iter::once(from).chain(between).chain([switches + (from + 3) % switches]);
                let channel = |place: usize| (place as u32).min(channels - 1);
                FlitFlow {
                    way: way.enumerate().map(|(at, link)| (link, channel(at))).collect(),
                    flits: 1000,
                    start_s: 0.0,
                }
            };
            (0..switches).map(of).collect::<Vec<_>>()
        };
        let with = |channels| FlitTiming { buffer: 2, channels, ..timing() };
        let stuck = follow(&with(1), 3 * switches as usize, &flows(1)).unwrap_err();
        assert!(stuck.left > 0);
        let mut circle = stuck.circle.clone();
        circle.sort_unstable();
        assert_eq!(circle, (2 * switches..3 * switches).map(|link| (link, 0)).collect::<Vec<_>>());
        let run = follow(&with(4), 3 * switches as usize, &flows(4)).unwrap();
        assert_eq!(run.flit_hops, u64::from(switches) * 1000 * 5);
    }

    #[test]
    fn the_same_flows_end_at_the_same_times() {
        let timing = FlitTiming { error_rate: 0.001, ..timing() };
        let flows: Vec<_> = (0..16).map(|from| flow(&[from, 16 + from % 4, 20], 500, 0.0)).collect();
        let runs = [(); 2].map(|()| follow(&timing, 21, &flows).unwrap());
        assert_eq!(runs[0], runs[1]);
    }
}
