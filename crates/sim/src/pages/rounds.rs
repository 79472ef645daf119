//! Control rounds: what the agent does on a host, by the same function.

use polder_place::pages::{
    Decision, PageMove, RecordedRound, RoundLimits, ServiceBytes, ServiceView, decide,
};

use super::{ABSENT, Pages, SLOW};

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;

/// What a policy file of the agent gives for all services.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Control {
    /// Pages that are demoted in one round at most.
    pub step: u32,
    /// Proactive demotion begins when less than this share of the fast tier is free; 0 for never.
    pub free_low: f64,
    /// It ends when this share is free.
    pub free_high: f64,
}

impl Pages {
    /// A control round: [`decide`] is asked with what is seen, and what it decides is done. Returns the round as the agent
    /// records it; nothing here waits for memory or reads pages again, so that pressure and refaults are 0.
    pub fn round(&mut self, number: u64, control: Control) -> RecordedRound {
        let bytes = |pages: u32| u64::from(pages) * PAGE_BYTES;
        let view = |group: &super::Group| ServiceView {
            name: group.service.name.clone(),
            policy: group.service.policy,
            seen: ServiceBytes {
                fast: bytes(group.seen.fast),
                slow: bytes(group.seen.slow),
                ..ServiceBytes::default()
            },
        };
        let services: Vec<_> = self.groups.iter().map(view).collect();
        let limits = RoundLimits {
            fast_bytes: bytes(self.kernel.fast_pages),
            fast_free: bytes(self.fast_free.saturating_sub(self.kernel.min_free)),
            slow_free: bytes(self.slow_free),
            step: bytes(control.step),
            pressure: f64::INFINITY,
            refaults: u64::MAX,
            free_low: control.free_low,
            free_high: control.free_high,
            promote: bytes(control.step),
            fast_kept: 0,
            largest_page: PAGE_BYTES,
            page: PAGE_BYTES,
            pace: None,
        };
        let decision = decide(&services, &limits, &mut self.past);
        self.carry_out(&decision);
        RecordedRound { round: number, services, limits, decision, past: None }
    }

    fn carry_out(&mut self, decision: &Decision) {
        for change in &decision.moves {
            match *change {
                PageMove::Demote { service, bytes, .. } => {
                    self.demote(service, (bytes / PAGE_BYTES) as u32);
                }
                PageMove::BringBack { service, .. } => self.bring_up(service, u64::MAX),
                PageMove::Promote { service, bytes } => self.bring_up(service, bytes / PAGE_BYTES),
            }
        }
    }

    /// Moves so many slow pages of a service up, in their order, as far as the fast tier has room.
    ///
    /// # Panics
    /// When there is no such service.
    pub fn bring_up(&mut self, service: usize, mut pages: u64) {
        for page in self.groups[service].range() {
            if pages == 0 || self.fast_free <= self.kernel.min_free {
                return;
            }
            let state = self.state[page];
            if state & (SLOW | ABSENT) == SLOW {
                self.promote(page, service);
                pages -= 1;
            }
        }
    }
}
