//! A counter as the domain keeps it.

/// How many operations went well, and how many did not.
#[derive(Default)]
pub(crate) struct Counter {
    pub(crate) well: u64,
    pub(crate) badly: u64,
    /// How many there were when the program last looked.
    seen: u64,
    /// Endpoints that count here.
    pub(crate) bound: usize,
}

impl Counter {
    pub(crate) const fn count(&mut self, well: bool) {
        match well {
            true => self.well = self.well.wrapping_add(1),
            false => self.badly = self.badly.wrapping_add(1),
        }
    }

    /// Whether there is something that the program has not seen.
    pub(crate) const fn is_news(&mut self) -> bool {
        let count = self.well.wrapping_add(self.badly);
        std::mem::replace(&mut self.seen, count) != count
    }
}
