//! Which pages go down: the oldest of a service, and among those of equal age the next in turn.

use polder_place::pages::TierRule;

use super::{ABSENT, GENERATION, Group, OLDEST, Pages, SLOW, age};

/// Pages of the fast tier by age.
pub(super) type Ages = [u32; GENERATION as usize + 1];

/// The least age of a page that was not accessed in the generation that has ended, as reclaim begins.
const COLD: usize = 2;

impl Pages {
    /// Demotes while fewer than `low_free` are free, until `high_free` are or `demotions` went down. One that opted out is left alone, as from about Linux 6.16
    /// on.
    pub(super) fn reclaim(&mut self) {
        if self.fast_free >= self.kernel.low_free {
            return;
        }
        let wanted = (self.kernel.high_free - self.fast_free).min(self.slow_free).min(self.kernel.demotions);
        let ages: Vec<_> = (0..self.groups.len()).map(|group| self.reclaimable(group)).collect();
        for (group, (share, ages)) in shares(wanted, &ages).into_iter().zip(&ages).enumerate() {
            self.demote_by(group, share, ages);
        }
    }

    fn reclaimable(&self, group: usize) -> Ages {
        match self.groups[group].service.policy.rule {
            TierRule::OptOut => [0; GENERATION as usize + 1],
            TierRule::OptIn | TierRule::Background => self.ages(group),
        }
    }

    /// Pages of the fast tier by age.
    pub(super) fn ages(&self, group: usize) -> Ages {
        // Four tables, so that equal neighbours do not wait for each other.
        let mut tables = [[0_u32; 256]; 4];
        let state = &self.state[self.groups[group].range()];
        let (fours, rest) = state.as_chunks::<4>();
        for four in fours {
            for (table, page) in tables.iter_mut().zip(four) {
                table[usize::from(*page)] += 1;
            }
        }
        for page in rest {
            tables[0][usize::from(*page)] += 1;
        }
        let mut ages = [0; GENERATION as usize + 1];
        // A fast page is never marked.
        for state in 0..=GENERATION {
            let pages: u32 = tables.iter().map(|table| table[usize::from(state)]).sum();
            ages[usize::from(age(state, self.generation))] += pages;
        }
        ages
    }

    /// Demotes so many of the oldest pages of a service, as far as the slow tier has room. Tells how many.
    ///
    /// # Panics
    /// When there is no such service.
    pub fn demote(&mut self, group: usize, wanted: u32) -> u32 {
        let ages = self.ages(group);
        self.demote_by(group, wanted, &ages)
    }

    fn demote_by(&mut self, group: usize, wanted: u32, ages: &Ages) -> u32 {
        let wanted = wanted.min(self.slow_free);
        // Whole ages from the oldest on, and of the next one as many as are left.
        let (mut left, mut whole) = (wanted, OLDEST + 1);
        while whole > 0 && ages[usize::from(whole) - 1] <= left {
            whole -= 1;
            left -= ages[usize::from(whole)];
        }
        if whole == 0 {
            left = 0;
        }
        let taken: u32 = ages[usize::from(whole)..].iter().sum::<u32>() + left;
        if taken == 0 {
            return 0;
        }
        let generation = self.generation;
        let (range, hand) = (self.groups[group].range(), self.groups[group].reclaim_hand);
        let state = &mut self.state[range];
        let (pages, mut hand_after) = (state.len(), hand);
        for at in (hand..pages).chain(0..hand) {
            let page = &mut state[at];
            if *page & (SLOW | ABSENT) != 0 {
                continue;
            }
            let age = age(*page, generation);
            if age >= whole {
                *page |= SLOW;
            } else if left > 0 && age + 1 == whole {
                *page |= SLOW;
                left -= 1;
                hand_after = at + 1;
            }
        }
        let Group { reclaim_hand, seen, .. } = &mut self.groups[group];
        *reclaim_hand = if hand_after == pages { 0 } else { hand_after };
        seen.fast -= taken;
        seen.slow += taken;
        seen.demotions += u64::from(taken);
        self.fast_free += taken;
        self.slow_free -= taken;
        taken
    }
}

/// How many pages each service gives, so that all give `wanted`: in proportion to its pages on the fast tier. What was accessed in the
/// generation that has ended is spared while any service has pages that were not: Linux scans each cgroup in proportion to its size,
/// and gives referenced pages another round.
fn shares(wanted: u32, ages: &[Ages]) -> Vec<u32> {
    let pages_of = |group: usize, least_age: usize| ages[group][least_age..].iter().sum::<u32>();
    let mut shares = vec![0; ages.len()];
    let mut left = wanted;
    for least_age in [COLD, 0] {
        // Each time around takes all that is wanted, or all that a service has.
        loop {
            let open: Vec<usize> =
                (0..ages.len()).filter(|group| shares[*group] < pages_of(*group, least_age)).collect();
            let mut weights: u64 = open.iter().map(|group| u64::from(pages_of(*group, 0))).sum();
            if left == 0 || open.is_empty() {
                break;
            }
            for group in open {
                let own = u64::from(pages_of(group, 0));
                let part = (u64::from(left) * own).div_ceil(weights) as u32;
                let part = part.min(pages_of(group, least_age) - shares[group]);
                shares[group] += part;
                left -= part;
                weights -= own;
            }
        }
    }
    shares
}
