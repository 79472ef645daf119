//! A simulated server with the agent of users: its code, on a tree of files that simulated pages fill and that they follow.

use polder_agent::{Agent, Policy};
use polder_dev::trace::Touches;
use polder_linux::fake::Tree;
use polder_linux::{Kernel as _, PROMOTION_LIMIT};
use polder_platform::{BuiltTier, Platform};
use polder_sim::Random;
use polder_sim::pages::vistara_services::ServicesFigure;
use polder_sim::pages::{Idle, Kernel, Pages, Service};
use serde::Serialize;

use crate::Failure;

/// Where the agent notes settings.
const JOURNAL: &str = "/run/polder/agent.journal";

/// The files of a server whose tiers have so many GB, whose link is that of `slow`, and whose kernel moves so many GB a second.
pub(super) fn tree([fast_gb, slow_gb]: [f64; 2], slow: &BuiltTier, moves_gb: f64) -> Tree {
    let tree = Tree::new((fast_gb * 1e9) as u64);
    tree.set_slow((slow_gb * 1e9) as u64);
    tree.set_bandwidth((slow.bandwidth(1.0).min(slow.bandwidth(0.0)) / 1e6) as u64);
    tree.moves_at(moves_gb * 1e9);
    tree
}

/// The policy of a user that gives bounds for each service, and nothing else.
pub(super) fn policy(names: &[&str], [low, high]: [f64; 2]) -> String {
    let service = |name: &&str| {
        format!(
            "[service.{name}]\ncgroup = \"/{name}\"\ntier = \"opt-in\"\nlocal_low = {low:?}\nlocal_high = {high:?}\n"
        )
    };
    names.iter().map(service).collect()
}

/// The agent of a server whose pages are simulated. Its services are those of the pages, in their order.
pub(super) struct Operated<'t> {
    tree: &'t Tree,
    agent: Agent<&'t Tree>,
    services: Vec<Found>,
    page_bytes: f64,
    /// Bytes that the kernel may promote, and are no whole page yet.
    promotable: f64,
    /// The second of the next round.
    due_s: f64,
    /// Bytes that the last round moved down.
    pub(super) demoted: u64,
}

/// A service as the agent finds it.
struct Found {
    cgroup: String,
    /// Bytes that went down in the files, and are no whole page yet.
    owed: f64,
    /// Pages that had been promoted after the last round.
    promoted: u64,
}

impl<'t> Operated<'t> {
    /// Starts the agent with a policy for these services, on the files of the server.
    pub(super) fn start(
        tree: &'t Tree,
        names: &[&str],
        bounds: [f64; 2],
        pages_a_gb: u32,
    ) -> Result<Self, Failure> {
        for name in names {
            tree.add_group(&format!("/{name}"), [0, 0]);
        }
        let policy = Policy::parse(&policy(names, bounds)).map_err(|error| Failure(error.to_string()))?;
        let (agent, _) =
            Agent::start(tree, policy, JOURNAL, false).map_err(|error| Failure(error.to_string()))?;
        let service = |name: &&str| Found { cgroup: format!("/{name}"), owed: 0.0, promoted: 0 };
        let services = names.iter().map(service).collect();
        let page_bytes = 1e9 / f64::from(pages_a_gb);
        Ok(Self { tree, agent, services, page_bytes, promotable: 0.0, due_s: 0.0, demoted: 0 })
    }

    /// The end of a second. If a round is due, the agent finds the pages as they are, and they move as it asks the kernel to.
    pub(super) fn second(&mut self, second: u32, pages: &mut Pages) -> Result<(), Failure> {
        self.demoted = 0;
        // The kernel of the next second keeps to the limit that is written now.
        let limit = |agent: &Self| agent.tree.read(PROMOTION_LIMIT).ok()?.trim().parse::<f64>().ok();
        self.promotable = (self.promotable % self.page_bytes)
            + limit(self).map_or(f64::INFINITY, |mib| mib * f64::from(1 << 20));
        pages.limit_promotions((self.promotable / self.page_bytes) as u32);
        if f64::from(second) < self.due_s {
            return Ok(());
        }
        let of_tree = |service: usize| {
            let seen = pages.seen(service);
            [seen.fast, seen.slow].map(|pages| (f64::from(pages) * self.page_bytes) as u64)
        };
        let before: Vec<[u64; 2]> = (0..self.services.len()).map(of_tree).collect();
        for (index, (service, bytes)) in self.services.iter().zip(&before).enumerate() {
            let promoted = pages.seen(index).promotions - service.promoted;
            self.tree.promotes_of(&service.cgroup, (promoted as f64 * self.page_bytes) as u64);
            self.tree.put_bytes(&service.cgroup, *bytes);
        }
        let began = self.tree.now();
        let (round, _) =
            self.agent.round(u64::from(second) * 1000).map_err(|error| Failure(error.to_string()))?;
        self.demoted = round.services.iter().map(|row| row.demoted).sum();
        let took = self.tree.now() - began;
        // The next begins a period after this one, or as soon as the kernel has done what it was asked to.
        self.due_s = f64::from(second) + self.agent.policy().period.max(took).as_secs_f64();
        for (index, (service, before)) in self.services.iter_mut().zip(before).enumerate() {
            let down = before[0] as f64 - self.tree.bytes(&service.cgroup)[0] as f64 + service.owed;
            let whole = (down / self.page_bytes).trunc();
            service.owed = down - whole * self.page_bytes;
            match whole > 0.0 {
                true => drop(pages.demote(index, whole as u32)),
                false => pages.bring_up(index, -whole as u64),
            }
            service.promoted = pages.seen(index).promotions;
        }
        Ok(())
    }
}

