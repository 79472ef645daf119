//! How much of what a service draws of memory it draws of the slow tier, by the part of its memory that lies there.

/// A power of the spill: `spill^k` of all that is drawn. With `k` = 1 all memory is drawn of alike; the larger it is, the colder is what lies on
/// the slow tier. Each service has its own.
#[derive(Clone, Debug, PartialEq)]
pub struct TrafficLaw {
    /// Rising; one at least.
    powers: Vec<f64>,
}

impl TrafficLaw {
    /// From services of which both is known: the part of the memory that is slow, and the part of what they draw that comes of it. [`None`]
    /// without any, or where a part is not between 0 and 1.
    #[must_use]
    pub fn new(measured: &[[f64; 2]]) -> Option<Self> {
        let is_inside = |part: &f64| *part > 0.0 && *part < 1.0;
        if measured.is_empty() || !measured.iter().flatten().all(is_inside) {
            return None;
        }
        let mut powers: Vec<_> = measured.iter().map(|[spill, part]| part.ln() / spill.ln()).collect();
        powers.sort_by(f64::total_cmp);
        Some(Self { powers })
    }

    /// The powers of the services, rising.
    #[must_use]
    pub fn powers(&self) -> &[f64] {
        &self.powers
    }

    /// The power of the middle service.
    #[must_use]
    pub fn middle(&self) -> f64 {
        let half = self.powers.len() / 2;
        match self.powers.len() % 2 {
            0 => f64::midpoint(self.powers[half - 1], self.powers[half]),
            _ => self.powers[half],
        }
    }

    /// The part of what is drawn that comes of the slow tier at this spill: by the service that draws the least of it, the middle one, and the one
    /// that draws the most.
    #[must_use]
    pub fn part(&self, spill: f64) -> [f64; 3] {
        let last = self.powers.len() - 1;
        [self.powers[last], self.middle(), self.powers[0]].map(|power| spill.powf(power))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_law_gives_back_the_services_that_it_comes_from() {
        let measured = [[0.25, 0.02], [0.25, 0.2], [0.5, 0.3]];
        let law = TrafficLaw::new(&measured).unwrap();
        let [least, _, most] = law.part(0.25);
        assert!((least - 0.02).abs() < 1e-12 && (most - 0.2).abs() < 1e-12, "{least} {most}");
        assert!(
            law.part(0.0).iter().all(|part| *part == 0.0) && law.part(1.0).iter().all(|part| *part == 1.0)
        );
        assert!(TrafficLaw::new(&[]).is_none() && TrafficLaw::new(&[[0.25, 0.0]]).is_none());
    }
}
