//! Holds the pages of a host to a model that is as plain as can be, and to what always holds.

use polder_place::pages::{LocalBounds, RecordedRound, ServicePolicy, replay};
use proptest::prelude::*;

use super::*;
use crate::random::Random;

/// A page of the plain model.
#[derive(Clone, Debug, Default)]
struct PlainPage {
    is_present: bool,
    is_slow: bool,
    is_marked: bool,
    /// The generation of its last access, or of its mark.
    since: u64,
}

/// A service of the plain model.
#[derive(Clone, Debug)]
struct PlainService {
    policy: ServicePolicy,
    limit: Option<u32>,
    pages: Vec<PlainPage>,
    scan_hand: usize,
    reclaim_hand: usize,
    seen: Seen,
}

/// The same host: no bits, no bytes, no tables, everything counted anew.
#[derive(Clone, Debug)]
struct Plain {
    kernel: Kernel,
    services: Vec<PlainService>,
    generation: u64,
    promotions_left: u32,
}

impl Plain {
    fn new(kernel: Kernel, services: &[Service]) -> Self {
        let plain = |service: &Service| PlainService {
            policy: service.policy,
            limit: service.limit,
            pages: vec![PlainPage::default(); service.pages as usize],
            scan_hand: 0,
            reclaim_hand: 0,
            seen: Seen::default(),
        };
        let services = services.iter().map(plain).collect();
        Self { kernel, services, generation: 0, promotions_left: kernel.promotions }
    }

    fn count(&self, is_slow: bool) -> u32 {
        let pages = self.services.iter().flat_map(|service| &service.pages);
        pages.filter(|page| page.is_present && page.is_slow == is_slow).count() as u32
    }

    fn fast_free(&self) -> u32 {
        self.kernel.fast_pages - self.count(false)
    }

    fn slow_free(&self) -> u32 {
        self.kernel.slow_pages - self.count(true)
    }

    fn age(&self, page: &PlainPage) -> u64 {
        (self.generation - page.since).min(u64::from(OLDEST))
    }

    fn access(&mut self, service: usize, page: usize) {
        let (fast_free, slow_free) = (self.fast_free(), self.slow_free());
        let age = self.age(&self.services[service].pages[page]);
        let PlainService { policy, limit, pages, seen, .. } = &mut self.services[service];
        let charged = pages.iter().filter(|page| page.is_present).count();
        let page = &mut pages[page];
        if !page.is_present {
            if limit.is_some_and(|limit| charged >= limit as usize) {
                seen.failures += 1;
                return;
            }
            let order: &[bool] = match policy.rule {
                TierRule::OptOut => &[false],
                TierRule::Background => &[true, false],
                TierRule::OptIn if fast_free > self.kernel.min_free => &[false],
                TierRule::OptIn => &[true, false],
            };
            let free = |is_slow: &&bool| if **is_slow { slow_free > 0 } else { fast_free > 0 };
            let Some(is_slow) = order.iter().find(free) else {
                seen.failures += 1;
                return;
            };
            *page =
                PlainPage { is_present: true, is_slow: *is_slow, is_marked: false, since: self.generation };
            seen.spills += u64::from(*is_slow && policy.rule == TierRule::OptIn);
        } else if page.is_marked {
            seen.faults += 1;
            page.is_marked = false;
            if age <= u64::from(self.kernel.hot_age) && self.promotions_left > 0 {
                if fast_free > self.kernel.min_free {
                    seen.slow_accesses += 1;
                    seen.promotions += 1;
                    self.promotions_left -= 1;
                    *page = PlainPage { is_slow: false, since: self.generation, ..page.clone() };
                    return;
                }
                seen.refused += 1;
            }
        }
        page.since = self.generation;
        let accesses = if page.is_slow { &mut seen.slow_accesses } else { &mut seen.fast_accesses };
        *accesses += 1;
    }

    fn demote(&mut self, service: usize, wanted: usize) {
        let wanted = wanted.min(self.slow_free() as usize);
        let (pages, hand) = (&self.services[service].pages, self.services[service].reclaim_hand);
        let mut order: Vec<_> = (hand..pages.len())
            .chain(0..hand)
            .filter(|at| pages[*at].is_present && !pages[*at].is_slow)
            .map(|at| (self.age(&pages[at]), at))
            .collect();
        // Stable: those of equal age stay in turn.
        order.sort_by_key(|(age, _)| std::cmp::Reverse(*age));
        let (taken, left) = order.split_at(wanted.min(order.len()));
        let is_cut = matches!((taken.last(), left.first()), (Some(one), Some(other)) if one.0 == other.0);
        let PlainService { pages, reclaim_hand, seen, .. } = &mut self.services[service];
        for (_, at) in taken {
            pages[*at].is_slow = true;
        }
        if is_cut {
            *reclaim_hand = (taken[taken.len() - 1].1 + 1) % pages.len();
        }
        seen.demotions += taken.len() as u64;
    }

