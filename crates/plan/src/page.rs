//! A step as one page that needs nothing else: the figures stand in it, and are drawn by its script.

use std::time::SystemTime;

use polder_platform::printable;
use polder_sim::{Answer, Stretch, TierUse, Work, accelerators, timeline};
use serde_json::{Value, json};

use super::table::span;
use super::train::{blocks_line, computed_line, layout_line, looked_line, range_line, range_source};
use crate::Failure;

/// The page of a step, and of the same layout on another platform beside it.
pub(super) fn page(answer: &Answer) -> Result<String, Failure> {
    let platforms: Vec<_> = std::iter::once(answer).chain(answer.against.as_deref()).map(platform).collect();
    let about =
        [layout_line(&answer.layout), computed_line(answer.sequence, &answer.layout), looked_line(answer)];
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
    filled(include_str!("page.html"), &title, &data)
}

/// A page of this body, which needs nothing else: with the head, the style and the tools that all pages have, its title and its figures, and
/// at its end what made it and when.
pub(super) fn filled(body: &str, title: &str, data: &Value) -> Result<String, Failure> {
    let data = serde_json::to_string(data)?.replace('<', "\\u003c");
    let day = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let day = day.split('T').next().unwrap_or_default();
    let made = format!("polder {}, {day}: {}", env!("CARGO_PKG_VERSION"), command());
    let page = [include_str!("head.html"), body].concat();
    // What stands between two signs is a name, and what is put there is not looked at again.
    let pieces = page.split('@').enumerate().map(|(at, piece)| match (at % 2, piece) {
        (0, text) => text.to_owned(),
        (_, "TITLE") => plain(title),
        (_, "DATA") => data.clone(),
        (_, "TOOLS") => include_str!("tools.js").to_owned(),
        (_, "MADE") => plain(&made),
        (_, name) => unreachable!("a page has no {name}"),
    });
    Ok(pieces.collect())
}

/// The command as it was given, such that a shell takes it again.
fn command() -> String {
    let quoted = |word: String| {
        let is_plain = |it: char| it.is_ascii_alphanumeric() || "-_./,:=+%".contains(it);
        match !word.is_empty() && word.chars().all(is_plain) {
            true => word,
            false => format!("'{}'", word.replace('\'', "'\\''")),
        }
    };
    let words =
        std::env::args_os().skip(1).map(|word| quoted(printable(&word.to_string_lossy()).into_owned()));
    let name = std::env::args_os().next().map(std::path::PathBuf::from);
    let is_alone = name.is_some_and(|it| it.file_name().is_some_and(|it| it == "polder-plan"));
    let name = if is_alone { "polder-plan" } else { "polder" };
    std::iter::once(name.into()).chain(words).collect::<Vec<_>>().join(" ")
}

/// Text as a page shows it. Names may be paths, and a path may hold anything.
fn plain(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
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
fn stretch(it: &Stretch) -> Value {
    let (name, pass) = match it.work {
        Work::Forward { micro_batch, part } => ("forward", Some((micro_batch, part))),
        Work::Backward { micro_batch, part } => ("backward", Some((micro_batch, part))),
        Work::Data => ("data", None),
        Work::Offload => ("offload", None),
        Work::Optimizer => ("optimizer", None),
        Work::Stragglers => ("stragglers", None),
    };
    let [begin_s, seconds] = [it.begin_s, it.seconds].map(|it| (it * 1e9).round() / 1e9);
    match pass {
        Some((micro_batch, part)) => json!([it.stage, name, begin_s, seconds, micro_batch, part]),
        None => json!([it.stage, name, begin_s, seconds]),
    }
}
