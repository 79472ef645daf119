//! What ratio of slow memory a service lives with, and what a server then holds.
//!
//! A service is described by how long its pages lie idle; its coldest pages lie on the slow tier. Or a record of the agent
//! shows with what share of fast memory it lived.

use polder_place::pages::{LocalBounds, RecordedRound, ServicePolicy, TierRule};
use serde::Serialize;

use super::{Control, Idle, Kernel, PAGE_BYTES, Pages, PagesError, Pair, Seen, Service};

/// A service of which a server holds as many containers or VMs as its memory has room for.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// How long its pages lie idle.
    pub idle: Idle,
    /// Bytes of one container or VM.
    pub unit_bytes: f64,
    /// Bytes a second that one draws of memory.
    pub unit_bytes_per_s: f64,
    /// The part of its time that it waits for memory, where all of it is fast.
    pub waits: f64,
}

/// What tiers cost, beside each other and beside the server.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Costs {
    /// A byte of the slow tier, as a part of what a byte of the fast one costs.
    pub slow_cost: f64,
    /// Watts of a byte of the slow tier.
    pub slow_watts_a_byte: f64,
    /// Watts of a server without its slow tier.
    pub server_watts: f64,
    /// What the fast tier is of a server's carbon. A byte of new DIMMs adds as much behind CXL; those used again add none.
    pub dram_carbon: f64,
}

/// A server with so much slow memory beside its fast memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Bytes of the slow tier.
    pub slow_bytes: f64,
    /// Bytes of fast memory for each byte of slow memory.
    pub ratio: f64,
    /// The part of each container that lies on the slow tier.
    pub spill: f64,
    /// Containers or VMs that a server holds.
    pub units: u32,
    /// Bytes a second drawn of the slow tier, and no less: idle times say that a page is read once in each, a program may read it more often.
    pub slow_bytes_per_s: f64,
    /// Accesses a minute to pages of the slow tier, and no less: hint faults, if every page is marked.
    pub touches_a_minute: f64,
    /// Mean seconds of a load; `None` where the tiers cannot give what is drawn.
    pub mean_s: Option<f64>,
    /// By how much longer a container takes than with as many beside it on fast memory alone, as a part of it: what that traffic of slow
    /// memory costs it, which is no more than a lower bound.
    pub slowdown: Option<f64>,
    /// By how much longer it takes on fast memory alone with as many beside it than with as many as fit there: what its
    /// neighbours cost it.
    pub crowding: Option<f64>,
    /// Servers that are needed for as many containers, as a part of those with fast memory alone.
    pub servers: f64,
    /// Cost of memory for each container, as a part of that with fast memory alone.
    pub memory_cost: f64,
    /// Watts for each container.
    pub watts: f64,
    /// Carbon for each container, as a part of that with fast memory alone, with DIMMs that are used again.
    pub carbon: f64,
    /// The same with new DIMMs.
    pub carbon_new: f64,
}

/// A server of these tiers with each amount of slow memory. The fast tier holds one container or more.
#[must_use]
pub fn rows(pair: Pair<'_>, service: &Described, costs: &Costs, slow_bytes: &[f64]) -> Vec<Row> {
    let fast = pair.fast.capacity.value();
    let units_of = |bytes: f64| (bytes / service.unit_bytes + 1e-9).floor();
    let alone = units_of(fast);
    // Latency on fast memory alone, with as many containers as it holds.
    let fast_s = pair.at(alone * service.unit_bytes_per_s, 0.0).fast_s;
    let row = |slow: &f64| {
        let slow = *slow;
        let units = units_of(fast + slow);
        let held = units * service.unit_bytes;
        // Fast memory fills first.
        let spill = ((held - fast) / held).max(0.0);
        let touches_per_s = service.idle.touches_per_s(spill) * held / PAGE_BYTES as f64;
        let drawn = units * service.unit_bytes_per_s;
        let slow_bytes_per_s = touches_per_s * PAGE_BYTES as f64;
        let slow_part = if drawn > 0.0 { (slow_bytes_per_s / drawn).min(1.0) } else { 0.0 };
        let given = drawn <= pair.most(slow_part).min(pair.most(0.0));
        let mean_s = given.then(|| match drawn > 0.0 {
            true => pair.at(drawn, slow_part).mean_s(),
            false => pair.fast.idle_latency(),
        });
        let crowded_s = pair.at(drawn, 0.0).fast_s;
        let memory_cost = (fast + costs.slow_cost * slow) / units / (fast / alone);
        Row {
            slow_bytes: slow,
            ratio: fast / slow,
            spill,
            units: units as u32,
            slow_bytes_per_s,
            touches_a_minute: touches_per_s * 60.0,
            mean_s,
            slowdown: mean_s.map(|mean_s| service.waits * (mean_s / crowded_s - 1.0)),
            crowding: mean_s.map(|_| service.waits * (crowded_s / fast_s - 1.0)),
            servers: alone / units,
            memory_cost,
            watts: (costs.server_watts + costs.slow_watts_a_byte * slow) / units,
            carbon: alone / units,
            carbon_new: (1.0 + costs.dram_carbon * slow / fast) * alone / units,
        }
    };
    slow_bytes.iter().map(row).collect()
}

