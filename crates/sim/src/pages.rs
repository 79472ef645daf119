//! Pages of a host's services on two tiers of memory, followed access by access.
//!
//! A trace of page numbers goes in. What a Linux kernel does about them comes out: first touches fill the fast tier and
//! then spill, the scanner marks slow pages, an access to a marked page is a hint fault that may promote it, and
//! reclaim demotes the coldest pages while too little of the fast tier is free. Control rounds are those of
//! [`polder_place::pages::decide`], the function that the agent calls.
//!
//! Time passes in generations ([`Pages::advance`]). A page is one byte: its tier, whether it is marked, and the
//! generation of its last access or of its mark. Equal inputs give equal outputs.
//!
//! ```
//! use polder_sim::pages::{Kernel, Pages, Service};
//!
//! let kernel = Kernel { fast_pages: 2, slow_pages: 4, ..Kernel::default() };
//! let mut pages = Pages::new(kernel, &[Service::opt_in("cache", 3)])?;
//! pages.access(&[0, 1, 2]); // The third finds the fast tier full.
//! assert_eq!((pages.seen(0).fast, pages.seen(0).slow), (2, 1));
//! # Ok::<(), polder_sim::pages::PagesError>(())
//! ```

mod idle;
mod load;
pub mod plan;
mod reclaim;
mod rounds;
#[cfg(test)]
mod tests;
mod traffic;
pub mod vistara_services;

pub use idle::{Idle, IdleError};
pub use load::{Load, Pair, pair};
pub use rounds::{Control, PAGE_BYTES};
pub use traffic::TrafficLaw;

use polder_place::pages::{Past, ServicePolicy, TierRule};
use polder_platform::quoted;

/// The page lies on the slow tier.
const SLOW: u8 = 0x80;
/// The next access is a hint fault.
const MARKED: u8 = 0x40;
/// The page has no memory yet.
const ABSENT: u8 = 0x20;
/// The generation of the last access; of a marked page, that of the mark.
const GENERATION: u8 = 0x1f;
/// The age of a page that was not accessed for so many generations or more.
pub const OLDEST: u8 = GENERATION;
/// Pages of a block, all of one service.
const BLOCK_BITS: usize = 10;

/// The two tiers, and the kernel's settings. Counts are of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Pages of the fast tier.
    pub fast_pages: u32,
    /// Pages of the slow tier.
    pub slow_pages: u32,
    /// First touches and promotions leave so many pages of the fast tier free.
    pub min_free: u32,
    /// Reclaim begins when fewer are free.
    pub low_free: u32,
    /// It ends when so many are free.
    pub high_free: u32,
    /// Slow pages of each service that are marked in a generation at most.
    pub scan: u32,
    /// A hint fault promotes if the mark is at most so many generations old.
    pub hot_age: u8,
    /// Pages that are promoted in a generation at most, of all services together.
    pub promotions: u32,
    /// Pages that reclaim demotes in a generation at most: one that is asked for more falls behind.
    pub demotions: u32,
}

impl Default for Kernel {
    /// No memory, no free pages kept, no scan; hot means faulted in the generation of the mark.
    fn default() -> Self {
        Self {
            fast_pages: 0,
            slow_pages: 0,
            min_free: 0,
            low_free: 0,
            high_free: 0,
            scan: 0,
            hot_age: 0,
            promotions: u32::MAX,
            demotions: u32::MAX,
        }
    }
}

/// A service, as a cgroup of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// Pages that it may touch.
    pub pages: u32,
    /// Where it may keep them.
    pub policy: ServicePolicy,
    /// Pages that it may have at most on both tiers, as `memory.max` says it. What is demoted stays charged.
    pub limit: Option<u32>,
}

impl Service {
    /// A service that may use both tiers, without bounds.
    #[must_use]
    pub fn opt_in(name: &str, pages: u32) -> Self {
        let policy = ServicePolicy { rule: TierRule::OptIn, local: None, slow_cache: false };
        Self { name: name.to_owned(), pages, policy, limit: None }
    }
}

