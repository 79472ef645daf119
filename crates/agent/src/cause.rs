//! Why a service is as it is, in words.

use polder_place::pages::{DemoteReason, HoldReason, PageMove, TierRule};

use crate::policy::Service;

/// What became of the last moves of a service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moves {
    /// None of its pages could be moved.
    pub(crate) is_stuck: bool,
    /// Pages that went down came back.
    pub(crate) returns: bool,
}

/// Why a service is as it is after a decision, and by which line of the policy.
///
/// `services` are those of the round, and `share` is the service's share on the fast tier.
pub(crate) fn cause(
    services: &[&Service],
    service: &Service,
    share: f64,
    moved: Option<PageMove>,
    held: Option<HoldReason>,
    Moves { is_stuck, returns }: Moves,
) -> (String, Option<usize>) {
    const STUCK: &str = "the kernel can move none of its pages";
    const RETURNS: &str = ", fewer than else because they come back";
    const WAITS: &str = "waits for its part of step";
    let Service { policy, lines, .. } = service;
    let tier = Some(lines.tier);
    let why = match held {
        Some(HoldReason::Pressure) => Some("its tasks wait for memory longer than pressure_limit"),
        Some(HoldReason::Refaults) => Some("it reads more pages again than refault_limit"),
        Some(HoldReason::SlowFull) => Some("the slow tier is full"),
        Some(HoldReason::Waits) | None => None,
    };
    if let Some(why) = why {
        return (format!("it would give pages and is left alone: {why}"), None);
    }
    let goes = |goes: &str| match (is_stuck, returns) {
        (true, _) => STUCK.to_owned(),
        (false, true) => format!("{goes}{RETURNS}"),
        (false, false) => goes.to_owned(),
    };
    let waits = held.is_some();
    match (moved, policy.rule, policy.local) {
        (Some(PageMove::BringBack { .. }), ..) => {
            ("it is opted out, and what demotion put on the slow tier is brought back".to_owned(), tier)
        }
        (Some(PageMove::Promote { .. }), ..) if !is_stuck => {
            ("it is under local_low, and its pages come up".to_owned(), lines.local_low)
        }
        (Some(PageMove::Demote { reason, .. }), ..) => match reason {
            DemoteReason::OverHigh => {
                let goes = goes("its coldest pages go down");
                (format!("it is over local_high, and {goes}"), lines.local_high)
            }
            DemoteReason::Background => {
                (format!("it is background, and {}", goes("its pages go down")), tier)
            }
            DemoteReason::PageCache if is_stuck => {
                (format!("its page cache belongs on the slow tier, and {STUCK}"), lines.page_cache)
            }
            DemoteReason::PageCache => ("its page cache goes down".to_owned(), lines.page_cache),
            DemoteReason::MakesRoom { for_service } => {
                let needy = services[for_service];
                let stuck = if is_stuck { format!(", and {STUCK}") } else { String::new() };
                let what = format!("it makes room for {}, which is under its local_low{stuck}", needy.name);
                (what, needy.lines.local_low)
            }
            DemoteReason::Watermark => {
                let stuck = if is_stuck { format!(", and {STUCK}") } else { String::new() };
                (format!("it makes room: less than free_low of the fast tier was free{stuck}"), None)
            }
        },
        (_, TierRule::OptOut, _) => ("it is opted out, and nothing lies on the slow tier".to_owned(), tier),
        (_, TierRule::Background, _) if waits => (format!("it is background, and {WAITS}"), tier),
        (_, TierRule::Background, _) => ("it is background, and lies on the slow tier".to_owned(), tier),
        (_, TierRule::OptIn, Some(local)) if share < local.low && is_stuck => (
            "it is under local_low, and what it has on the slow tier is shared, page cache or refused"
                .to_owned(),
            lines.local_low,
        ),
        (_, TierRule::OptIn, Some(local)) if share < local.low && waits => {
            (format!("it is under local_low, and {WAITS}"), lines.local_low)
        }
        (_, TierRule::OptIn, Some(local)) if share < local.low => (
            "it is under local_low, and finds room as the kernel promotes its hot pages".to_owned(),
            lines.local_low,
        ),
        (_, TierRule::OptIn, Some(local)) if share > local.high && waits => {
            (format!("it is over local_high, and {WAITS}"), lines.local_high)
        }
        (_, TierRule::OptIn, _) if waits => (format!("its page cache {WAITS}"), lines.page_cache),
        (_, TierRule::OptIn, None) => ("it is opted in, and has no bounds".to_owned(), tier),
        (_, TierRule::OptIn, Some(_)) => {
            ("it is within its bounds".to_owned(), lines.local_high.or(lines.local_low))
        }
    }
}
