//! What programs draw from two tiers while they wait for them: bandwidths and latencies that agree with each other.

use polder_platform::{BuiltTier, DataError, Platform};
use serde::Serialize;

/// Two tiers of a server.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// Its own memory.
    pub fast: &'a BuiltTier,
    /// What it reaches by CXL.
    pub slow: &'a BuiltTier,
}

/// Both tiers of a platform with `local` and `cxl`.
///
/// # Errors
/// When it has no server with them.
pub fn pair<'a>(name: &str, platform: &'a Platform) -> Result<Pair<'a>, DataError> {
    let tier = |tier: &str| {
        let problem = || DataError::new(name, "server", format!("expected a server with a tier {tier:?}"));
        platform.tier(tier).ok_or_else(problem)
    };
    Ok(Pair { fast: tier("local")?, slow: tier("cxl")? })
}

/// What is drawn, and how long a load takes meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Load {
    /// Bytes a second of the fast tier.
    pub fast_bytes_per_s: f64,
    /// Bytes a second of the slow tier.
    pub slow_bytes_per_s: f64,
    /// Seconds of a load on the fast tier.
    pub fast_s: f64,
    /// Seconds of a load on the slow tier.
    pub slow_s: f64,
}

impl Load {
    /// Bytes a second of both tiers.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        self.fast_bytes_per_s + self.slow_bytes_per_s
    }

    /// Seconds of a load, over both tiers.
    #[must_use]
    pub fn mean_s(&self) -> f64 {
        let parts = self.fast_bytes_per_s * self.fast_s + self.slow_bytes_per_s * self.slow_s;
        parts / self.bytes_per_s()
    }
}

/// Part of reads among accesses: that of the mix which tables of loaded memory give for services.
const READS: f64 = 0.75;

impl Pair<'_> {
    /// Loads while so many bytes a second are drawn, a part of them of the slow tier.
    #[must_use]
    pub fn at(&self, bytes_per_s: f64, slow_part: f64) -> Load {
        let (fast_bytes_per_s, slow_bytes_per_s) = (bytes_per_s * (1.0 - slow_part), bytes_per_s * slow_part);
        let [fast_s, slow_s] = [(self.fast, fast_bytes_per_s), (self.slow, slow_bytes_per_s)]
            .map(|(tier, drawn)| tier.loaded_latency(drawn / tier.peak().value()));
        Load { fast_bytes_per_s, slow_bytes_per_s, fast_s, slow_s }
    }

    /// The most that both tiers give with such a part on the slow one.
    #[must_use]
    pub fn most(&self, slow_part: f64) -> f64 {
        let roof = |tier: &BuiltTier, part: f64| tier.bandwidth(READS) / part;
        roof(self.fast, 1.0 - slow_part).min(roof(self.slow, slow_part))
    }

    /// What programs draw that keep so many bytes under way (Little's law: bytes under way = bytes a second times the mean
    /// seconds of a load), a part of them of the slow tier.
    #[must_use]
    pub fn drawn(&self, under_way: f64, slow_part: f64) -> Load {
        // More is under way with more that is drawn: halve the range of rates.
        let (mut low, mut high) = (0.0, self.most(slow_part));
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            let load = self.at(middle, slow_part);
            if middle * load.mean_s() < under_way {
                low = middle;
            } else {
                high = middle;
            }
        }
        self.at(f64::midpoint(low, high), slow_part)
    }
}
