//! Max-min fair sharing: rates of flows, and the times at which they end.
//!
//! A level is a rate at which some link is full. The solver raises all rates together and freezes the flows of each link that fills
//! (Bertsekas and Gallager, 1992, section 6.5.2). When a flow of rate `r` comes or goes, no flow below `r` changes: a link that is full
//! at a lower level has no flow of that rate. So only flows at that level or above are shared anew. Flows of one size that begin
//! together are therefore shared once: whenever some end, they are the fastest that are left.
//!
//! Three cases need no events: a flow that meets no other, flows that are alike and meet on one link alone, and flows that will end in the
//! order of their rates.

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

/// Levels that differ by more, as a part of them, are apart whatever rounding did.
const APART: f64 = 1e-8;

/// When each flow ends, in seconds, where link `i` carries `capacities[i]` bytes a second and shares are max-min fair.
///
/// The result does not depend on the order of flows, but for rounding in the last digits.
///
/// # Panics
/// When a flow crosses a link that has no capacity, has no links, or is of no bytes: who asks checks that.
#[must_use]
pub fn finish_times(capacities: &[f64], flows: &[Flow]) -> Vec<f64> {
    let (mut sharing, mut ends) = Sharing::new(capacities, flows);
    sharing.run();
    sharing.courses.iter().for_each(|it| ends[it.flow as usize] = it.end);
    ends
}

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

/// A flow that meets others.
struct Meeting {
    /// Its place among all flows.
    flow: u32,
    /// The links that it shares with others: so many from there on.
    begin: u32,
    crossed: u32,
    /// What it gets at most, by those of its links that no other crosses; and whether the others carry more.
    bound: f64,
    is_bounded: bool,
}

impl Meeting {
    /// The same before it starts.
    fn course(self, flows: &[Flow]) -> Course {
        let Self { flow, begin, crossed, bound, is_bounded } = self;
        let Flow { bytes: left, start_s: start, .. } = flows[flow as usize];
        Course {
            flow,
            begin,
            crossed,
            is_open: false,
            is_bounded,
            bound,
            start,
            rate: 0.0,
            left,
            since: 0.0,
            end: 0.0,
        }
    }
}

/// Such a flow on its way: a line of the cache.
struct Course {
    /// Its place among all flows.
    flow: u32,
    /// The links that it shares with others: so many from there on.
    begin: u32,
    crossed: u32,
    /// Whether it takes part in the sharing that is under way.
    is_open: bool,
    is_bounded: bool,
    /// What it gets at most, by those of its links that no other crosses.
    bound: f64,
    start: f64,
    /// Its rate, 0 before it starts and after it ends; what is left of it, and since when; when it ends, as its rate is.
    rate: f64,
    left: f64,
    since: f64,
    end: f64,
}

impl Course {
    fn links(&self) -> std::ops::Range<usize> {
        self.begin as usize..(self.begin + self.crossed) as usize
    }
}

/// A link that several flows cross.
struct SharedLink {
    capacity: f64,
    /// What it has left for the flows that wait for a rate, and how many do.
    spare: f64,
    waiting: u32,
    /// The flows under way on it: the first `count` members from `first` on.
    first: u32,
    count: u32,
    is_touched: bool,
    /// Whether all its flows are as this one, and meet nowhere else.
    is_even: bool,
    example: u32,
}

impl SharedLink {
    fn new(capacity: f64) -> Self {
        assert!(capacity > 0.0, "a link that flows share carries nothing");
        let (spare, is_even) = (capacity, true);
        Self { capacity, spare, waiting: 0, first: 0, count: 0, is_touched: false, is_even, example: 0 }
    }

    /// Counts a flow, which may meet others elsewhere or be bound elsewhere.
    fn count(&mut self, flow: usize, meets_once: bool, flows: &[Flow]) {
        if self.count == 0 {
            self.example = flow as u32;
        }
        self.count += 1;
        let [one, other] = [self.example as usize, flow].map(|it| (flows[it].bytes, flows[it].start_s));
        self.is_even &= meets_once && one == other;
    }

    fn members(&self) -> std::ops::Range<usize> {
        self.first as usize..(self.first + self.count) as usize
    }
}

/// The lesser of two numbers: `f64::min` asks for NaN too.
const fn least_of(one: f64, other: f64) -> f64 {
    if other < one { other } else { one }
}

/// Which links flows cross, and which of them several flows do. A fabric has many more links than a pattern of traffic crosses, so that a
/// bit for each stays in the caches where a count would not.
struct Crossings {
    words: Vec<Word>,
    /// How many links several flows cross.
    count: usize,
}

/// 64 links.
#[derive(Clone, Copy, Default)]
struct Word {
    crossed: u64,
    shared: u64,
    /// How many links of lower words are shared.
    before: u32,
}

