//! A step as a page.

use polder_sim::{Answer, Stretch, TierUse, Work, accelerators, timeline};
use serde_json::{Value, json};

use super::{blocks_line, computed_line, fidelity_line, layout_line, range_line, range_source};
use crate::Failure;
use crate::page::filled;
use crate::table::span;

/// The page of a step, and of the same layout on another platform beside it.
pub(super) fn page(answer: &Answer) -> Result<String, Failure> {
    let platforms: Vec<_> = std::iter::once(answer).chain(answer.against.as_deref()).map(platform).collect();
    let about =
        [layout_line(&answer.layout), computed_line(answer.sequence, &answer.layout), fidelity_line(answer)];
    let about: Vec<_> = about.into_iter().chain(blocks_line(&answer.stages)).collect();
    let data = json!({
        "about": about.join("; "),
        "note": answer.note.as_deref().unwrap_or_default(),
        "sure": format!("{}; {}", range_line(answer), range_source(answer)),
        "stages": answer.layout.pp,
        "platforms": platforms,
    });
    let others: String = answer.against.iter().map(|it| format!(" and on {}", it.platform)).collect();
    let count = accelerators(answer.accelerators);
    let title = format!("{} on {}{others}, {count}", answer.model, answer.platform);
    filled(include_str!("../page.html"), &title, &data)
}

/// What is drawn of a platform.
fn platform(answer: &Answer) -> Value {
    let Answer { layout, step, .. } = answer;
    // Every line, also one of nothing, so that those of two platforms stand beside each other.
    let times =
        step.times().into_iter().map(|(name, seconds)| json!([name, seconds.exposed_s, seconds.hidden_s]));
    json!({
        "name": answer.platform,
        "total_s": step.total_s,
        "range": span(answer.range_s),
        "times": times.collect::<Vec<_>>(),
        "tiers": tiers(answer),
        "timeline": timeline(layout, step, &answer.stages).iter().map(stretch).collect::<Vec<_>>(),
    })
}

/// What lies where, in gigabytes.
fn tiers(answer: &Answer) -> Vec<Value> {
    let is_drawn = |tier: &&TierUse| tier.tier.is_none() || tier.used_bytes > 0.0;
    let drawn = |tier: &TierUse| {
        let name = tier.tier.map_or("accelerator".into(), |it| format!("{it}, an accelerator's share"));
        let kinds: Vec<_> = tier.kinds().iter().map(|(kind, bytes)| json!([kind, bytes / 1e9])).collect();
        json!({
            "name": name, "used_gb": tier.used_bytes / 1e9, "capacity_gb": tier.capacity_bytes / 1e9, "kinds": kinds,
        })
    };
    answer.step.memory.tiers.iter().filter(is_drawn).map(drawn).collect()
}

/// Stage, kind, beginning and length in seconds to the nanosecond, and of a pass its micro-batch and part.
fn stretch(stretch: &Stretch) -> Value {
    let (name, pass) = match stretch.work {
        Work::Forward { micro_batch, part } => ("forward", Some((micro_batch, part))),
        Work::Backward { micro_batch, part } => ("backward", Some((micro_batch, part))),
        Work::Contention => ("contention", None),
        Work::Data => ("data", None),
        Work::Offload => ("offload", None),
        Work::Optimizer => ("optimizer", None),
        Work::Stragglers => ("stragglers", None),
    };
    let [begin_s, seconds] = [stretch.begin_s, stretch.seconds].map(|seconds| (seconds * 1e9).round() / 1e9);
    match pass {
        Some((micro_batch, part)) => json!([stretch.stage, name, begin_s, seconds, micro_batch, part]),
        None => json!([stretch.stage, name, begin_s, seconds]),
    }
}