/// What happened to the pages of a service so far, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Seen {
    /// On the fast tier now.
    pub fast: u32,
    /// On the slow tier now.
    pub slow: u32,
    /// Accesses that found their page on the fast tier.
    pub fast_accesses: u64,
    /// Accesses that found it on the slow tier.
    pub slow_accesses: u64,
    /// Hint faults, which are among the accesses.
    pub faults: u64,
    /// Pages promoted.
    pub promotions: u64,
    /// Hot pages that stayed: the fast tier had no room.
    pub refused: u64,
    /// Pages demoted.
    pub demotions: u64,
    /// First touches that went to the slow tier because the fast one had no room.
    pub spills: u64,
    /// First touches that found no memory, or their service at its limit: a kernel would kill.
    pub failures: u64,
}

/// Why a host cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PagesError {
    /// A service without pages.
    #[error("service \"{}\" has 0 pages; give it at least 1", quoted(name))]
    Empty {
        /// Its name.
        name: String,
    },
    /// More pages than a page number can tell apart.
    #[error("the services have {pages} pages; give them {} at most", u32::MAX)]
    TooMany {
        /// Pages of all services.
        pages: u64,
    },
    /// More services than a block can name.
    #[error("{services} services; give {} at most", u16::MAX)]
    Services {
        /// How many.
        services: usize,
    },
    /// The free pages are out of order.
    #[error(
        "free pages {min}, {low} and {high} of a fast tier of {fast}; give min <= low <= high <= the fast tier"
    )]
    Free {
        /// Kept free by first touches.
        min: u32,
        /// Where reclaim begins.
        low: u32,
        /// Where it ends.
        high: u32,
        /// Pages of the fast tier.
        fast: u32,
    },
}

/// A service as it is simulated.
#[derive(Clone, Debug)]
struct Group {
    service: Service,
    /// Its first page.
    first: usize,
    /// Where the scanner goes on, from its first page.
    scan_hand: usize,
    /// Where reclaim goes on among pages of equal age.
    reclaim_hand: usize,
    seen: Seen,
}

impl Group {
    fn range(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.service.pages as usize
    }
}

/// The pages of a host.
#[derive(Clone, Debug)]
pub struct Pages {
    kernel: Kernel,
    /// A byte a page.
    state: Vec<u8>,
    /// The service of each block.
    owner: Vec<u16>,
    groups: Vec<Group>,
    /// Accesses to the fast and to the slow tier, by service.
    touched: Vec<[u64; 2]>,
    generation: u8,
    fast_free: u32,
    slow_free: u32,
    promotions_left: u32,
    past: Past,
}

impl Pages {
    /// A host on which no page was touched yet. Pages of a service have consecutive numbers from
    /// [`Pages::first_page`] on.
    ///
    /// # Errors
    /// When a service has no pages, there are too many, or the free pages are out of order.
    pub fn new(kernel: Kernel, services: &[Service]) -> Result<Self, PagesError> {
        let Kernel { fast_pages, slow_pages, min_free, low_free, high_free, .. } = kernel;
        if !(min_free <= low_free && low_free <= high_free && high_free <= fast_pages) {
            let (min, low, high, fast) = (min_free, low_free, high_free, fast_pages);
            return Err(PagesError::Free { min, low, high, fast });
        }
        if services.len() > usize::from(u16::MAX) {
            return Err(PagesError::Services { services: services.len() });
        }
        let (mut groups, mut owner) = (Vec::new(), Vec::new());
        for (index, service) in services.iter().enumerate() {
            if service.pages == 0 {
                return Err(PagesError::Empty { name: service.name.clone() });
            }
            let first = owner.len() << BLOCK_BITS;
            let blocks = (service.pages as usize).div_ceil(1 << BLOCK_BITS);
            owner.extend(std::iter::repeat_n(index as u16, blocks));
            let service = service.clone();
            groups.push(Group { service, first, scan_hand: 0, reclaim_hand: 0, seen: Seen::default() });
        }
        let pages = owner.len() << BLOCK_BITS;
        if pages > u32::MAX as usize {
            return Err(PagesError::TooMany { pages: pages as u64 });
        }
        Ok(Self {
            state: vec![ABSENT; pages],
            owner,
            touched: vec![[0; 2]; groups.len()],
            groups,
            generation: 0,
            fast_free: fast_pages,
            slow_free: slow_pages,
            promotions_left: kernel.promotions,
            past: Past::default(),
            kernel,
        })
    }

