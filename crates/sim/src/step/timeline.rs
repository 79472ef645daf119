//! A step as it goes by on each stage: one forward, one backward, with or without interleaving.
//!
//! The closed form gives how long a pass takes on the slowest stage; here each stage does its passes in the order of
//! Megatron-LM's schedules (Narayanan et al., SC21, section 2.2), each as soon as what it needs is there.

use crate::step::figures::{Communication, ComputeTimes, Exposure, Stage, Step};
use crate::step::layout::{Layout, Zero};

/// A stretch of time on a stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stretch {
    /// The stage, from 0.
    pub stage: u32,
    /// What goes on.
    pub work: Work,
    /// When it begins, in seconds from the beginning of the step.
    pub begin_s: f64,
    /// How long it takes.
    pub seconds: f64,
}

/// What goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A forward pass through a part of a stage.
    Forward {
        /// The micro-batch.
        micro_batch: u32,
        /// The part.
        part: u32,
    },
    /// A backward pass, with what is computed again.
    Backward {
        /// The micro-batch.
        micro_batch: u32,
        /// The part.
        part: u32,
    },
    /// What passes take longer because collectives beside them take processors: after the passes, since it is not known which are longer.
    Contention,
    /// Gradients and weights among copies, as far as nothing runs beside it.
    Data,
    /// What is fetched from or written to another tier, as far as nothing runs beside it.
    Offload,
    /// The optimizer.
    Optimizer,
    /// Waiting for the slowest of many.
    Stragglers,
}

/// The passes of a stage, in order: forward or not, micro-batch, part.
fn passes(layout: &Layout, stage: u32) -> Vec<(bool, u32, u32)> {
    let (pp, parts, count) = (layout.pp, layout.interleave, layout.micro_batches());
    let all = count * parts;
    // Micro-batches go through one part in groups of as many as there are stages, then through the next.
    let nth = |index: u32, forward: bool| {
        let (group, inside) =
            if parts == 1 { (index, 0) } else { (index / (pp * parts), index % (pp * parts)) };
        let (micro_batch, part) =
            if parts == 1 { (group, 0) } else { (group * pp + inside % pp, inside / pp) };
        (forward, micro_batch, if forward { part } else { parts - 1 - part })
    };
    let ahead = match parts {
        1 => pp - stage - 1,
        _ => 2 * (pp - stage - 1) + (parts - 1) * pp,
    }
    .min(all);
    let mut order: Vec<_> = (0..ahead).map(|index| nth(index, true)).collect();
    for index in 0..all - ahead {
        order.push(nth(ahead + index, true));
        order.push(nth(index, false));
    }
    order.extend((all - ahead..all).map(|index| nth(index, false)));
    order
}

