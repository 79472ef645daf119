//! Max-min fair sharing: rates of flows, and the times at which they end.
//!
//! A level is a rate at which some link is full. The solver raises all rates together and freezes the flows of each link that fills
//! (Bertsekas and Gallager, 1992, section 6.5.2). When a flow of rate `r` comes or goes, no flow below `r` changes: a link that is full
//! at a lower level has no flow of that rate. So only flows at that level or above are shared anew. Flows of one size that begin
//! together are therefore shared once: whenever some end, they are the fastest that are left.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// What is sent over some links.
#[derive(Clone, Debug, PartialEq)]
pub struct Flow {
    /// The links that it crosses, by their index; none twice.
    pub links: Vec<u32>,
    /// Bytes of it.
    pub bytes: f64,
    /// When its first byte crosses, in seconds.
    pub start_s: f64,
}

/// Rates that differ by less, as a part of them, are one level; the same of times.
const SAME: f64 = 1e-12;

/// When each flow ends, in seconds, where link `i` carries `capacities[i]` bytes a second and shares are max-min fair.
///
/// The result does not depend on the order of flows, but for rounding in the last digits.
///
/// # Panics
/// When a flow crosses a link that has no capacity, has no links, or is of no bytes: who asks checks that.
#[must_use]
pub fn finish_times(capacities: &[f64], flows: &[Flow]) -> Vec<f64> {
    let mut sharing = Sharing::new(capacities, flows);
    sharing.run();
    sharing.ends
}

/// Marks the number of a link in place of how many cross it.
const NUMBERED: u32 = 1 << 31;

/// A time or a level, smallest first in a heap.
#[derive(Clone, Copy, PartialEq)]
struct Least(f64, u32);

impl Eq for Least {}

impl Ord for Least {
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.total_cmp(&self.0).then_with(|| other.1.cmp(&self.1))
    }
}

impl PartialOrd for Least {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The state of all flows and links.
struct Sharing<'a> {
    flows: &'a [Flow],
    /// What a flow gets at most, by those of its links that no other crosses.
    bounds: Vec<f64>,
    /// The other links of flows, counted anew, one flow after the other, and where each flow's begin.
    shared: Vec<u32>,
    begins: Vec<u32>,
    /// What those links carry.
    capacities: Vec<f64>,
    /// The flows under way on each shared link: the first `counts` from `firsts` on.
    members: Vec<u32>,
    firsts: Vec<u32>,
    counts: Vec<u32>,
    /// Of each flow: its rate, 0 before it starts and after it ends; what is left of it, and since when.
    rates: Vec<f64>,
    left: Vec<f64>,
    since: Vec<f64>,
    ends: Vec<f64>,
    /// When flows end, as their rates are; an entry whose time has changed is passed over. Those of one sharing are sorted, the next at
    /// the end, because equal flows need no more; those of later ones are in a heap.
    sorted: Vec<Least>,
    finishing: BinaryHeap<Least>,
    /// Room for a sharing: links and flows that take part, and marks on them.
    links: Vec<u32>,
    open: Vec<u32>,
    is_open: Vec<bool>,
    is_touched: Vec<bool>,
    spare: Vec<f64>,
    waiting: Vec<u32>,
    levels: Vec<Least>,
    raised: BinaryHeap<Least>,
    fresh: Vec<Least>,
}

impl<'a> Sharing<'a> {
    fn new(capacities: &[f64], flows: &'a [Flow]) -> Self {
        let mut crossings = vec![0u32; capacities.len()];
        let mut crossed = 0;
        for flow in flows {
            assert!(!flow.links.is_empty() && flow.bytes > 0.0, "a flow of bytes over links");
            flow.links.iter().for_each(|link| crossings[*link as usize] += 1);
            crossed += flow.links.len();
        }
        let mut shared = Vec::with_capacity(crossed);
        let (mut carried, mut firsts) = (vec![], vec![]);
        let mut begins = Vec::with_capacity(flows.len() + 1);
        let mut bounds = Vec::with_capacity(flows.len());
        let mut members = 0;
        for flow in flows {
            begins.push(shared.len() as u32);
            let mut bound = f64::INFINITY;
            for link in &flow.links {
                let (capacity, crossed) = (capacities[*link as usize], &mut crossings[*link as usize]);
                assert!(capacity > 0.0, "link {link} carries nothing");
                if *crossed == 1 {
                    bound = bound.min(capacity);
                    continue;
                }
                // Once it is counted anew, its number stands in place of its crossings.
                if *crossed & NUMBERED == 0 {
                    firsts.push(members);
                    members += *crossed;
                    *crossed = NUMBERED | carried.len() as u32;
                    carried.push(capacity);
                }
                shared.push(*crossed & !NUMBERED);
            }
            bounds.push(bound);
        }
        begins.push(shared.len() as u32);
        let (count, links) = (flows.len(), carried.len());
        Self {
            flows,
            bounds,
            shared,
            begins,
            capacities: carried,
            members: vec![0; members as usize],
            firsts,
            counts: vec![0; links],
            rates: vec![0.0; count],
            left: flows.iter().map(|flow| flow.bytes).collect(),
            since: vec![0.0; count],
            ends: vec![0.0; count],
            sorted: vec![],
            finishing: BinaryHeap::new(),
            links: vec![],
            open: vec![],
            is_open: vec![false; count],
            is_touched: vec![false; links],
            spare: vec![0.0; links],
            waiting: vec![0; links],
            levels: vec![],
            raised: BinaryHeap::new(),
            fresh: vec![],
        }
    }