impl Crossings {
    fn new(links: usize, flows: &[Flow]) -> Self {
        let mut words = vec![Word::default(); links.div_ceil(64)];
        for link in flows.iter().flat_map(|flow| &flow.links) {
            let word = &mut words[*link as usize / 64];
            let bit = 1 << (link % 64);
            word.shared |= word.crossed & bit;
            word.crossed |= bit;
        }
        let mut before = 0;
        for word in &mut words {
            word.before = before;
            before += word.shared.count_ones();
        }
        Self { words, count: before as usize }
    }

    /// The links that several flows cross.
    fn shared(&self) -> impl Iterator<Item = usize> {
        let words = self.words.iter().enumerate();
        words.flat_map(|(at, word)| {
            let mut left = word.shared;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros() as usize;
                left &= left.wrapping_sub(1);
                (bit < 64).then_some(64 * at + bit)
            })
        })
    }

    /// Which of those a link is.
    fn number(&self, link: u32) -> Option<u32> {
        let Word { shared, before, .. } = self.words[link as usize / 64];
        let bit = 1 << (link % 64);
        (shared & bit != 0).then(|| before + (shared & (bit - 1)).count_ones())
    }
}

/// The state of all flows that meet others, and of the links on which they do.
struct Sharing {
    courses: Vec<Course>,
    links: Vec<SharedLink>,
    /// The shared links of each flow, one flow after the other; and the flows on each.
    shared: Vec<u32>,
    members: Vec<u32>,
    under_way: usize,
    /// When flows end, as their rates are; an entry whose time has changed is passed over. Those of one sharing are sorted, the next at
    /// the end, because equal flows need no more; those of later ones are in a heap.
    sorted: Vec<Least>,
    finishing: BinaryHeap<Least>,
    /// Room for a sharing: links and flows that take part, and their levels.
    touched: Vec<u32>,
    open: Vec<u32>,
    levels: Vec<Least>,
    raised: BinaryHeap<Least>,
    fresh: Vec<Least>,
}

impl Sharing {
    /// All flows before the first start, and when those end that meet no other.
    fn new(capacities: &[f64], flows: &[Flow]) -> (Self, Vec<f64>) {
        let crossings = Crossings::new(capacities.len(), flows);
        let mut links = Vec::with_capacity(crossings.count);
        links.extend(crossings.shared().map(|link| SharedLink::new(capacities[link])));
        let mut ends = vec![0.0; flows.len()];
        let mut meetings = Vec::with_capacity(flows.len());
        let mut shared: Vec<u32> = vec![];
        for (flow, sent) in flows.iter().enumerate() {
            assert!(!sent.links.is_empty() && sent.bytes > 0.0, "a flow of bytes over links");
            let begin = shared.len();
            let (mut bound, mut least) = (f64::INFINITY, f64::INFINITY);
            for link in &sent.links {
                match crossings.number(*link) {
                    None => bound = least_of(bound, capacities[*link as usize]),
                    Some(number) => {
                        least = least_of(least, links[number as usize].capacity);
                        shared.push(number);
                    }
                }
            }
            assert!(bound > 0.0, "a link of flow {flow} carries nothing");
            let crossed = &shared[begin..];
            if crossed.is_empty() {
                // It takes what it takes alone.
                ends[flow] = sent.start_s + sent.bytes / bound;
                continue;
            }
            let meets_once = crossed.len() == 1 && bound >= least;
            crossed.iter().for_each(|link| links[*link as usize].count(flow, meets_once, flows));
            let (flow, begin, crossed) = (flow as u32, begin as u32, crossed.len() as u32);
            meetings.push(Meeting { flow, begin, crossed, bound, is_bounded: bound < least });
        }
        // Flows that are alike and meet on one link alone have equal parts of it until they end, all at once.
        let evenly = |meeting: &Meeting| {
            Some(&links[shared[meeting.begin as usize] as usize]).filter(|link| link.is_even)
        };
        let mut uneven = 0;
        for meeting in &meetings {
            match evenly(meeting) {
                Some(link) => {
                    let flow = &flows[meeting.flow as usize];
                    ends[meeting.flow as usize] =
                        flow.start_s + flow.bytes / (link.capacity / f64::from(link.count));
                }
                None => uneven += 1,
            }
        }
        let mut courses = Vec::with_capacity(uneven);
        courses.extend(
            meetings
                .into_iter()
                .filter(|meeting| evenly(meeting).is_none())
                .map(|meeting| meeting.course(flows)),
        );
        let mut members = 0;
        for link in &mut links {
            link.first = members;
            members += if link.is_even { 0 } else { link.count };
            link.count = 0;
        }
        let sharing = Self {
            courses,
            links,
            shared,
            members: vec![0; members as usize],
            under_way: 0,
            sorted: vec![],
            finishing: BinaryHeap::new(),
            touched: vec![],
            open: vec![],
            levels: vec![],
            raised: BinaryHeap::new(),
            fresh: vec![],
        };
        (sharing, ends)
    }

