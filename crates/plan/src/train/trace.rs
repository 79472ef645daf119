//! A step as Perfetto and chrome://tracing read it.

use polder_sim::{Answer, Sent, Stretch, Work, timeline, traffic};
use serde::Serialize;
use serde_json::{Value, json};

use crate::Failure;

/// A stretch of time on a track of a stage, in microseconds.
#[derive(Serialize)]
struct Event {
    name: String,
    cat: &'static str,
    ph: &'static str,
    pid: u32,
    tid: usize,
    ts: f64,
    dur: f64,
    args: Value,
}

/// A Chrome trace: a process for each stage, in it a track of what is computed, and one for each kind of sending, exposed and
/// hidden apart.
pub(super) fn trace(answer: &Answer) -> Result<String, Failure> {
    let stretches = timeline(&answer.layout, &answer.step, &answer.stages);
    let sent = traffic(&answer.layout, &answer.step, &answer.stages, &stretches);
    let mut tracks: Vec<_> = sent.iter().map(|it| (it.what, it.is_hidden)).collect();
    tracks.sort_unstable();
    tracks.dedup();
    let named = |pid: u32, tid: usize, what: &str, name: String| {
        json!({"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}).to_string()
    };
    let mut events = vec![];
    for stage in 0..answer.layout.pp {
        events.push(named(stage, 0, "process_name", format!("stage {stage}, {}", answer.kind)));
        events.push(named(stage, 0, "thread_name", "computed".into()));
        for (index, track) in tracks.iter().enumerate() {
            events.push(named(stage, 1 + index, "thread_name", track_name(*track)));
        }
    }
    for stretch in &stretches {
        events.push(serde_json::to_string(&computed(stretch))?);
    }
    for Sent { stage, what, is_hidden, begin_s, seconds } in sent {
        let track = tracks.binary_search(&(what, is_hidden)).expect("each has a track");
        events.push(serde_json::to_string(&Event {
            name: what.into(),
            cat: if is_hidden { "hidden" } else { "exposed" },
            ph: "X",
            pid: stage,
            tid: 1 + track,
            ts: begin_s * 1e6,
            dur: seconds * 1e6,
            args: json!({}),
        })?);
    }
    let title = json!(format!("{} on {}, {}", answer.model, answer.platform, answer.kind));
    let events = events.join(",");
    Ok(format!(
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"title\":{title}}},\"traceEvents\":[{events}]}}"
    ))
}

fn track_name((what, is_hidden): (&str, bool)) -> String {
    format!("{what}, {}", if is_hidden { "hidden" } else { "exposed" })
}

fn computed(stretch: &Stretch) -> Event {
    let (name, cat, args) = match stretch.work {
        Work::Forward { micro_batch, part } => {
            (format!("forward {micro_batch}"), "forward", json!({ "part": part }))
        }
        Work::Backward { micro_batch, part } => {
            (format!("backward {micro_batch}"), "backward", json!({ "part": part }))
        }
        Work::Contention => ("contention".into(), "contention", json!({})),
        Work::Data => ("gradients and weights".into(), "data", json!({})),
        Work::Offload => ("offload".into(), "offload", json!({})),
        Work::Optimizer => ("optimizer".into(), "optimizer", json!({})),
        Work::Stragglers => ("stragglers".into(), "stragglers", json!({})),
    };
    Event {
        name,
        cat,
        ph: "X",
        pid: stretch.stage,
        tid: 0,
        ts: stretch.begin_s * 1e6,
        dur: stretch.seconds * 1e6,
        args,
    }
}