    fn shared(&self, flow: u32) -> std::ops::Range<usize> {
        self.begins[flow as usize] as usize..self.begins[flow as usize + 1] as usize
    }

    /// From the first start to the last end.
    fn run(&mut self) {
        // A flow that shares no link takes what it takes alone.
        let mut starts = Vec::with_capacity(self.flows.len());
        for (flow, it) in self.flows.iter().enumerate() {
            match self.shared(flow as u32).is_empty() {
                true => self.ends[flow] = it.start_s + it.bytes / self.bounds[flow],
                false => starts.push(flow as u32),
            }
        }
        let at = |flow: &u32| self.flows[*flow as usize].start_s;
        if !starts.is_sorted_by(|one, other| at(one) <= at(other)) {
            starts.sort_by(|one, other| at(one).total_cmp(&at(other)));
        }
        let mut next = 0;
        let mut come = vec![];
        loop {
            let start = starts.get(next).map(|flow| self.flows[*flow as usize].start_s);
            let end = self.next_end().map(|(end, _)| end);
            let Some(now) = [start, end].into_iter().flatten().reduce(f64::min) else { return };
            let until = now + now.abs() * SAME;
            let mut level = f64::INFINITY;
            self.links.clear();
            while let Some((end, flow)) = self.next_end().filter(|(end, _)| *end <= until) {
                level = level.min(self.rates[flow as usize]);
                self.leave(flow, end);
            }
            self.forget_ended();
            come.clear();
            while let Some(flow) =
                starts.get(next).filter(|flow| self.flows[**flow as usize].start_s <= until)
            {
                come.push(*flow);
                next += 1;
            }
            come.iter().for_each(|flow| self.enter(*flow, now));
            // What comes gets at least an equal part of each of its links.
            for flow in &come {
                let part = |at: usize| self.capacities[at] / f64::from(self.counts[at]);
                let parts = self.shared(*flow).map(|it| part(self.shared[it] as usize));
                level = parts.fold(level.min(self.bounds[*flow as usize]), f64::min);
            }
            self.share(&come, level * (1.0 - 1e3 * SAME), now);
        }
    }

    /// When the next flow ends, and which; entries that say what is no more are dropped.
    fn next_end(&mut self) -> Option<(f64, u32)> {
        let (rates, ends) = (&self.rates, &self.ends);
        let holds = |Least(end, flow): &Least| rates[*flow as usize] > 0.0 && ends[*flow as usize] == *end;
        while self.sorted.last().is_some_and(|it| !holds(it)) {
            self.sorted.pop();
        }
        while self.finishing.peek().is_some_and(|it| !holds(it)) {
            self.finishing.pop();
        }
        // The greater of two is the sooner.
        let next = self.sorted.last().max(self.finishing.peek());
        next.map(|Least(end, flow)| (*end, *flow))
    }

    fn enter(&mut self, flow: u32, now: f64) {
        self.since[flow as usize] = now;
        for it in self.shared(flow) {
            let link = self.shared[it] as usize;
            self.members[(self.firsts[link] + self.counts[link]) as usize] = flow;
            self.counts[link] += 1;
        }
    }

    fn leave(&mut self, flow: u32, end: f64) {
        self.ends[flow as usize] = end;
        self.rates[flow as usize] = 0.0;
        for it in self.shared(flow) {
            let link = self.shared[it];
            if !std::mem::replace(&mut self.is_touched[link as usize], true) {
                self.links.push(link);
            }
        }
    }

    /// Takes flows that have ended off the links that they crossed.
    fn forget_ended(&mut self) {
        for link in &self.links {
            let first = self.firsts[*link as usize] as usize;
            let count = &mut self.counts[*link as usize];
            let mut kept = first;
            for it in first..first + *count as usize {
                if self.rates[self.members[it] as usize] > 0.0 {
                    self.members[kept] = self.members[it];
                    kept += 1;
                }
            }
            *count = (kept - first) as u32;
        }
    }

