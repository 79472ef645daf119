//! Polls that find nothing. A process that polls keeps a core that its peer may need.
//!
//! Not every MPI library gives the core up wherever it waits: MPICH does not in `MPI_Win_flush`. Each turn then takes a time
//! slice of the scheduler, so the poll gives the core up here.
//!
//! If no other process wants the core, giving it up only costs time, and MPICH does so after each such poll. Then the poll
//! spins a little and looks again, as long as something has come lately.

use std::time::{Duration, Instant};

/// Polls in vain after which the processor is given up where nobody else wants it: tens of microseconds, beside which the
/// system call is nothing.
const PATIENCE: u32 = 256;
/// Giving up to nobody takes some hundred nanoseconds, more on a virtual machine; to somebody, many times as long.
const TO_SOMEBODY: u32 = 3;
/// What giving up takes at least when the caches are cold.
const LEAST: Duration = Duration::from_nanos(300);
/// How long a poll stays, and how many do after one that found something: a program that computes between its polls loses no
/// more than that for each.
pub(crate) const STAY: Duration = Duration::from_micros(2);
const STAYS: u32 = 5;
/// Polls in vain of which one looks at the clock, which takes as long as the poll.
const ASKS: u32 = 8;
/// Finds after which nobody else is taken to want the processor, since it was last seen that somebody does.
const CALM: u32 = 64;

/// What is known of the polls of a domain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    /// Polls in vain since the last that found something, or gave up.
    vain: u32,
    /// So many are enough.
    patience: u32,
    /// When the poll before ended, where that says whether others want the processor.
    last: Option<Instant>,
    /// The shortest time that giving up took.
    shortest: Duration,
    /// Polls that may stay yet.
    stays: u32,
    /// Finds since somebody else was seen to run.
    calm: u32,
    /// Whether the program itself gives the processor up between two polls.
    gives: bool,
}

impl Default for Idle {
    fn default() -> Self {
        let shortest = Duration::MAX / TO_SOMEBODY;
        Self { vain: 0, patience: PATIENCE, last: None, shortest, stays: 0, calm: 0, gives: false }
    }
}

impl Idle {
    /// One that knows how long giving up takes.
    pub(crate) fn measured() -> Self {
        let took = (0..8).map(|_| Self::give_up()).min();
        Self { shortest: took.unwrap_or_default(), ..Self::default() }
    }

    /// Begins a poll: whether somebody else ran since the one before, because the program gives the processor up itself.
    #[inline(always)]
    pub(crate) fn yields(&mut self) -> bool {
        let Some(last) = self.last else { return false };
        let gap = last.elapsed();
        // Time that the program computed counts too: from here both look alike.
        polder_mem::was_away(gap);
        let yields = self.is_switch(gap);
        self.gives = gap >= self.shortest / 2;
        if yields {
            self.hurry();
        }
        yields
    }

    /// Whether somebody else was waiting for the processor lately when it was given up: then a look comes seldom.
    #[inline(always)]
    pub(crate) const fn is_crowded(&self) -> bool {
        self.patience < PATIENCE
    }

    /// Polls do not stay for a while: somebody else ran, or one-sided operations were under way. Two that stay at both ends of one
    /// take longer (put and flush of MPICH without the shim, software-coherent: 7 us, not 4).
    #[inline(always)]
    pub(crate) const fn hurry(&mut self) {
        (self.calm, self.stays) = (0, 0);
    }

    /// Whether a poll that has found nothing stays, and looks on for as long as [`STAY`].
    #[inline(always)]
    pub(crate) const fn stays(&mut self) -> bool {
        let stays = self.stays > 0;
        self.stays = self.stays.saturating_sub(1);
        stays
    }