/// A service as a record of the agent shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lived {
    /// Its name.
    pub name: String,
    /// The most bytes that it had.
    pub bytes: u64,
    /// Rounds that it was seen in.
    pub rounds: usize,
    /// The lowest share of fast memory in a round in which it did not suffer; `None` if it always did.
    pub share: Option<f64>,
    /// The highest share in a round in which it suffered by pressure or refaults; `None` if it never did.
    pub suffered: Option<f64>,
    /// Whether its policy keeps it from the slow tier.
    pub is_opted_out: bool,
}

impl Lived {
    /// Bytes that have to be fast: its lowest share, and all where it opted out or always suffered.
    #[must_use]
    pub fn fast_bytes(&self) -> f64 {
        let share = if self.is_opted_out { 1.0 } else { self.share.unwrap_or(1.0) };
        share * self.bytes as f64
    }
}

/// The services of a record, in the order in which they appear.
#[must_use]
pub fn lived(rounds: &[RecordedRound]) -> Vec<Lived> {
    let mut lives: Vec<Lived> = vec![];
    for RecordedRound { services, limits, .. } in rounds {
        for view in services {
            let bytes = view.seen.fast + view.seen.slow;
            if bytes == 0 {
                continue;
            }
            let at = lives.iter().position(|it| it.name == view.name).unwrap_or_else(|| {
                let (name, is_opted_out) = (view.name.clone(), view.policy.rule == TierRule::OptOut);
                lives.push(Lived { name, bytes: 0, rounds: 0, share: None, suffered: None, is_opted_out });
                lives.len() - 1
            });
            let life = &mut lives[at];
            (life.bytes, life.rounds) = (life.bytes.max(bytes), life.rounds + 1);
            let share = view.seen.local_share();
            let suffers = view.seen.pressure > limits.pressure || view.seen.refaults > limits.refaults;
            if suffers {
                life.suffered = Some(life.suffered.map_or(share, |other| other.max(share)));
            } else {
                life.share = Some(life.share.map_or(share, |other| other.min(share)));
            }
        }
    }
    lives
}

/// Accesses of services, generation by generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Each service with its pages, which are numbered from 0 on.
    pub services: Vec<(String, u32)>,
    /// Accesses of each generation, in their order: service and page.
    pub generations: Vec<Vec<[u32; 2]>>,
}

/// A service of a trace, as it is simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Followed {
    /// Its name.
    pub name: String,
    /// What happened to its pages.
    #[serde(flatten)]
    pub seen: Seen,
    /// The part of its accesses that found their page on the slow tier.
    pub slow_part: f64,
}

impl Trace {
    /// Follows the pages with so much fast memory for each byte of slow memory that both together would hold all pages. Slow
    /// memory has room to spare, because fair share moves pages down before others come up. With fair share the bounds of
    /// every service are the fast part of the memory.
    ///
    /// The kernel's settings are in proportion: of the pages, a 256th is kept free, and a 64th is marked in a generation.
    ///
    /// # Errors
    /// When a service has no pages, or there are too many.
    pub fn follow(&self, ratio: f64, is_fair: bool) -> Result<Vec<Followed>, PagesError> {
        let all: u64 = self.services.iter().map(|(_, pages)| u64::from(*pages)).sum();
        let all = u32::try_from(all).map_err(|_| PagesError::TooMany { pages: all })?;
        let part = ratio / (1.0 + ratio);
        let fast = (f64::from(all) * part).ceil() as u32;
        let free = all / 256 + 1;
        let kernel = Kernel {
            fast_pages: fast.saturating_add(free),
            slow_pages: all,
            low_free: free,
            high_free: free,
            scan: all / 64 + 1,
            ..Kernel::default()
        };
        let local = is_fair.then_some(LocalBounds { low: part, high: part });
        let policy = ServicePolicy { rule: TierRule::OptIn, local, slow_cache: false };
        let service = |(name, pages): &(String, u32)| Service {
            name: name.clone(),
            pages: *pages,
            policy,
            limit: None,
        };
        let services: Vec<_> = self.services.iter().map(service).collect();
        let mut pages = Pages::new(kernel, &services)?;
        let control = Control { step: free, free_low: 0.0, free_high: 0.0 };
        let mut accesses = vec![];
        for (number, generation) in (1..).zip(&self.generations) {
            accesses.clear();
            let number_of = |[service, page]: &[u32; 2]| pages.first_page(*service as usize) + page;
            accesses.extend(generation.iter().map(number_of));
            pages.access(&accesses);
            pages.advance();
            if is_fair {
                pages.round(number, control);
            }
        }
        let followed = |(index, service): (usize, Service)| {
            let seen = pages.seen(index);
            let accesses = (seen.fast_accesses + seen.slow_accesses).max(1) as f64;
            Followed { name: service.name, seen, slow_part: seen.slow_accesses as f64 / accesses }
        };
        Ok(services.into_iter().enumerate().map(followed).collect())
    }
}
