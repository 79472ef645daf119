//! What a job of many ranks takes, from what smaller jobs on the same hosts took.

/// A figure of a job, such as seconds or bytes: a part that each job has, a part for each rank, and one for each pair of ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scaling {
    job: f64,
    rank: f64,
    pair: f64,
}

impl Scaling {
    /// The figure that three jobs had, each with its number of ranks; nothing if two have the same.
    pub(super) fn through(jobs: [(u32, f64); 3]) -> Option<Self> {
        let [(first, at_first), (second, at_second), (third, at_third)] =
            jobs.map(|(ranks, value)| (f64::from(ranks), value));
        // Newton's divided differences.
        let slope = |(left, at_left), (right, at_right)| (at_right - at_left) / (right - left);
        let begin = slope((first, at_first), (second, at_second));
        let end = slope((second, at_second), (third, at_third));
        let square = (end - begin) / (third - first);
        let linear = begin - square * (first + second);
        let job = at_first - first * (linear + square * first);
        // n^2 is n(n - 1)/2 twice, and n once.
        let scaling = Self { job, rank: linear + square, pair: 2.0 * square };
        [scaling.job, scaling.rank, scaling.pair].iter().all(|part| part.is_finite()).then_some(scaling)
    }

    /// The figure of a job of so many ranks.
    pub(super) fn at(&self, ranks: u32) -> f64 {
        let ranks = f64::from(ranks);
        self.job + self.rank * ranks + self.pair * ranks * (ranks - 1.0) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_of_any_size_has_what_its_ranks_and_pairs_take() {
        let takes = |ranks: u32| 5.0 + 3.0 * f64::from(ranks) + 0.25 * f64::from(ranks * (ranks - 1) / 2);
        let scaling = Scaling::through([16, 64, 256].map(|ranks| (ranks, takes(ranks)))).unwrap();
        for ranks in [1, 2, 100, 1024] {
            assert!((scaling.at(ranks) - takes(ranks)).abs() < 1e-6 * takes(ranks), "{ranks} ranks");
        }
        assert_eq!(Scaling::through([(16, 1.0), (16, 2.0), (64, 3.0)]), None);
    }
}