/// The stretches of a predicted step, in the order in which they end on each stage; each of [`stages`](crate::Job::predict_stages)
/// keeps its pace.
///
/// # Panics
/// When there are fewer `stages` than the layout has.
#[must_use]
pub fn timeline(layout: &Layout, step: &Step, stages: &[Stage]) -> Vec<Stretch> {
    let (pp, parts, count) =
        (layout.pp as usize, layout.interleave as usize, layout.micro_batches() as usize);
    let passes_of = (count * parts) as f64;
    let communication = &step.communication;
    let sent = communication.tensor.exposed_s()
        + communication.context.exposed_s()
        + communication.expert.exposed_s();
    let forward_part = if layout.recompute.keeps_inputs_alone() { 1.0 / 3.0 } else { 0.5 };
    let handed = communication.pipeline.exposed_s() / (2.0 * (passes_of + (pp - 1) as f64));
    let ComputeTimes { forward_s, backward_s, recompute_s, contention_s, expert_contention_s, .. } =
        step.compute;
    let forward = (forward_s + sent * forward_part) / passes_of;
    let backward = (backward_s + recompute_s + sent * (1.0 - forward_part)) / passes_of;
    // What hides beside another micro-batch's passes holds up those that have none beside them, and so the others less than on
    // average.
    let hidden = (communication.expert.inside.hidden_s + communication.expert.between.hidden_s) / passes_of;
    let hidden = (hidden - expert_contention_s / passes_of).max(0.0);
    let alone = ((parts - 1) * pp + 1).min(count * parts) as f64;
    let beside = -hidden * alone / (passes_of - alone).max(1.0);

    let orders: Vec<_> = (0..layout.pp).map(|stage| passes(layout, stage)).collect();
    // Passes before a backward one comes, and as many at the end.
    let filling: Vec<_> =
        orders.iter().map(|order| order.iter().take_while(|(is_forward, ..)| *is_forward).count()).collect();
    // When each pass has ended, by stage, micro-batch and part.
    let place = |stage: usize, micro_batch: u32, part: u32| {
        (stage * count + micro_batch as usize) * parts + part as usize
    };
    let mut ended = [vec![None; pp * count * parts], vec![None; pp * count * parts]];
    let (mut next, mut free) = (vec![0; pp], vec![0.0_f64; pp]);
    let mut stretches = Vec::with_capacity(2 * pp * count * parts);
    let mut moved = true;
    while moved {
        moved = false;
        for stage in 0..pp {
            while let Some(&(is_forward, micro_batch, part)) = orders[stage].get(next[stage]) {
                let [forwards, backwards] = &ended;
                let last_part = part as usize == parts - 1;
                let needs = match (is_forward, stage) {
                    (true, 0) if part == 0 => Some(0.0),
                    (true, 0) => forwards[place(pp - 1, micro_batch, part - 1)],
                    (true, _) => forwards[place(stage - 1, micro_batch, part)],
                    (false, _) if stage == pp - 1 && last_part => forwards[place(stage, micro_batch, part)],
                    (false, _) if stage == pp - 1 => backwards[place(0, micro_batch, part + 1)],
                    (false, _) => backwards[place(stage + 1, micro_batch, part)],
                };
                let Some(ready) = needs else { break };
                let begin_s = free[stage].max(ready);
                let (seconds, part_of_sent) = match is_forward {
                    true => (forward, forward_part),
                    false => (backward, 1.0 - forward_part),
                };
                let is_alone = next[stage].min(orders[stage].len() - 1 - next[stage]) < filling[stage];
                let late = part_of_sent * if is_alone { hidden } else { beside };
                let seconds = stages[stage].pace * (seconds + late) + handed;
                let work = match is_forward {
                    true => Work::Forward { micro_batch, part },
                    false => Work::Backward { micro_batch, part },
                };
                stretches.push(Stretch { stage: stage as u32, work, begin_s, seconds });
                free[stage] = begin_s + seconds;
                ended[usize::from(!is_forward)][place(stage, micro_batch, part)] = Some(free[stage]);
                next[stage] += 1;
                moved = true;
            }
        }
    }
    let after = [
        (Work::Contention, contention_s),
        (Work::Data, communication.data.exposed_s()),
        (Work::Offload, step.offload.exposed_s),
        (Work::Optimizer, step.compute.optimizer_s),
        (Work::Stragglers, step.straggle_s),
    ];
    let mut begin_s = free.iter().copied().fold(0.0, f64::max);
    for (work, seconds) in after.into_iter().filter(|(_, seconds)| *seconds > 0.0) {
        stretches.extend((0..layout.pp).map(|stage| Stretch { stage, work, begin_s, seconds }));
        begin_s += seconds;
    }
    stretches
}

/// A stretch of sending on a stage: a part of what the closed form counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sent {
    /// The stage, from 0.
    pub stage: u32,
    /// What for and where, such as "tensor, inside racks".
    pub what: &'static str,
    /// Whether it runs beside computation, or holds it up.
    pub is_hidden: bool,
    /// When it begins, in seconds from the beginning of the step.
    pub begin_s: f64,
    /// How long it takes.
    pub seconds: f64,
}

/// When something is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// In each pass.
    Passes,
    /// Before each pass, or while a stage waits for it.
    Before,
    /// After the last pass, and what runs beside computation before that, and for what is gathered in the first passes.
    Ends,
}

/// What each stage of a predicted step sends, as it goes by beside `stretches`, the [`timeline`] of the step. Of each stage and each kind the
/// seconds add up to the step's, exposed and hidden apart, times the stage's pace where it hides or is sent in passes.
///
/// The closed form says how much is sent and not when: what is sent in passes is spread over them by their length.
///
/// # Panics
/// When there are fewer `stages` than the layout has.
#[must_use]
pub fn traffic(layout: &Layout, step: &Step, stages: &[Stage], stretches: &[Stretch]) -> Vec<Sent> {
    let mut of = vec![vec![]; layout.pp as usize];
    for stretch in stretches {
        of[stretch.stage as usize].push(*stretch);
    }
    let sent = |(at, stretches): (usize, &Vec<_>)| of_stage(layout, step, stages[at].pace, stretches);
    of.iter().enumerate().flat_map(sent).collect()
}