    /// Shares anew what flows of this rate or more have that can be reached from the links that were touched, and from those that came.
    fn share(&mut self, come: &[u32], level: f64, now: f64) {
        self.open.clear();
        come.iter().for_each(|flow| self.open_flow(*flow));
        // Both lists grow while they are gone through.
        let (mut link, mut flow) = (0, 0);
        while link < self.links.len() || flow < self.open.len() {
            if let Some(at) = self.links.get(link).map(|it| *it as usize) {
                link += 1;
                let first = self.firsts[at] as usize;
                for it in first..first + self.counts[at] as usize {
                    let member = self.members[it];
                    if self.rates[member as usize] >= level {
                        self.open_flow(member);
                    }
                }
            } else {
                let one = self.open[flow];
                flow += 1;
                for it in self.shared(one) {
                    let at = self.shared[it];
                    if !std::mem::replace(&mut self.is_touched[at as usize], true) {
                        self.links.push(at);
                    }
                }
            }
        }
        self.fill(now);
        self.links.iter().for_each(|link| self.is_touched[*link as usize] = false);
    }

    fn open_flow(&mut self, flow: u32) {
        if !std::mem::replace(&mut self.is_open[flow as usize], true) {
            self.open.push(flow);
        }
    }

    /// Raises the rates of all open flows together, and freezes those of each link that fills.
    fn fill(&mut self, now: f64) {
        if self.open.is_empty() {
            return;
        }
        self.levels.clear();
        for link in &self.links {
            let at = *link as usize;
            let first = self.firsts[at] as usize;
            let members = &self.members[first..first + self.counts[at] as usize];
            let (mut taken, mut waiting) = (0.0, 0);
            for member in members {
                match self.is_open[*member as usize] {
                    true => waiting += 1,
                    false => taken += self.rates[*member as usize],
                }
            }
            self.spare[at] = self.capacities[at] - taken;
            self.waiting[at] = waiting;
            if waiting > 0 {
                self.levels.push(Least(self.spare[at] / f64::from(waiting), *link));
            }
        }
        // A flow's own bound is a level where it can be lower than what its shared links give.
        let links = self.capacities.len() as u32;
        for index in 0..self.open.len() {
            let flow = self.open[index];
            let bound = self.bounds[flow as usize];
            let least = self.shared(flow).map(|it| self.capacities[self.shared[it] as usize]);
            if bound < least.fold(f64::INFINITY, f64::min) {
                self.levels.push(Least(bound, links + flow));
            }
        }
        // Most levels are met as they were computed: sorting them takes less than a heap of all. Those of links that others left more to
        // are in one.
        self.levels.sort_unstable();
        while let Some(Least(level, at)) = self.lowest() {
            if at >= links {
                self.freeze(at - links, level, now);
                continue;
            }
            let link = at as usize;
            if self.waiting[link] == 0 {
                continue;
            }
            // What a link has left for each grows as others freeze below it.
            let rate = self.spare[link] / f64::from(self.waiting[link]);
            if rate > level * (1.0 + SAME) {
                self.raised.push(Least(rate, at));
                continue;
            }
            let first = self.firsts[link] as usize;
            for it in first..first + self.counts[link] as usize {
                self.freeze(self.members[it], rate, now);
            }
        }
        self.open.clear();
        if self.sorted.is_empty() {
            // Levels were filled from the lowest on: what comes is sorted already where all have the same left.
            self.fresh.sort_unstable_by(|one, other| other.0.total_cmp(&one.0));
            std::mem::swap(&mut self.sorted, &mut self.fresh);
        }
        self.finishing.extend(self.fresh.drain(..));
    }

    /// The lowest level that is left.
    fn lowest(&mut self) -> Option<Least> {
        // The greater of two is the lower.
        if self.levels.last() > self.raised.peek() { self.levels.pop() } else { self.raised.pop() }
    }

    /// Gives an open flow this rate.
    fn freeze(&mut self, flow: u32, rate: f64, now: f64) {
        let at = flow as usize;
        if !std::mem::replace(&mut self.is_open[at], false) {
            return;
        }
        for it in self.shared(flow) {
            let link = self.shared[it] as usize;
            self.spare[link] -= rate;
            self.waiting[link] -= 1;
        }
        if (rate - self.rates[at]).abs() <= rate * SAME {
            return;
        }
        self.left[at] = (self.left[at] - self.rates[at] * (now - self.since[at])).max(0.0);
        self.since[at] = now;
        self.rates[at] = rate;
        self.ends[at] = now + self.left[at] / rate;
        self.fresh.push(Least(self.ends[at], flow));
    }
}