    /// From the first start to the last end.
    fn run(&mut self) {
        let mut starts: Vec<_> = (0..self.courses.len() as u32).collect();
        let at = |flow: &u32| self.courses[*flow as usize].start;
        if !starts.is_sorted_by(|one, other| at(one) <= at(other)) {
            starts.sort_by(|one, other| at(one).total_cmp(&at(other)));
        }
        let mut waiting = &starts[..];
        loop {
            let start = waiting.first().map(|flow| self.courses[*flow as usize].start);
            let end = self.next_end().map(|(end, _)| end);
            let Some(now) = [start, end].into_iter().flatten().reduce(f64::min) else { return };
            let until = now + now.abs() * SAME;
            let mut level = f64::INFINITY;
            self.touched.clear();
            while let Some((end, flow)) = self.next_end().filter(|(end, _)| *end <= until) {
                level = level.min(self.courses[flow as usize].rate);
                self.leave(flow, end);
            }
            self.remove_ended_flows();
            let count =
                waiting.iter().take_while(|flow| self.courses[**flow as usize].start <= until).count();
            let come: &[u32];
            (come, waiting) = waiting.split_at(count);
            come.iter().for_each(|flow| self.enter(*flow, now));
            if come.len() == self.courses.len() {
                self.open_all(come);
            } else {
                self.open_from(come, level);
            }
            if self.fill(now) && waiting.is_empty() {
                return;
            }
        }
    }

    /// When the next flow ends, and which; entries that say what is no more are dropped.
    fn next_end(&mut self) -> Option<(f64, u32)> {
        let courses = &self.courses;
        let holds = |Least(end, flow): &Least| {
            let course = &courses[*flow as usize];
            course.rate > 0.0 && course.end == *end
        };
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
        self.under_way += 1;
        let course = &mut self.courses[flow as usize];
        course.since = now;
        for link in &self.shared[course.links()] {
            let link = &mut self.links[*link as usize];
            self.members[link.members().end] = flow;
            link.count += 1;
        }
    }

    fn leave(&mut self, flow: u32, end: f64) {
        self.under_way -= 1;
        let course = &mut self.courses[flow as usize];
        (course.end, course.rate) = (end, 0.0);
        let links = course.links();
        self.touch(links);
    }

    /// Touches the shared links that stand there.
    fn touch(&mut self, links: std::ops::Range<usize>) {
        for link in &self.shared[links] {
            if !std::mem::replace(&mut self.links[*link as usize].is_touched, true) {
                self.touched.push(*link);
            }
        }
    }

    /// Takes flows that have ended off the links that they crossed.
    fn remove_ended_flows(&mut self) {
        for link in &self.touched {
            let link = &mut self.links[*link as usize];
            let mut kept = link.first;
            for place in link.members() {
                if self.courses[self.members[place] as usize].rate > 0.0 {
                    self.members[kept as usize] = self.members[place];
                    kept += 1;
                }
            }
            link.count = kept - link.first;
        }
    }

    /// Opens all flows there are.
    fn open_all(&mut self, flows: &[u32]) {
        flows.iter().for_each(|flow| self.open_flow(*flow));
        self.touched.extend(0..self.links.len() as u32);
    }

    /// Opens the flows that came, and those of their level or of this level or above that can be reached from the links that were touched,
    /// and from those that came.
    fn open_from(&mut self, come: &[u32], mut level: f64) {
        for flow in come {
            self.open_flow(*flow);
            // It gets at least an equal part of each of its links.
            let course = &self.courses[*flow as usize];
            let parts = self.shared[course.links()].iter().map(|index| {
                let link = &self.links[*index as usize];
                link.capacity / f64::from(link.count)
            });
            level = parts.fold(level.min(course.bound), f64::min);
        }
        level *= 1.0 - 1e3 * SAME;
        // Both lists grow while they are gone through.
        let (mut link, mut flow) = (0, 0);
        while link < self.touched.len() || flow < self.open.len() {
            if let Some(at) = self.touched.get(link).map(|index| *index as usize) {
                link += 1;
                for place in self.links[at].members() {
                    let member = self.members[place];
                    if self.courses[member as usize].rate >= level {
                        self.open_flow(member);
                    }
                }
            } else {
                let links = self.courses[self.open[flow] as usize].links();
                flow += 1;
                self.touch(links);
            }
        }
    }