/// What one stage sends.
fn of_stage(layout: &Layout, step: &Step, pace: f64, stretches: &[Stretch]) -> Vec<Sent> {
    let is_pass = |it: &&Stretch| matches!(it.work, Work::Forward { .. } | Work::Backward { .. });
    let passes: Vec<_> = stretches.iter().filter(is_pass).collect();
    let (Some(first), Some(last)) = (passes.first(), passes.last()) else { return vec![] };
    let computed: f64 = passes.iter().map(|pass| pass.seconds).sum();
    let after = |work: Work| {
        stretches.iter().find(|stretch| stretch.work == work).map_or(0.0, |stretch| stretch.begin_s)
    };
    let end = |pass: &Stretch| pass.begin_s + pass.seconds;
    let mut sent = vec![];
    let mut push = |what, is_hidden, begin_s, seconds| {
        if seconds > 0.0 {
            sent.push(Sent { stage: first.stage, what, is_hidden, begin_s, seconds });
        }
    };
    // What holds computation up is one after the other: in a pass at its end, else after all passes.
    let mut ends: Vec<_> = passes.iter().map(|pass| end(pass)).collect();
    let mut later = [after(Work::Data), after(Work::Offload)];
    // Gradients are shared with the last passes, weights with the first, unless it is done for each micro-batch.
    let gathered = match layout.zero {
        Zero::None => Some(0.0),
        Zero::Optimizer => {
            let value = layout.precision.bytes();
            Some(value / (value + if layout.wide_gradients { 4.0 } else { value }))
        }
        Zero::Gradients | Zero::Weights => None,
    };
    for (what, when, Exposure { exposed_s, hidden_s }) in sending(step, pace) {
        match when {
            When::Passes => {
                for (pass, end) in passes.iter().zip(&mut ends) {
                    let seconds = exposed_s * pass.seconds / computed;
                    *end -= seconds;
                    push(what, false, *end, seconds);
                }
            }
            When::Before => {
                let mut free = 0.0;
                for pass in &passes {
                    push(what, false, free, exposed_s * (end(pass) - free) / end(last));
                    free = end(pass);
                }
            }
            When::Ends => {
                let begin = &mut later[usize::from(what == OFFLOAD)];
                push(what, false, *begin, exposed_s);
                *begin += exposed_s;
            }
        }
        // Beside what holds a stage up other links go on, at the step's end too.
        let tail = step.compute.contention_s
            + match what {
                OFFLOAD => step.communication.data.exposed_s(),
                BETWEEN => step.communication.data.inside.exposed_s,
                _ => 0.0,
            };
        let tail_begin = after(if step.compute.contention_s > 0.0 { Work::Contention } else { Work::Data });
        match gathered.filter(|_| when == When::Ends && what != OFFLOAD) {
            Some(part) => {
                let [begins, ends] = [part * hidden_s, (1.0 - part) * hidden_s];
                let behind = tail.min(ends);
                push(what, true, first.begin_s, begins);
                push(what, true, end(last) - (ends - behind), ends - behind);
                push(what, true, tail_begin, behind);
            }
            None => {
                // From pass to pass where passes alone are not enough.
                let (waits, tail) = if hidden_s > computed { (true, tail) } else { (false, 0.0) };
                let mut free = 0.0;
                let spans = passes.iter().map(|pass| {
                    let begin = if waits { free } else { pass.begin_s };
                    free = end(pass);
                    (begin, free - begin)
                });
                let spans: Vec<_> = spans.chain([(tail_begin, tail)]).collect();
                let all: f64 = spans.iter().map(|(_, seconds)| seconds).sum();
                for (begin_s, seconds) in spans {
                    push(what, true, begin_s, hidden_s * seconds / all);
                }
            }
        }
    }
    sent
}

const OFFLOAD: &str = "offload";
const BETWEEN: &str = "data, between racks";