    /// The number of the first page of a service.
    ///
    /// # Panics
    /// When there is no such service.
    #[must_use]
    pub fn first_page(&self, service: usize) -> u32 {
        self.groups[service].first as u32
    }

    /// What happened to the pages of a service so far.
    ///
    /// # Panics
    /// When there is no such service.
    #[must_use]
    pub fn seen(&self, service: usize) -> Seen {
        let [fast_accesses, slow_accesses] = self.touched[service];
        let seen = self.groups[service].seen;
        Seen {
            fast_accesses: seen.fast_accesses + fast_accesses,
            slow_accesses: seen.slow_accesses + slow_accesses,
            ..seen
        }
    }

    /// From now on so many pages are promoted in a generation at most.
    pub const fn limit_promotions(&mut self, pages: u32) {
        self.kernel.promotions = pages;
    }

    /// Pages free on the fast and on the slow tier.
    #[must_use]
    pub const fn free(&self) -> [u32; 2] {
        [self.fast_free, self.slow_free]
    }

    /// The tier of a page: whether it lies on the slow one; `None` before its first touch.
    ///
    /// # Panics
    /// When the page is of no service.
    #[must_use]
    pub fn is_slow(&self, page: u32) -> Option<bool> {
        let state = self.state[page as usize];
        (state & ABSENT == 0).then_some(state & SLOW != 0)
    }

    /// Carries out accesses, one after the other.
    ///
    /// # Panics
    /// When a page is of no service.
    pub fn access(&mut self, trace: &[u32]) {
        let mut rest = trace;
        loop {
            let (state, owner, touched) = (&mut self.state[..], &self.owner[..], &mut self.touched[..]);
            let done = touch(state, owner, touched, self.generation, rest);
            let Some(page) = rest.get(done) else { return };
            self.fault(*page as usize);
            rest = &rest[done + 1..];
        }
    }

    /// Frees pages, as a program that unmaps them.
    ///
    /// # Panics
    /// When a page is of no service.
    pub fn release(&mut self, pages: &[u32]) {
        for page in pages {
            let page = *page as usize;
            let state = std::mem::replace(&mut self.state[page], ABSENT);
            let seen = &mut self.groups[usize::from(self.owner[page >> BLOCK_BITS])].seen;
            let (of_service, free) = match state & (ABSENT | SLOW) {
                0 => (&mut seen.fast, &mut self.fast_free),
                SLOW => (&mut seen.slow, &mut self.slow_free),
                _ => continue,
            };
            *of_service -= 1;
            *free += 1;
        }
    }

    /// Ends a generation: pages age, the scanner marks slow pages, and reclaim demotes while too little is free.
    pub fn advance(&mut self) {
        self.generation = (self.generation + 1) & GENERATION;
        self.promotions_left = self.kernel.promotions;
        keep_oldest(&mut self.state, self.generation);
        for group in &mut self.groups {
            let range = group.range();
            let from = group.scan_hand;
            group.scan_hand = mark(&mut self.state[range], from, self.kernel.scan, self.generation);
        }
        self.reclaim();
    }

    /// An access that is more than a note: a first touch, or a hint fault.
    fn fault(&mut self, page: usize) {
        let service = usize::from(self.owner[page >> BLOCK_BITS]);
        let state = self.state[page];
        if state & ABSENT != 0 {
            return self.first_touch(page, service);
        }
        self.touched[service][1] += 1;
        let seen = &mut self.groups[service].seen;
        seen.faults += 1;
        self.state[page] = SLOW | self.generation;
        let is_hot = age(state, self.generation) <= self.kernel.hot_age;
        if !is_hot || self.promotions_left == 0 {
            return;
        }
        if self.fast_free <= self.kernel.min_free {
            seen.refused += 1;
            return;
        }
        self.promotions_left -= 1;
        self.promote(page, service);
    }