    fn open_flow(&mut self, flow: u32) {
        if !std::mem::replace(&mut self.courses[flow as usize].is_open, true) {
            self.open.push(flow);
        }
    }

    /// Raises the rates of all open flows together, and freezes those of each link that fills. Says whether no flow that is under way will
    /// end at another time, unless one comes.
    fn fill(&mut self, now: f64) -> bool {
        // What is under way and was not opened may end in any order.
        let all = !self.open.is_empty() && self.open.len() == self.under_way;
        let mut order = EndOrder::new(all);
        self.levels.clear();
        for at in &self.touched {
            let link = &mut self.links[*at as usize];
            link.is_touched = false;
            let (mut taken, mut waiting) = (0.0, link.count);
            if !all {
                for place in link.members() {
                    let member = &self.courses[self.members[place] as usize];
                    if !member.is_open {
                        taken += member.rate;
                        waiting -= 1;
                    }
                }
            }
            (link.spare, link.waiting) = (link.capacity - taken, waiting);
            if waiting > 0 {
                self.levels.push(Least(link.spare / f64::from(waiting), *at));
            }
        }
        // A flow's own bound is a level where it can be lower than what its shared links give.
        let links = self.links.len() as u32;
        for flow in &self.open {
            let Course { is_bounded, bound, .. } = self.courses[*flow as usize];
            if is_bounded {
                self.levels.push(Least(bound, links + flow));
            }
        }
        // Most levels are met as they were computed: sorting them takes less than a heap of all. Those of links that others left more to
        // are in one.
        self.levels.sort_by(|one, other| other.0.total_cmp(&one.0));
        while let Some(Least(level, at)) = self.lowest() {
            if at >= links {
                self.freeze(at - links, level, now, &mut order);
                continue;
            }
            let link = &self.links[at as usize];
            if link.waiting == 0 {
                continue;
            }
            // What a link has left for each grows as others freeze below it.
            let rate = link.spare / f64::from(link.waiting);
            if rate > level * (1.0 + SAME) {
                self.raised.push(Least(rate, at));
                continue;
            }
            for place in link.members() {
                self.freeze(self.members[place], rate, now, &mut order);
            }
        }
        self.open.clear();
        if self.sorted.is_empty() {
            // Levels were filled from the lowest on: what comes is sorted already where all have the same left.
            self.fresh.sort_unstable_by(|one, other| other.0.total_cmp(&one.0));
            std::mem::swap(&mut self.sorted, &mut self.fresh);
        }
        self.finishing.extend(self.fresh.drain(..));
        order.is_kept
    }

    /// The lowest level that is left.
    fn lowest(&mut self) -> Option<Least> {
        // The greater of two is the lower.
        if self.levels.last() > self.raised.peek() { self.levels.pop() } else { self.raised.pop() }
    }

    /// Gives an open flow this rate.
    fn freeze(&mut self, flow: u32, rate: f64, now: f64, order: &mut EndOrder) {
        let course = &mut self.courses[flow as usize];
        if !std::mem::replace(&mut course.is_open, false) {
            return;
        }
        for link in &self.shared[course.links()] {
            let link = &mut self.links[*link as usize];
            link.spare -= rate;
            link.waiting -= 1;
        }
        if (rate - course.rate).abs() > rate * SAME {
            course.left = (course.left - course.rate * (now - course.since)).max(0.0);
            course.since = now;
            course.rate = rate;
            course.end = now + course.left / rate;
            self.fresh.push(Least(course.end, flow));
        }
        order.add(course.rate, course.end);
    }
}

/// Whether flows end in the order of their rates, the fastest first, and those of one level together. Then none is left to get what
/// another leaves.
struct EndOrder {
    is_kept: bool,
    /// The least and the highest rate of the level that was met last.
    rates: [f64; 2],
    /// When the first and the last flow of it end, and when the first one of those below.
    ends: [f64; 2],
    below: f64,
}

impl EndOrder {
    const fn new(is_kept: bool) -> Self {
        let (rates, ends) = ([0.0; 2], [f64::INFINITY; 2]);
        Self { is_kept, rates, ends, below: f64::INFINITY }
    }

    /// A flow of the same level as the one before, or of a higher one.
    fn add(&mut self, rate: f64, end: f64) {
        if !self.is_kept {
            return;
        }
        if rate > self.rates[1] * (1.0 + APART) {
            self.below = self.ends[0];
            (self.rates, self.ends) = ([rate; 2], [end; 2]);
        }
        let [first, last] = &mut self.ends;
        (*first, *last) = (first.min(end), last.max(end));
        self.rates[1] = self.rates[1].max(rate);
        self.is_kept = rate >= self.rates[0] * (1.0 - APART)
            && *last <= *first + first.abs() * SAME
            && *last + last.abs() * APART < self.below;
    }
}
