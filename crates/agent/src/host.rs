//! The settings of the host that a policy asks for.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use polder_linux::{
    BALANCING, DEMOTION, INTERLEAVE, INTERLEAVE_AUTO, Kernel, KernelError, PROMOTION_LIMIT, Settings, Tiers,
};

use crate::policy::{Policy, Weights, weights_of};
use crate::report::Alarm;

/// Key of the policy, file and value of each setting of the host; and what this kernel lacks of them.
pub(crate) fn wanted(
    kernel: &impl Kernel,
    tiers: &Tiers,
    policy: &Policy,
) -> (Vec<(&'static str, String, String)>, Vec<Alarm>) {
    let mut settings = Vec::new();
    let mut alarms = Vec::new();
    if policy.rules().next().is_some() {
        // Demotion on, and promotion of hot pages of the slow tier.
        settings.push(("service", DEMOTION.to_owned(), "true".to_owned()));
        settings.push(("service", BALANCING.to_owned(), balancing(kernel, tiers).to_string()));
    }
    if let Some(rate) = policy.promotion_limit {
        settings.push(("promotion_limit", PROMOTION_LIMIT.to_owned(), limit_of(tiers, rate).to_string()));
    }
    let weights = match &policy.weights {
        None => Ok(BTreeMap::new()),
        Some(Weights::Given(weights)) => Ok(weights.clone()),
        Some(Weights::Auto) => tiers.bandwidths(kernel).map(|bandwidths| weights_of(&bandwidths)),
    };
    match weights {
        Ok(weights) => {
            // A weight that is written ends the kernel's own derivation, which is a setting too.
            if !weights.is_empty() && kernel.read(INTERLEAVE_AUTO).is_ok() {
                settings.push(("interleave", INTERLEAVE_AUTO.to_owned(), "false".to_owned()));
            }
            settings.extend(weights.into_iter().map(|(node, weight)| {
                ("interleave", format!("{INTERLEAVE}/node{node}"), weight.to_string())
            }));
        }
        Err(error) => {
            alarms.push(Alarm::HostSetting { key: "interleave".to_owned(), error: error.to_string() });
        }
    }
    (settings, alarms)
}

/// The kernel's limit for so many bytes a second to all fast nodes together. It counts in MiB, whatever its name says, and each node alone.
pub(crate) fn limit_of(tiers: &Tiers, bytes_a_s: u64) -> u64 {
    ((bytes_a_s >> 20) / (tiers.fast.len() as u64).max(1)).max(1)
}

/// The mode of NUMA balancing that promotes. Where several nodes are fast, the kernel goes on to bring pages near their threads if it did.
fn balancing(kernel: &impl Kernel, tiers: &Tiers) -> u32 {
    const NEAR_THREADS: u32 = 1;
    const TIERS: u32 = 2;
    let now = kernel.read(BALANCING).ok().and_then(|text| text.trim().parse::<u32>().ok());
    let kept = now.filter(|_| tiers.fast.len() > 1).unwrap_or(0) & NEAR_THREADS;
    kept | TIERS
}

/// Makes settings of the host again that another program has changed since, but for those that `is_own` says the agent itself changes. One
/// that was refused as the policy was taken over, and of which `refused` tells, is tried again. Returns alarms, and whether the kernel
/// demotes: while it does not, `memory.reclaim` evicts pages.
pub(crate) fn keep<K: Kernel>(
    settings: &mut Settings<K>,
    tiers: &Tiers,
    policy: &Policy,
    refused: &mut Vec<Alarm>,
    is_own: impl Fn(&str) -> bool,
) -> (Vec<Alarm>, bool) {
    let (mut alarms, mut demotes) = (Vec::new(), true);
    for (key, path, value) in wanted(settings.kernel(), tiers, policy).0 {
        if is_own(&path) {
            continue;
        }
        let is_of_key = |alarm: &Alarm| matches!(alarm, Alarm::HostSetting { key: of, .. } if of == key);
        let was_refused = refused.iter().any(is_of_key);
        let error = match settings.set(&path, &value) {
            Ok(false) => continue,
            Ok(true) if was_refused => {
                refused.retain(|alarm| !is_of_key(alarm));
                continue;
            }
            Ok(true) => format!("another program changed {path}; it is {value} again"),
            Err(error) => {
                demotes &= path != DEMOTION;
                error.to_string()
            }
        };
        if !was_refused {
            alarms.push(Alarm::HostSetting { key: key.to_owned(), error });
        }
    }
    (alarms, demotes)
}

/// Makes the settings of the host. One that tiering can do without becomes an alarm.
///
/// # Errors
/// [`KernelError`] for a setting without which nothing moves between tiers.
pub(crate) fn set<K: Kernel>(
    settings: &mut Settings<K>,
    tiers: &Tiers,
    policy: &Policy,
) -> Result<Vec<Alarm>, KernelError> {
    let (wanted, mut alarms) = wanted(settings.kernel(), tiers, policy);
    for (key, path, value) in wanted {
        match settings.set(&path, &value) {
            Err(error) if key == "service" && error.is_gone() => {
                let lacks = format!(
                    "this kernel has no {path}, without which nothing moves between tiers; is /proc mounted? polder doctor says more"
                );
                return Err(KernelError::Missing(lacks));
            }
            Err(error) if key == "service" && error.kind() == Some(ErrorKind::ReadOnlyFilesystem) => {
                let why = format!(
                    "{error}; a container needs /sys and /proc/sys for writing, as `polder agent daemonset` gives them"
                );
                return Err(KernelError::Missing(why));
            }
            Err(error) if key == "service" => return Err(error),
            Err(error) => alarms.push(Alarm::HostSetting {
                key: key.to_owned(),
                error: match error.is_gone() {
                    true => format!("this kernel has no {path}; see polder doctor"),
                    false => error.to_string(),
                },
            }),
            Ok(_) => {}
        }
    }
    Ok(alarms)
}