    /// Moves a slow page up.
    fn promote(&mut self, page: usize, service: usize) {
        let seen = &mut self.groups[service].seen;
        self.state[page] = self.generation;
        (seen.fast, seen.slow, seen.promotions) = (seen.fast + 1, seen.slow - 1, seen.promotions + 1);
        (self.fast_free, self.slow_free) = (self.fast_free - 1, self.slow_free + 1);
    }

    /// Gives a page its memory: fast before slow, slow before fast for a background service, fast alone for one that opted out.
    fn first_touch(&mut self, page: usize, service: usize) {
        let range = self.groups[service].range();
        assert!(range.contains(&page), "page {page} is of no service; those before it end at {}", range.end);
        let Group { service: Service { policy, limit, .. }, seen, .. } = &mut self.groups[service];
        if limit.is_some_and(|limit| seen.fast + seen.slow >= limit) {
            // To demote frees nothing of a limit (Linux 3f1509c57b1b), and nothing else can be taken of anonymous memory without swap.
            seen.failures += 1;
            return;
        }
        let roomy = self.fast_free > self.kernel.min_free;
        let [fast, slow] = [self.fast_free > 0, self.slow_free > 0];
        let is_slow = match policy.rule {
            TierRule::OptOut if fast => Some(false),
            TierRule::OptOut => None,
            TierRule::Background if slow => Some(true),
            TierRule::OptIn if roomy => Some(false),
            TierRule::OptIn if slow => Some(true),
            TierRule::OptIn | TierRule::Background => fast.then_some(false),
        };
        match is_slow {
            None => seen.failures += 1,
            Some(true) => {
                seen.spills += u64::from(policy.rule == TierRule::OptIn);
                seen.slow += 1;
                self.slow_free -= 1;
                self.touched[service][1] += 1;
                self.state[page] = SLOW | self.generation;
            }
            Some(false) => {
                seen.fast += 1;
                self.fast_free -= 1;
                self.touched[service][0] += 1;
                self.state[page] = self.generation;
            }
        }
    }
}

/// Generations since the last access, or since the mark.
const fn age(state: u8, generation: u8) -> u8 {
    generation.wrapping_sub(state) & GENERATION
}

/// Notes accesses until one is a fault, and tells how many it noted. Its arguments are apart, so that none is read anew for
/// each access.
#[inline(never)]
fn touch(state: &mut [u8], owner: &[u16], touched: &mut [[u64; 2]], generation: u8, trace: &[u32]) -> usize {
    for (index, page) in trace.iter().enumerate() {
        let page = *page as usize;
        let before = state[page];
        if before & (MARKED | ABSENT) != 0 {
            return index;
        }
        state[page] = before & SLOW | generation;
        touched[usize::from(owner[page >> BLOCK_BITS])][usize::from(before >> 7)] += 1;
    }
    trace.len()
}

/// Pages whose last access was so long ago that its generation comes again stay the oldest.
fn keep_oldest(state: &mut [u8], generation: u8) {
    let oldest = (generation + 1) & GENERATION;
    for page in state {
        let again = *page & GENERATION == generation;
        *page = if again { *page & !GENERATION | oldest } else { *page };
    }
}

/// Marks so many slow pages from `from` on, and looks at eight times as many at most, as `task_numa_work` of Linux
/// does. Tells where it goes on.
fn mark(state: &mut [u8], from: usize, scan: u32, generation: u8) -> usize {
    let looks = (scan as usize).saturating_mul(8).min(state.len());
    let (mut at, mut left) = (from, scan);
    for _ in 0..looks {
        if left == 0 {
            break;
        }
        let page = &mut state[at];
        if *page & (SLOW | MARKED | ABSENT) == SLOW {
            *page = SLOW | MARKED | generation;
            left -= 1;
        }
        at = if at + 1 == state.len() { 0 } else { at + 1 };
    }
    at
}