/// What became of the services of [`by_default`].
#[derive(Clone, Debug, Serialize)]
pub(super) struct ByDefault {
    /// GB that the kernel moves in a second.
    pub(super) moves_gb: f64,
    /// Seconds until all services are within their bounds; [`None`] where they are not in ten minutes.
    pub(super) within_s: Option<u32>,
    /// GB that went down.
    pub(super) demoted_gb: f64,
    /// GB that a round moved down at most.
    pub(super) most_gb: f64,
    /// The part of each service that is local in the end.
    pub(super) local: Vec<f64>,
}

/// Tiers of the server, in GB.
pub(super) const TIERS_GB: [f64; 2] = [768.0, 256.0];
/// Its services, the GB of each, and the idle times of Table I that it has.
pub(super) const SERVICES: [(&str, f64, &str); 2] = [("web", 220.0, "web1"), ("cache", 430.0, "cache")];
/// Bounds of both: three quarters of the tiers are local.
pub(super) const BOUNDS: [f64; 2] = [0.70, 0.75];
const PAGES_A_GB: u32 = 64;
const LONGEST_S: u32 = 600;

/// Services that lie on local memory, until the agent gets bounds for them and nothing else.
pub(super) fn by_default(moves_gb: f64) -> Result<ByDefault, Failure> {
    let pages_of = |gb: f64| (gb * f64::from(PAGES_A_GB)).round() as u32;
    // 2% of local memory are kept free, and a process scans 256 MB a second, as in Table IX.
    let free = pages_of(TIERS_GB[0] * 0.02);
    let kernel = Kernel {
        fast_pages: pages_of(TIERS_GB[0]),
        slow_pages: pages_of(TIERS_GB[1]),
        low_free: free,
        high_free: free,
        scan: pages_of(0.25),
        ..Kernel::default()
    };
    let services: Vec<_> =
        SERVICES.iter().map(|(name, gb, _)| Service::opt_in(name, pages_of(*gb))).collect();
    let mut pages = Pages::new(kernel, &services)?;
    let figure = ServicesFigure::load()?;
    let mut random = Random::new(1);
    let idle = |name: &str| -> Result<&Idle, Failure> {
        figure.idle(name).ok_or_else(|| Failure(format!("no service {name:?} of Table I")))
    };
    let mut touches = vec![];
    for (index, (_, gb, name)) in SERVICES.iter().enumerate() {
        let first = pages.first_page(index);
        pages.access(&(first..first + pages_of(*gb)).collect::<Vec<_>>());
        touches.push((first, Touches::new(idle(name)?, pages_of(*gb), 1.0, &mut random)));
    }
    let platform = Platform::load("memserver")?;
    let slow = platform.tier("cxl").ok_or_else(|| Failure("memserver has no tier \"cxl\"".to_owned()))?;
    let tree = tree(TIERS_GB, slow, moves_gb);
    let mut agent = Operated::start(&tree, &SERVICES.map(|(name, ..)| name), BOUNDS, PAGES_A_GB)?;
    let (mut trace, mut demoted, mut most, mut within_s) = (vec![], 0, 0, None);
    for second in 0..LONGEST_S {
        trace.clear();
        touches.iter_mut().for_each(|(first, touches)| touches.generation(*first, &mut trace));
        pages.access(&trace);
        pages.advance();
        agent.second(second, &mut pages)?;
        demoted += agent.demoted;
        most = most.max(agent.demoted);
        let over = |index: usize| {
            let seen = pages.seen(index);
            f64::from(seen.fast) > BOUNDS[1] * f64::from(seen.fast + seen.slow) + 1.0
        };
        if !(0..SERVICES.len()).any(over) {
            // What the last round asked for takes the kernel its time.
            within_s = Some(agent.due_s.ceil() as u32);
            break;
        }
    }
    let local = (0..SERVICES.len()).map(|index| {
        let seen = pages.seen(index);
        f64::from(seen.fast) / f64::from(seen.fast + seen.slow)
    });
    let [demoted_gb, most_gb] = [demoted, most].map(|bytes| bytes as f64 / 1e9);
    Ok(ByDefault { moves_gb, within_s, demoted_gb, most_gb, local: local.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_of_220_and_430_gb_are_within_their_bounds_in_a_minute_of_default_rounds() {
        let found = by_default(4.0).unwrap();
        assert!(found.within_s.is_some_and(|seconds| seconds <= 60), "{found:?}");
        // A quarter of both went down, a tenth of the link in 2 s at most, and no service went further than its bound.
        assert!((found.demoted_gb - 162.5).abs() < 2.0, "{found:?}");
        assert!(found.most_gb < 8.5, "{found:?}");
        assert!(found.local.iter().all(|local| *local > BOUNDS[1] - 0.01), "{found:?}");
    }

    #[test]
    fn a_kernel_that_moves_pages_slowly_is_asked_for_no_more_than_it_moves() {
        let found = by_default(1.0).unwrap();
        assert!(
            found.most_gb <= 2.0 + 1e-9 && found.within_s.is_some_and(|seconds| seconds > 120),
            "{found:?}"
        );
    }
}
