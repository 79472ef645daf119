//! Which pages go down: the oldest of a service, and among those of equal age the next in turn.

use polder_place::pages::TierRule;

use super::{ABSENT, GENERATION, Group, OLDEST, Pages, SLOW, age};

/// Pages of the fast tier by age.
pub(super) type Ages = [u32; GENERATION as usize + 1];

impl Pages {
    /// Demotes while fewer than `low_free` are free, until `high_free` are: from each service in proportion to its
    /// pages that were not accessed since this generation began, and then to all of its pages. One that opted out is left
    /// alone, as from about Linux 6.16 on.
    pub(super) fn reclaim(&mut self) {
        if self.fast_free >= self.kernel.low_free {
            return;
        }
        let mut wanted = self.kernel.high_free - self.fast_free;
        for youngest in [1, 0] {
            if wanted == 0 {
                return;
            }
            let ages: Vec<_> = (0..self.groups.len()).map(|group| self.reclaimable(group)).collect();
            let weight = |ages: &Ages| ages[youngest..].iter().map(|pages| u64::from(*pages)).sum::<u64>();
            let mut weights: u64 = ages.iter().map(weight).sum();
            for (group, ages) in ages.iter().enumerate() {
                let own = weight(ages);
                if own == 0 {
                    continue;
                }
                let share = (u64::from(wanted) * own).div_ceil(weights).min(own) as u32;
                wanted -= self.demote_by(group, share, youngest, ages);
                weights -= own;
            }
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
    pub(super) fn demote(&mut self, group: usize, wanted: u32) -> u32 {
        let ages = self.ages(group);
        self.demote_by(group, wanted, 0, &ages)
    }

    fn demote_by(&mut self, group: usize, wanted: u32, youngest: usize, ages: &Ages) -> u32 {
        let wanted = wanted.min(self.slow_free);
        // Whole ages from the oldest on, and of the next one as many as are left.
        let (mut left, mut whole) = (wanted, OLDEST + 1);
        while usize::from(whole) > youngest && ages[usize::from(whole) - 1] <= left {
            whole -= 1;
            left -= ages[usize::from(whole)];
        }
        if usize::from(whole) <= youngest {
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