    /// Pages of the fast tier that may go down, of this age or older.
    fn reclaimable(&self, service: usize, least_age: u64) -> usize {
        let PlainService { policy, pages, .. } = &self.services[service];
        let fast = pages.iter().filter(|page| page.is_present && !page.is_slow);
        let opted_out = policy.rule == TierRule::OptOut;
        if opted_out { 0 } else { fast.filter(|page| self.age(page) >= least_age).count() }
    }

    fn advance(&mut self) {
        self.generation += 1;
        self.promotions_left = self.kernel.promotions;
        for PlainService { pages, scan_hand, .. } in &mut self.services {
            let (mut left, count) = (self.kernel.scan, pages.len());
            for _ in 0..(8 * self.kernel.scan as usize).min(count) {
                if left == 0 {
                    break;
                }
                let page = &mut pages[*scan_hand];
                if page.is_present && page.is_slow && !page.is_marked {
                    (page.is_marked, page.since) = (true, self.generation);
                    left -= 1;
                }
                *scan_hand = (*scan_hand + 1) % count;
            }
        }
        if self.fast_free() >= self.kernel.low_free {
            return;
        }
        let missing = self.kernel.high_free - self.fast_free();
        let mut wanted = missing.min(self.slow_free()).min(self.kernel.demotions) as usize;
        let services = 0..self.services.len();
        let own: Vec<_> = services.clone().map(|service| self.reclaimable(service, 0)).collect();
        let mut given = vec![0; own.len()];
        // What was not accessed in the generation before goes first; each in proportion to all of its pages, as far as it has such.
        for least_age in [2, 0] {
            loop {
                let rest = |service: usize| self.reclaimable(service, least_age) - given[service];
                let from: Vec<_> = services.clone().map(|it| (it, rest(it))).filter(|it| it.1 > 0).collect();
                if wanted == 0 || from.is_empty() {
                    break;
                }
                let mut all: usize = from.iter().map(|(service, _)| own[*service]).sum();
                for (service, rest) in from {
                    let part = (wanted * own[service]).div_ceil(all).min(rest);
                    given[service] += part;
                    wanted -= part;
                    all -= own[service];
                }
            }
        }
        for service in services {
            self.demote(service, given[service]);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Access(usize, usize),
    Advance,
    Release(usize, usize),
}

fn any_policy() -> impl Strategy<Value = ServicePolicy> {
    let rule = prop_oneof![
        4 => Just(TierRule::OptIn), 1 => Just(TierRule::OptOut), 1 => Just(TierRule::Background)
    ];
    rule.prop_map(|rule| ServicePolicy { rule, local: None, slow_cache: false })
}

fn any_host() -> impl Strategy<Value = (Kernel, Vec<Service>)> {
    let limit = prop_oneof![2 => Just(None), 1 => (0..40_u32).prop_map(Some)];
    let services = proptest::collection::vec((1..40_u32, any_policy(), limit), 1..5);
    let free = proptest::collection::vec(0..6_u32, 3);
    (services, 6..50_u32, 0..80_u32, free, 0..20_u32, 0..40_u8, 0..9_u32, 0..9_u32).prop_map(
        |(services, fast_pages, slow_pages, mut free, scan, hot_age, promotions, demotions)| {
            free.sort_unstable();
            let kernel = Kernel {
                fast_pages,
                slow_pages,
                min_free: free[0],
                low_free: free[1],
                high_free: free[2],
                scan,
                hot_age: hot_age.min(OLDEST),
                promotions,
                demotions,
            };
            let service =
                |(index, (pages, policy, limit))| Service { name: format!("s{index}"), pages, policy, limit };
            (kernel, services.into_iter().enumerate().map(service).collect())
        },
    )
}

fn any_steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (0..4_usize, 0..40_usize).prop_map(|(service, page)| Step::Access(service, page)),
        2 => Just(Step::Advance),
        1 => (0..4_usize, 0..40_usize).prop_map(|(service, page)| Step::Release(service, page)),
    ];
    proptest::collection::vec(step, 1..900)
}