    /// Whether a poll that found something, or did not in so many looks, is the last before the processor is given up.
    #[inline(always)]
    pub(crate) fn is_over(&mut self, found: bool, looks: u32) -> bool {
        if found {
            self.vain = 0;
            self.calm = (self.calm + 1).min(CALM);
            let stays = self.gives && self.calm == CALM && self.patience == PATIENCE;
            self.stays = if stays { STAYS } else { 0 };
            self.last = None;
            return false;
        }
        self.vain += looks;
        let is_open = self.stays > 0 || self.calm < CALM;
        let asks = self.patience < PATIENCE || self.gives || is_open && (looks > 1 || self.vain % ASKS == 1);
        self.last = asks.then(Instant::now);
        self.vain >= self.patience
    }

    /// Gives the processor up, and says how long that took.
    #[cold]
    pub(crate) fn give_up() -> Duration {
        polder_mem::give_up()
    }

    /// Sooner the next time where somebody was waiting for the processor; `took` is nothing where the program gave it up.
    pub(crate) fn gave_up(&mut self, took: Option<Duration>) {
        self.shortest = took.map_or(self.shortest, |took| took.min(self.shortest));
        self.vain = 0;
        if took.is_some_and(|took| self.is_switch(took)) {
            self.patience = 1;
            self.hurry();
        } else {
            self.patience = (self.patience * 2).min(PATIENCE);
        }
        self.last = (self.patience < PATIENCE).then(Instant::now);
    }

    fn is_switch(&self, took: Duration) -> bool {
        took > self.shortest.max(LEAST) * TO_SOMEBODY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: Option<Duration> = Some(Duration::from_nanos(300));
    const SOMEBODY: Option<Duration> = Some(Duration::from_micros(50));

    /// After how many polls in vain it gives up.
    fn polls(idle: &mut Idle) -> u32 {
        1 + (0..).find(|_| idle.is_over(false, 1)).unwrap()
    }

    #[test]
    fn whoever_polls_in_vain_gives_up_at_every_poll_where_others_wait_and_rarely_where_nobody_does() {
        let mut idle = Idle::default();
        assert_eq!(polls(&mut idle), PATIENCE);
        idle.gave_up(NOBODY);
        idle.gave_up(SOMEBODY);
        assert_eq!(polls(&mut idle), 1);
        for patience in [2, 4, 8, 16, 32, 64, 128, 256, 256] {
            idle.gave_up(NOBODY);
            assert_eq!(polls(&mut idle), patience);
        }
    }

    #[test]
    fn what_giving_up_takes_where_nobody_waits_is_learned() {
        let mut idle = Idle::default();
        // Nobody knows what the first was.
        idle.gave_up(SOMEBODY);
        assert_eq!(polls(&mut idle), PATIENCE);
        idle.gave_up(NOBODY);
        idle.gave_up(SOMEBODY);
        assert_eq!(polls(&mut idle), 1);
        // Another program's turns say nothing of it.
        idle.gave_up(None);
        assert_eq!((polls(&mut idle), idle.shortest), (2, NOBODY.unwrap()));
    }

    #[test]
    fn whoever_finds_something_goes_on() {
        let mut idle = Idle { patience: 4, ..Idle::default() };
        assert!((0..100).all(|poll| !idle.is_over(poll % 4 == 3, 1)));
    }

    #[test]
    fn a_few_polls_stay_after_each_find_unless_somebody_else_was_seen_to_run() {
        let mut idle = Idle { gives: true, ..Idle::default() };
        let stay = |idle: &mut Idle| (0..100).filter(|_| idle.stays()).count();
        (1..CALM).for_each(|_| assert!(!idle.is_over(true, 1)));
        assert_eq!(stay(&mut idle), 0);
        for _ in 0..3 {
            assert!(!idle.is_over(true, 1));
            assert_eq!(stay(&mut idle), STAYS as usize);
        }
        assert!(!idle.is_over(true, 1));
        idle.gave_up(NOBODY);
        assert_eq!(stay(&mut idle.clone()), STAYS as usize);
        idle.gave_up(SOMEBODY);
        assert_eq!(stay(&mut idle), 0);
        assert!(!idle.is_over(true, 1));
        assert_eq!(stay(&mut idle), 0);
    }
}
