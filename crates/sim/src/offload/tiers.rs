//! The tiers of a host, as an offloaded step sees them: what was measured of them, and where nothing was, what data sheets give.

use polder_place::{Rates, Tier};
use polder_platform::{Bandwidth, BuiltTier, Bytes, Host, Platform, ReachedRates};

use super::OffloadError;

/// The part of an optimizer's traffic that is read: parameters, gradients and two states, of which all but the gradients are written.
const READ: f64 = 4.0 / 7.0;

/// Cards of each tier, at most: what is beyond is a number that was mistyped.
const MOST_CARDS: u32 = 64;

/// The host's own memory, of which `dram` may be used, then each card of each tier, then folders on disks.
pub(crate) fn tiers(
    platform: &Platform,
    host: &Host,
    dram: Option<Bytes>,
    cards: Option<u32>,
) -> Result<Vec<Tier>, OffloadError> {
    let reached = |name: &str| {
        let offload = host.offload.as_ref();
        offload.and_then(|it| it.tiers.get(name)).copied().unwrap_or_default()
    };
    let own = Tier {
        name: "dram".into(),
        capacity: dram.unwrap_or(host.memory.capacity),
        cpu: match reached("host").step {
            Some(step) => Rates { read: step, write: step },
            None => Rates { read: host.memory.read, write: host.memory.write },
        },
        device: None,
        through: None,
    };
    if let (Some(_), true) = (cards, host.tiers.is_empty()) {
        return Err(OffloadError::option(
            "--cards",
            "the host has no cards, only its own memory; leave it out",
        ));
    }
    if let Some(count) = cards.filter(|count| *count > MOST_CARDS) {
        return Err(OffloadError::option("--cards", format!("expected 0 to {MOST_CARDS}, found {count}")));
    }
    let behind = host.tiers.iter().flat_map(|(name, tier)| {
        let has = devices(tier);
        let count = cards.unwrap_or(has);
        let card = card(tier, has, reached(name));
        (0..count).map(move |index| {
            let name = if count > 1 { format!("{name}{index}") } else { name.clone() };
            Tier { name, ..card.clone() }
        })
    });
    let disks = platform.disk.iter().map(|(name, disk)| Tier {
        name: name.clone(),
        capacity: disk.capacity,
        cpu: Rates { read: disk.read, write: disk.write },
        device: None,
        through: Some(0),
    });
    Ok(std::iter::once(own).chain(behind).chain(disks).collect())
}

/// Devices that a tier is made of.
fn devices(tier: &BuiltTier) -> u32 {
    tier.port.as_ref().map_or(1, |port| port.links)
}

/// One of the devices that a tier is made of.
fn card(tier: &BuiltTier, devices: u32, reached: ReachedRates) -> Tier {
    let count = f64::from(devices);
    let at = |reads| Bandwidth::new(tier.bandwidth(reads) / count);
    let step = reached.step.unwrap_or_else(|| at(READ));
    let device = Rates {
        read: reached.read.unwrap_or_else(|| at(1.0)),
        write: reached.write.unwrap_or_else(|| at(0.0)),
    };
    Tier {
        name: String::new(),
        capacity: Bytes::new(tier.capacity.value() / f64::from(tier.hosts) / count),
        cpu: Rates { read: step, write: step },
        device: Some(device),
        through: None,
    }
}