/// What always holds: pages are conserved, no tier holds more than it has, and one that opted out has nothing on the slow tier.
fn check(pages: &Pages) -> Result<(), TestCaseError> {
    let [fast_free, slow_free] = pages.free();
    let (mut fast, mut slow) = (0, 0);
    for group in &pages.groups {
        let states = &pages.state[group.range()];
        let count = |bits| states.iter().filter(|state| **state & (SLOW | ABSENT) == bits).count() as u32;
        prop_assert_eq!((count(0), count(SLOW)), (group.seen.fast, group.seen.slow));
        prop_assert!(states.iter().all(|state| state & MARKED == 0 || state & SLOW != 0));
        if group.service.policy.rule == TierRule::OptOut {
            prop_assert_eq!(group.seen.slow, 0);
        }
        (fast, slow) = (fast + group.seen.fast, slow + group.seen.slow);
    }
    prop_assert_eq!(fast + fast_free, pages.kernel.fast_pages);
    prop_assert_eq!(slow + slow_free, pages.kernel.slow_pages);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_decision_is_that_of_the_plain_model((kernel, services) in any_host(), steps in any_steps()) {
        let (mut pages, mut plain) = (Pages::new(kernel, &services).unwrap(), Plain::new(kernel, &services));
        let place = |service: usize, page: usize| {
            let service = service % services.len();
            (service, page % services[service].pages as usize)
        };
        for step in steps {
            match step {
                Step::Access(service, page) => {
                    let (service, page) = place(service, page);
                    pages.access(&[pages.first_page(service) + page as u32]);
                    plain.access(service, page);
                }
                Step::Advance => {
                    pages.advance();
                    plain.advance();
                    check(&pages)?;
                }
                Step::Release(service, page) => {
                    let (service, page) = place(service, page);
                    pages.release(&[pages.first_page(service) + page as u32]);
                    plain.services[service].pages[page] = PlainPage::default();
                }
            }
        }
        check(&pages)?;
        for (index, service) in plain.services.iter().enumerate() {
            let count = |is_slow| {
                service.pages.iter().filter(|page| page.is_present && page.is_slow == is_slow).count() as u32
            };
            let seen = Seen { fast: count(false), slow: count(true), ..service.seen };
            prop_assert_eq!(pages.seen(index), seen, "service {}", index);
            for (at, page) in service.pages.iter().enumerate() {
                let tier = pages.is_slow(pages.first_page(index) + at as u32);
                prop_assert_eq!(tier, page.is_present.then_some(page.is_slow), "service {} page {}", index, at);
            }
        }
    }

    #[test]
    fn a_trace_gives_the_same_in_one_piece_and_in_many(
        (kernel, services) in any_host(), seed in any::<u64>(), pieces in 1..50_usize,
    ) {
        let (mut whole, mut cut) = (Pages::new(kernel, &services).unwrap(), Pages::new(kernel, &services).unwrap());
        let mut random = Random::new(seed);
        for _ in 0..20 {
            let draw = |_| {
                let service = random.below(services.len() as u32) as usize;
                whole.first_page(service) + random.below(services[service].pages)
            };
            let trace: Vec<u32> = (0..100).map(draw).collect();
            whole.access(&trace);
            trace.chunks(pieces).for_each(|piece| cut.access(piece));
            whole.advance();
            cut.advance();
        }
        prop_assert_eq!(&whole.state, &cut.state);
        for service in 0..services.len() {
            prop_assert_eq!(whole.seen(service), cut.seen(service));
        }
    }

    #[test]
    fn bounds_of_every_service_hold_within_twelve_rounds_and_the_record_replays(
        sizes in proptest::collection::vec(200..3000_u32, 2..5), seed in any::<u64>(),
    ) {
        let all: u32 = sizes.iter().sum();
        let local = LocalBounds { low: 0.5, high: 0.6 };
        let policy = ServicePolicy { rule: TierRule::OptIn, local: Some(local), slow_cache: false };
        let service = |(index, pages): (usize, &u32)| Service { name: format!("s{index}"), pages: *pages, policy, limit: None };
        let services: Vec<_> = sizes.iter().enumerate().map(service).collect();
        let kernel = Kernel { fast_pages: all, slow_pages: all, scan: all, ..Kernel::default() };
        let mut pages = Pages::new(kernel, &services).unwrap();
        let mut random = Random::new(seed);
        let control = Control { step: all / 12 + 1, free_low: 0.0, free_high: 0.0 };
        let mut record: Vec<RecordedRound> = vec![];
        for number in 1..=12 {
            for (index, size) in sizes.iter().enumerate() {
                let first = pages.first_page(index);
                // All of it at first, then a hot tenth.
                let end = if number == 1 { *size } else { size / 10 };
                pages.access(&(first..first + end).collect::<Vec<_>>());
                pages.access(&[first + random.below(*size)]);
            }
            pages.advance();
            record.push(pages.round(number, control));
        }
        for (index, size) in sizes.iter().enumerate() {
            let seen = pages.seen(index);
            let share = f64::from(seen.fast) / f64::from(*size);
            prop_assert!(share <= local.high + 1.0 / f64::from(*size), "{index}: {share}");
            // A hot page is never among the coldest two fifths.
            let first = pages.first_page(index);
            prop_assert!((first..first + size / 10).all(|page| pages.is_slow(page) == Some(false)));
        }
        let (moves, otherwise) = replay(&record);
        prop_assert!(moves > 0 && otherwise.is_none());
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let refused = |kernel, services: &[Service]| Pages::new(kernel, services).unwrap_err().to_string();
    let empty = refused(Kernel::default(), &[Service::opt_in("web", 0)]);
    assert_eq!(empty, "service \"web\" has 0 pages; give it at least 1");
    let free = refused(Kernel { fast_pages: 9, low_free: 5, high_free: 4, ..Kernel::default() }, &[]);
    assert!(free.starts_with("free pages 0, 5 and 4 of a fast tier of 9"), "{free}");
    let many = refused(Kernel::default(), &[Service::opt_in("a", u32::MAX), Service::opt_in("b", 1)]);
    assert!(many.contains("give them 4294967295 at most"), "{many}");
}

#[test]
fn the_coldest_pages_go_down_and_a_hot_one_comes_up() {
    let kernel = Kernel {
        fast_pages: 4,
        slow_pages: 4,
        low_free: 1,
        high_free: 2,
        scan: 8,
        hot_age: 0,
        ..Kernel::default()
    };
    let mut pages = Pages::new(kernel, &[Service::opt_in("db", 4)]).unwrap();
    pages.access(&[0, 1, 2, 3]);
    pages.advance();
    assert_eq!([0, 1, 2, 3].map(|page| pages.is_slow(page)), [true, true, false, false].map(Some));
    pages.access(&[2, 3]);
    pages.advance(); // Marks 0 and 1.
    pages.access(&[1]);
    let seen = pages.seen(0);
    assert_eq!((seen.faults, seen.promotions, seen.demotions, seen.fast), (1, 1, 2, 3));
    pages.access(&[2, 3]);
    pages.advance();
    pages.advance();
    pages.access(&[0]); // Its mark is two generations old: not hot.
    assert_eq!((pages.seen(0).faults, pages.seen(0).promotions, pages.is_slow(0)), (2, 1, Some(true)));
}

/// Three services of 100 pages: all of the first are hot, of the others 90 and 50. Fast memory is full.
fn hot_and_cold(wanted: u32) -> Vec<u64> {
    let kernel =
        Kernel { fast_pages: 300, slow_pages: 300, low_free: wanted, high_free: wanted, ..Kernel::default() };
    let services = ["hot", "warm", "cold"].map(|name| Service::opt_in(name, 100));
    let mut pages = Pages::new(Kernel { low_free: 0, high_free: 0, ..kernel }, &services).unwrap();
    let first = [0, 1, 2].map(|service| pages.first_page(service));
    let touch = |counts: [u32; 3]| {
        (0..3).flat_map(move |at: usize| first[at]..first[at] + counts[at]).collect::<Vec<_>>()
    };
    pages.access(&touch([100; 3]));
    pages.advance();
    pages.access(&touch([100, 90, 50]));
    pages.kernel = kernel;
    pages.advance();
    (0..3).map(|service| pages.seen(service).demotions).collect()
}

#[test]
fn hot_pages_of_a_service_are_spared_while_another_has_cold_ones() {
    assert_eq!(hot_and_cold(10), [0, 5, 5], "in proportion to size");
    assert_eq!(hot_and_cold(40), [0, 10, 30], "as far as each has cold pages");
    assert_eq!(hot_and_cold(60), [0, 10, 50], "all cold pages");
    assert_eq!(hot_and_cold(90), [10, 20, 60], "then hot ones, in proportion to size");
}

#[test]
fn a_trace_with_cold_pages_lives_with_slow_memory_and_fair_share_holds_its_bounds() {
    let mut trace =
        plan::Trace { services: vec![("a".into(), 4000), ("b".into(), 4000)], ..Default::default() };
    let mut random = Random::new(3);
    let all = |service| (0..4000).map(move |page| [service, page]);
    trace.generations.push(all(0).chain(all(1)).collect());
    for _ in 0..300 {
        // A tenth of each is hot.
        trace.generations.push((0..2000).map(|at| [at % 2, random.below(400)]).collect());
    }
    let [alone, fair] = [false, true].map(|is_fair| trace.follow(3.0, is_fair).unwrap());
    for followed in [&alone, &fair] {
        assert!(followed.iter().all(|it| it.slow_part < 0.05 && it.seen.failures == 0), "{followed:?}");
    }
    let share = |it: &plan::Followed| f64::from(it.seen.fast) / 4000.0;
    // The first one takes what there is. Fair share takes back what is over 75%.
    assert!(share(&alone[0]) > 0.95 && share(&fair[0]) <= 0.75, "{alone:?} {fair:?}");
    let hot = plan::Trace { generations: vec![trace.generations[0].clone(); 50], ..trace };
    assert!(hot.follow(1.0, false).unwrap().iter().any(|it| it.slow_part > 0.3));
}