/// What a stage of this pace sends, and when.
fn sending(step: &Step, pace: f64) -> [(&'static str, When, Exposure); 11] {
    let Communication { tensor, context, expert, pipeline, data } = step.communication;
    let beside = |shown: Exposure| Exposure { hidden_s: pace * shown.hidden_s, ..shown };
    let own = |shown: Exposure| Exposure { exposed_s: pace * shown.exposed_s, ..beside(shown) };
    [
        ("tensor, inside racks", When::Passes, own(tensor.inside)),
        ("tensor, between racks", When::Passes, own(tensor.between)),
        ("context, inside racks", When::Passes, own(context.inside)),
        ("context, between racks", When::Passes, own(context.between)),
        ("expert, inside racks", When::Passes, own(expert.inside)),
        ("expert, between racks", When::Passes, own(expert.between)),
        ("pipeline, inside racks", When::Before, beside(pipeline.inside)),
        ("pipeline, between racks", When::Before, beside(pipeline.between)),
        ("data, inside racks", When::Ends, beside(data.inside)),
        (BETWEEN, When::Ends, beside(data.between)),
        (OFFLOAD, When::Ends, beside(step.offload)),
    ]
}

#[cfg(test)]
mod tests {
    use polder_platform::Platform;

    use super::*;
    use crate::step::job::{Job, PlannedStep};
    use crate::step::model::Model;

    fn planned(pp: u32, interleave: u32, batch: u32) -> (Layout, Step, Vec<Stage>) {
        let layout = serde_json::json!({"tp": 8, "dp": 2, "pp": pp, "interleave": interleave, "batch": batch, "flash": true});
        of("gpt3-175b", layout)
    }

    fn of(model: &str, layout: serde_json::Value) -> (Layout, Step, Vec<Stage>) {
        let (platform, model) = (Platform::load("dgx-h100").unwrap(), Model::load(model).unwrap());
        let (job, layout) = (Job::new(&platform), serde_json::from_value(layout).unwrap());
        let (planned, stages) = job.predict_stages(&model, &layout).unwrap();
        (layout, planned.step, stages)
    }

    /// GPT-3 has 96 layers: the last three come out uneven.
    const SHAPES: [(u32, u32, u32); 9] = [
        (1, 1, 8),
        (4, 1, 8),
        (8, 1, 64),
        (4, 3, 16),
        (8, 4, 64),
        (16, 6, 64),
        (5, 1, 40),
        (7, 4, 56),
        (10, 3, 80),
    ];

    #[test]
    fn every_stage_does_every_pass_once_and_one_thing_at_a_time() {
        for (pp, interleave, batch) in SHAPES {
            let (layout, step, stages) = planned(pp, interleave, batch);
            let all = timeline(&layout, &step, &stages);
            let passes = all
                .iter()
                .filter(|stretch| matches!(stretch.work, Work::Forward { .. } | Work::Backward { .. }));
            assert_eq!(passes.count() as u32, 2 * pp * interleave * layout.micro_batches());
            for stage in 0..pp {
                let mut own: Vec<_> = all.iter().filter(|stretch| stretch.stage == stage).collect();
                own.sort_by(|a, b| a.begin_s.total_cmp(&b.begin_s));
                for pair in own.windows(2) {
                    assert!(pair[0].begin_s + pair[0].seconds <= pair[1].begin_s + 1e-9, "{pair:?}");
                    assert!(
                        own.iter().filter(|stretch| stretch.work == pair[0].work).count() == 1,
                        "{:?} twice",
                        pair[0]
                    );
                }
            }
        }
    }

    fn end(layout: &Layout, step: &Step, stages: &[Stage]) -> f64 {
        timeline(layout, step, stages).iter().map(|it| it.begin_s + it.seconds).fold(0.0, f64::max)
    }

    /// What the closed form calls the bubble is what the schedules leave.
    #[test]
    fn the_end_of_the_timeline_is_the_closed_forms_step() {
        for (pp, interleave, batch) in SHAPES {
            let (layout, step, stages) = planned(pp, interleave, batch);
            let (end, total) = (end(&layout, &step, &stages), step.total_s);
            assert!((end / total - 1.0).abs() < 0.02, "pp {pp} x {interleave}: {end} for {total}");
        }
    }

    /// Those that run beside another micro-batch's pass take less than those that fill and empty the stages.
    #[test]
    fn passes_that_have_none_beside_them_wait_for_their_experts() {
        for (pp, interleave) in [(1, 1), (2, 1), (2, 4), (4, 1), (4, 2)] {
            let layout = serde_json::json!({"tp": 2, "ep": 8, "dp": 8, "pp": pp, "interleave": interleave, "batch": 128,
                "flash": true, "overlap": {"expert": true}});
            let (layout, step, stages) = of("mixtral-8x7b", layout);
            let (end, total) = (end(&layout, &step, &stages), step.total_s);
            assert!((end / total - 1.0).abs() < 0.02, "pp {pp} x {interleave}: {end} for {total}");
            let all = timeline(&layout, &step, &stages);
            let its = |micro_batch| {
                let work = Work::Forward { micro_batch, part: 0 };
                all.iter().find(|it| it.stage == 0 && it.work == work).unwrap().seconds
            };
            assert!(its(0) > 1.05 * its(10), "{} and {}", its(0), its(10));
        }
    }

    /// A stage with fewer blocks has shorter passes, and waits.
    #[test]
    fn passes_of_uneven_stages_are_as_long_as_their_blocks() {
        let (layout, step, stages) = planned(5, 1, 40);
        assert_eq!(stages.iter().map(|stage| stage.blocks).collect::<Vec<_>>(), [19, 20, 19, 19, 19]);
        let all = timeline(&layout, &step, &stages);
        let first = |stage| all.iter().find(|stretch| stretch.stage == stage).unwrap().seconds;
        let ratio = first(2) / first(1);
        assert!((ratio / (19.0 / 20.0) - 1.0).abs() < 0.01, "{ratio}");
        let (layout, step, stages) = planned(8, 4, 64);
        assert!(stages.iter().all(|stage| stage.blocks == 12));
        // The head takes longer than a block, the embedding hardly anything.
        let paces: Vec<_> = stages.iter().map(|stage| stage.pace).collect();
        assert!(paces[7] == 1.0 && (0.9..1.0).contains(&paces[1]), "{paces:?}");
        assert!(paces[1..7].iter().all(|pace| *pace == paces[1]) && paces[0] < 1.01 * paces[1], "{paces:?}");
        let all = timeline(&layout, &step, &stages);
        let first = |stage| all.iter().find(|stretch| stretch.stage == stage).unwrap().seconds;
        assert!((first(1) / first(7) / paces[1] - 1.0).abs() < 0.01, "{} and {}", first(1), first(7));
    }

    /// Layouts even and uneven, of many micro-batches and of few, with much that hides and with nothing.
    fn layouts(tier: &str) -> impl Iterator<Item = Layout> {
        let all = serde_json::json!({"tensor": true, "pipeline": true, "data": true, "offload": true});
        let far = serde_json::json!({"tier": tier, "weights": true, "optimizer": true, "activations": true});
        let [all, far] = [all, far].map(|it| [serde_json::json!({}), it]);
        (0..360).map(move |index: usize| {
            let pp = [1, 3, 5, 8, 16][index % 5];
            let batch = [8, 24, 320][index / 5 % 3];
            let (overlap, offload) = (&all[index / 15 % 2], &far[index / 30 % 2]);
            let interleave = 1 + index / 60 % 2;
            let zero = ["none", "optimizer", "weights"][index / 120];
            let layout = serde_json::json!({"tp": 8, "dp": 8, "pp": pp, "interleave": interleave, "batch": batch, "flash": true,
                "zero": zero, "overlap": overlap, "offload": offload});
            serde_json::from_value(layout).unwrap()
        })
    }

    #[test]
    fn no_two_stretches_of_a_track_overlap_and_the_trace_ends_near_the_total() {
        let mut seen = 0;
        for (platform, tier) in [("dgx-h100", "host"), ("nvl72-cxl", "pool")] {
            let platform = Platform::load(platform).unwrap();
            let job = Job::new(&platform);
            for model in ["gpt3-175b", "llama3-70b", "llama3-8b", "mixtral-8x7b"] {
                let model = Model::load(model).unwrap();
                for layout in layouts(tier) {
                    let Ok((PlannedStep { step, .. }, stages)) = job.predict_stages(&model, &layout) else {
                        continue;
                    };
                    let stretches = timeline(&layout, &step, &stages);
                    let mut sent = traffic(&layout, &step, &stages, &stretches);
                    let track = |transfer: &Sent| (transfer.stage, transfer.what, transfer.is_hidden);
                    sent.sort_by(|a, b| track(a).cmp(&track(b)).then(a.begin_s.total_cmp(&b.begin_s)));
                    let late = |pair: &&[Sent]| pair[0].begin_s + pair[0].seconds - pair[1].begin_s;
                    let pairs = sent.windows(2).filter(|pair| track(&pair[0]) == track(&pair[1]));
                    let wrong = pairs.into_iter().find(|pair| late(pair) > 1e-12 * step.total_s);
                    assert!(wrong.is_none(), "{wrong:?} of {layout:?}");
                    let end =
                        stretches.iter().map(|stretch| stretch.begin_s + stretch.seconds).fold(0.0, f64::max);
                    let is_usual = layout.micro_batches() >= 2 * layout.pp && model.layers >= 4 * layout.pp;
                    let bounds = if is_usual { 0.92..=1.0 + 1e-9 } else { 0.8..=1.0 + 1e-9 };
                    assert!(
                        bounds.contains(&(end / step.total_s)),
                        "{end} for {} of {layout:?}",
                        step.total_s
                    );
                    seen += 1;
                }
            }
        }
        assert!(seen > 1000, "{seen}");
    }

    #[test]
    fn what_each_stage_sends_adds_up_to_the_steps_figures_and_lies_inside_the_step() {
        let model = Model::load("mixtral-8x7b").unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for (platform, more) in [
            ("dgx-h100", serde_json::json!({"ep": 4, "zero": "optimizer", "sequence_parallel": true})),
            (
                "dgx-h100",
                serde_json::json!({"cp": 2, "dp": 4, "interleave": 2, "overlap": {"context": true}}),
            ),
            ("dgx-h100", serde_json::json!({"ep": 8, "pp": 7, "overlap": {"expert": true, "tensor": true}})),
            (
                "nvl72-cxl",
                serde_json::json!({"zero": "gradients", "offload": {"tier": "pool", "activations": true, "optimizer": true}}),
            ),
        ] {
            let layout = serde_json::json!({"tp": 2, "dp": 8, "pp": 4, "batch": 64, "flash": true,
                "overlap": {"tensor": true, "pipeline": true, "data": true, "offload": true}});
            let serde_json::Value::Object(mut layout) = layout else { unreachable!() };
            layout.extend(more.as_object().unwrap().clone());
            let layout = serde_json::from_value(layout.into()).unwrap();
            let platform = Platform::load(platform).unwrap();
            let job = Job::new(&platform);
            let (PlannedStep { step, .. }, stages) = job.predict_stages(&model, &layout).unwrap();
            let stretches = timeline(&layout, &step, &stages);
            let end = stretches.iter().map(|stretch| stretch.begin_s + stretch.seconds).fold(0.0, f64::max);
            let sent = traffic(&layout, &step, &stages, &stretches);
            for transfer in &sent {
                assert!(
                    transfer.begin_s >= -1e-9 && transfer.begin_s + transfer.seconds <= end * (1.0 + 1e-9),
                    "{transfer:?}"
                );
            }
            for (what, when, Exposure { exposed_s, hidden_s }) in sending(&step, 1.0) {
                for (is_hidden, all) in [(false, exposed_s), (true, hidden_s)] {
                    for stage in 0..layout.pp {
                        let pace = stages[stage as usize].pace;
                        let is_paced = is_hidden || when == When::Passes;
                        let expected = if is_paced { pace * all } else { all };
                        let own = |transfer: &&Sent| {
                            (transfer.stage, transfer.what, transfer.is_hidden) == (stage, what, is_hidden)
                        };
                        let sum: f64 = sent.iter().filter(own).map(|transfer| transfer.seconds).sum();
                        assert!(
                            (sum - expected).abs() <= 1e-9 * step.total_s,
                            "{what}: {sum} for {expected}"
                        );
                    }
                    if all > 0.0 {
                        seen.insert((what, is_hidden));
                    }
                }
            }
        }
        let kinds = ["tensor", "context", "expert", "pipeline", "data", "offload"];
        let missing = kinds.iter().find(|kind| !seen.iter().any(|(what, _)| what.starts_with(*kind)));
        assert!(missing.is_none() && seen.len() >= 9, "{missing:?} of {seen:?}");
    }
}
