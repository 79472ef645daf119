//! What a step is made of, held against formulas and against what must be true of any step.

use polder_platform::{
    AttachKind, Bytes, Efficiency, Operations, Pbr, Platform, Protocol, Reached, TierId, Time, Topology,
    TransferRate,
};
use polder_sim::memory::kv_bytes;
use polder_sim::{
    Experts, Exposure, Indexer, Job, Latent, Layout, Mixer, Model, Offload, Order, OtherBlocks, Overlap,
    Precision, Recompute, Recurrent, Refusal, Scoped, Step, Window, Zero,
};

fn gpt3() -> Model {
    Model::load("gpt3-175b").unwrap()
}

fn layout() -> Layout {
    Layout {
        tp: 8,
        cp: 1,
        ep: 1,
        dp: 8,
        pp: 16,
        interleave: 1,
        batch: 1536,
        micro_batch: 1,
        sequence_parallel: true,
        gather_again: true,
        recompute: Recompute::None,
        flash: false,
        zero: Zero::None,
        precision: polder_sim::Precision::Bf16,
        wide_gradients: true,
        overlap: Overlap::default(),
        offload: Offload::default(),
    }
}

fn step(platform: &str, layout: &Layout) -> Step {
    predict(&Platform::load(platform).unwrap(), &gpt3(), layout)
}

fn predict(platform: &Platform, model: &Model, layout: &Layout) -> Step {
    Job::new(platform).predict(model, layout).unwrap().step
}

fn refusal(platform: &str, model: &str, layout: &Layout) -> Refusal {
    let platform = Platform::load(platform).unwrap();
    Job::new(&platform).predict(&Model::load(model).unwrap(), layout).unwrap_err()
}

#[test]
fn parameters_are_those_that_the_models_are_named_after() {
    for (name, billions) in [
        ("gpt3-175b", 175.0),
        ("llama3-405b", 405.0),
        ("llama3-70b", 70.6),
        ("llama3-8b", 8.03),
        ("palm-540b", 540.0),
        ("megatron-530b", 530.0),
        ("megatron-1t", 1008.0),
        ("mixtral-8x7b", 46.7),
        ("qwen3-235b-a22b", 235.0),
    ] {
        let parameters = Model::load(name).unwrap().parameters() / 1e9;
        assert!((parameters / billions - 1.0).abs() < 0.01, "{name}: {parameters} billion");
    }
}

/// 72 B s L h^2 (1 + s/6h + V/12Lh), SC21, section 3.
#[test]
fn operations_are_those_of_the_formula() {
    let (h, l, s, v, b) = (12288.0, 96.0, 2048.0, 51200.0, 1536.0);
    let formula = 72.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
    assert!((gpt3().flops(1536) / formula - 1.0).abs() < 1e-3);
}

/// s b h (34 / t + 5 a s / (h t)) a layer with sequence parallelism, without the second part when attention is selectively
/// recomputed (Korthikanti et al., 2022, equations 4 and 6); 16 micro-batches under way in the first of 16 stages.
#[test]
fn activations_are_those_of_the_formula() {
    let (h, s, a, t) = (12288.0, 2048.0, 96.0, 8.0);
    let whole = s * h * (34.0 / t + 5.0 * a * s / (h * t)) * 6.0 * 16.0;
    let selective = s * h * 34.0 / t * 6.0 * 16.0;
    for (recompute, formula) in [(Recompute::None, whole), (Recompute::Selective, selective)] {
        let bytes =
            step("dgx-a100", &Layout { recompute, ..layout() }).memory.accelerator().activations_bytes;
        assert!((bytes / formula - 1.0).abs() < 0.01, "{recompute:?}: {bytes} for {formula}");
    }
}

/// What is gathered for attention and for the feed-forward part, the part that a rank has aside.
#[test]
fn what_is_gathered_is_gathered_again_or_kept() {
    let again = step("dgx-a100", &layout());
    let kept = step("dgx-a100", &Layout { gather_again: false, ..layout() });
    let seconds = |step: &Step| step.communication.tensor.inside.exposed_s;
    assert!((seconds(&kept) / seconds(&again) - 0.8).abs() < 1e-9, "8 of 10 halves of all-reduces are left");
    let more = kept.memory.accelerator().activations_bytes - again.memory.accelerator().activations_bytes;
    let bytes = 2.0 * 2.0 * 2048.0 * 12288.0 * 7.0 / 8.0 * 6.0 * 16.0;
    assert!((more / bytes - 1.0).abs() < 1e-9, "{more} for {bytes}");
}

#[test]
fn without_a_vocabulary_there_is_neither_embedding_nor_head() {
    let model = Model { vocabulary: 0, ..gpt3() };
    model.check().unwrap();
    assert!((model.parameters() / (96.0 * model.dense_parameters()) - 1.0).abs() < 1e-12);
    let platform = Platform::load("dgx-a100").unwrap();
    let step = |pp| predict(&platform, &model, &Layout { pp, dp: 128 / pp, ..layout() });
    let (whole, half) = (step(1).compute, step(2).compute);
    assert!(
        (half.forward_s / whole.forward_s - 1.0).abs() < 1e-9,
        "blocks alone, on twice the batch of each"
    );
    let cut = Layout { pp: 49, interleave: 2, batch: 49 * 32, ..layout() };
    assert!(
        cut.check(&model).is_err() && cut.check(&gpt3()).is_ok(),
        "only embedding and head make 98 of 96"
    );
}

/// A curve that is level at the constants, with other constants beside it, changes nothing; one that is lower does.
#[test]
fn efficiency_by_size_takes_the_place_of_constants() {
    let mut platform = Platform::load("dgx-a100").unwrap();
    platform.rack.get_mut("dgx").unwrap().accelerator.fitted.depth = 0.0;
    let plain = step_on(&platform);
    for (matrix, memory, same) in [(0.767, 0.761, true), (0.5, 0.761, false), (0.767, 0.5, false)] {
        let mut measured = platform.clone();
        let chip = &mut measured.rack.get_mut("dgx").unwrap().accelerator;
        chip.efficiency = Efficiency {
            matrix: Some(vec![Reached { size: Operations::new(1e9), reached: matrix }].try_into().unwrap()),
            memory: Some(vec![Reached { size: Bytes::new(1e6), reached: memory }].try_into().unwrap()),
            in_turn: false,
        };
        (chip.fitted.matrix, chip.fitted.depth, chip.fitted.stream) = (0.1, 1e6, 0.1);
        let forward = step_on(&measured).compute.forward_s / plain.compute.forward_s;
        assert_eq!((forward - 1.0).abs() < 1e-12, same, "{matrix}, {memory}: {forward}");
        assert!(same || forward > 1.05, "{matrix}, {memory}: {forward}");
        measured.rack.get_mut("dgx").unwrap().accelerator.efficiency.in_turn = true;
        assert!(step_on(&measured).compute.forward_s > 1.05 * forward * plain.compute.forward_s);
    }
}

/// Ten halves of all-reduces a block with sequence parallelism; two messages a micro-batch, and two a stage to come in.
#[test]
fn a_call_counts_once_a_collective_and_once_a_message() {
    let mut platform = Platform::load("dgx-a100").unwrap();
    let mut calls = |seconds| {
        platform.rack.get_mut("dgx").unwrap().fabric.as_mut().unwrap().software.call = Time::new(seconds);
        platform.between.as_mut().unwrap().software.call = Time::new(seconds);
        step_on(&platform)
    };
    let (before, after) = (calls(0.0), calls(1e-3));
    let more = |of: fn(&Step) -> f64| of(&after) - of(&before);
    let (blocks, count, collectives) = (6.0, 192.0, 10.0);
    let tensor = more(|step| step.communication.tensor.inside.exposed_s);
    assert!((tensor / (blocks * count * collectives * 1e-3) - 1.0).abs() < 1e-9, "{tensor}");
    let pipeline = more(|step| step.communication.pipeline.between.exposed_s);
    assert!((pipeline / (2.0 * (15.0 + count) * 1e-3) - 1.0).abs() < 1e-9, "{pipeline}");
}

fn step_on(platform: &Platform) -> Step {
    predict(platform, &gpt3(), &layout())
}

#[test]
fn the_parts_of_a_step_add_up() {
    let step = step("dgx-a100", &layout());
    let parts = step.compute.total_s()
        + step.communication.exposed_s()
        + step.bubble_s
        + step.offload.exposed_s
        + step.straggle_s;
    assert!((step.total_s / parts - 1.0).abs() < 1e-12);
    let memory = step.memory.accelerator();
    let kinds =
        memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.activations_bytes;
    assert!((memory.used_bytes / kinds - 1.0).abs() < 1e-12);
}

#[test]
fn nothing_gets_slower_by_more_overlap_or_smaller_by_less_sharing() {
    let base = Layout { zero: Zero::Optimizer, interleave: 3, ..layout() };
    let before = step("dgx-a100", &base);
    for overlap in [
        Overlap { tensor: true, ..base.overlap },
        Overlap { pipeline: true, ..base.overlap },
        Overlap { data: true, ..base.overlap },
    ] {
        let after = step("dgx-a100", &Layout { overlap, ..base });
        assert!(after.total_s < before.total_s, "{overlap:?}");
    }
    let used = |zero| step("dgx-a100", &Layout { zero, ..base }).memory.accelerator().used_bytes;
    let all = [Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Weights].map(used);
    assert!(all.windows(2).all(|pair| pair[1] < pair[0]), "{all:?}");
}

#[test]
fn interleaving_divides_the_bubble() {
    let bubble = |interleave| step("dgx-a100", &Layout { interleave, ..layout() }).bubble_s;
    assert!((bubble(1) / bubble(3) - 3.0).abs() < 1e-9);
}

#[test]
fn what_is_offloaded_leaves_the_accelerator_and_takes_time() {
    let near = step("nvl72-cxl", &layout());
    for tier in [TierId::Host, TierId::Pool] {
        let offload = Offload { tier, optimizer: true, ..Offload::default() };
        let far = step("nvl72-cxl", &Layout { offload, ..layout() });
        assert_eq!(far.memory.offloaded().used_bytes, near.memory.accelerator().optimizer_bytes);
        assert!(far.memory.accelerator().used_bytes < near.memory.accelerator().used_bytes);
        // 12 bytes a parameter both ways, through what is slower: the accelerator's link each way, or half its share of the
        // memory behind, which reads and writes in turn.
        let bandwidth = if tier == TierId::Host { 128e9 } else { 50e9 };
        let seconds = near.memory.accelerator().optimizer_bytes / bandwidth;
        assert!((far.offload.exposed_s / seconds - 1.0).abs() < 1e-9, "{tier:?}: {}", far.offload.exposed_s);
    }
}

#[test]
fn what_hangs_on_one_link_of_a_switch_shares_it() {
    let weights = Offload { weights: true, ..Offload::default() };
    let taken = |accelerators| {
        let mut platform = Platform::load("dgx-a100").unwrap();
        platform.rack.values_mut().for_each(|rack| rack.host.attach.accelerators = accelerators);
        let cut = Layout { offload: weights, ..layout() };
        predict(&platform, &gpt3(), &cut).offload.exposed_s
    };
    assert!((taken(4) / taken(1) - 4.0).abs() < 1e-9);
}

/// As docs/plan-platforms.md says: they are recorded and printed.
#[test]
fn how_cpus_attach_and_what_cxl_carries_change_no_figure() {
    let mut platform = Platform::load("nvl72-cxl").unwrap();
    let mut refusals = std::collections::BTreeSet::new();
    let mut steps = vec![];
    let kinds = [AttachKind::C2c, AttachKind::Pcie, AttachKind::PcieSwitch, AttachKind::Ucie];
    for kind in kinds.map(Some).into_iter().chain([None]) {
        for carries in [vec![Protocol::Mem], vec![Protocol::Cache, Protocol::Mem, Protocol::Io]] {
            for rack in platform.rack.values_mut() {
                rack.host.attach.kind = kind;
                rack.fabric.as_mut().unwrap().carries = carries.clone();
            }
            platform.between.as_mut().unwrap().carries = carries;
            let job = Job::new(&platform);
            refusals.insert(job.recorded());
            steps.extend([TierId::Host, TierId::Pool].map(|tier| {
                let offload = Offload { tier, weights: true, optimizer: true, ..Offload::default() };
                job.predict(&gpt3(), &Layout { offload, ..layout() }).unwrap().step
            }));
        }
    }
    assert!(steps.chunks(2).all(|both| both == &steps[..2]), "{steps:?}");
    assert_eq!(refusals.len(), 10, "{refusals:?}");
    assert!(
        refusals.contains(
            "CPUs attach by pcie-switch; inside racks CXL carries mem; between racks CXL carries mem"
        )
    );
    assert!(refusals.contains(
        "how CPUs attach is not given; inside racks CXL carries cache, mem, io; between racks CXL carries cache, mem, io"
    ));
}

/// Bulk transfers alone are no loads and stores.
#[test]
fn a_pool_behind_a_path_without_mem_holds_nothing() {
    let mut platform = Platform::load("nvl72-cxl").unwrap();
    let offload = Offload { tier: TierId::Pool, optimizer: true, ..Offload::default() };
    let predict = |platform: &Platform, offload| {
        Job::new(platform).predict(&gpt3(), &Layout { offload, ..layout() }).map(|plan| plan.step)
    };
    assert!(predict(&platform, offload).is_ok());
    platform.between.as_mut().unwrap().carries = vec![Protocol::Io];
    let refused = predict(&platform, offload).unwrap_err().to_string();
    assert!(
        refused.starts_with("offload to the pool needs a fabric between racks that carries \"mem\""),
        "{refused}"
    );
    assert!(predict(&platform, Offload { tier: TierId::Host, ..offload }).is_ok());
}

/// Two accelerators share a card, each behind a link of its own that is faster than half the card.
#[test]
fn what_lies_on_a_card_behind_the_host_goes_at_the_pace_of_its_channels_and_links() {
    let mut platform = Platform::load("finetuning-a").unwrap();
    let model = Model::load("llama3-8b").unwrap();
    let step = |platform: &Platform, tier: &str, choose: fn(&mut Offload)| {
        let mut offload = Offload { tier: tier.parse().unwrap(), ..Offload::default() };
        choose(&mut offload);
        let cut = Layout {
            tp: 2,
            dp: 1,
            pp: 1,
            batch: 4,
            recompute: Recompute::Full,
            flash: true,
            offload,
            ..layout()
        };
        predict(platform, &model, &cut)
    };
    let near = step(&platform, "host", |_| ());
    let (layers, passes) = (32.0, 2.0 * 4.0);
    for links in [1, 4] {
        let card = platform.rack.get_mut("server").unwrap().host.tiers.get_mut("cxl").unwrap();
        card.port.as_mut().unwrap().links = links;
        let card = card.clone();
        let attach = 55e9;
        let share = |reads| f64::min(attach, card.bandwidth(reads) / 2.0);
        let late = card.idle_latency();
        let both = f64::min(attach, card.bandwidth(0.5) / 2.0 / 2.0);
        let states = step(&platform, "cxl", |offload| offload.optimizer = true);
        let weights = step(&platform, "cxl", |offload| offload.weights = true);
        let kept = step(&platform, "cxl", |offload| offload.activations = true);
        let activations = kept.memory.offloaded().used_bytes * 4.0;
        for (far, bytes, seconds) in [
            (
                states,
                near.memory.accelerator().optimizer_bytes,
                near.memory.accelerator().optimizer_bytes / both + layers * late,
            ),
            (
                weights,
                near.memory.accelerator().weights_bytes,
                passes * (near.memory.accelerator().weights_bytes / share(1.0) + layers * late)
                    + near.memory.accelerator().weights_bytes / share(0.0),
            ),
            (
                kept,
                activations / 4.0,
                activations / share(1.0) + activations / share(0.0) + passes * layers * late,
            ),
        ] {
            assert_eq!(
                (far.memory.offloaded().used_bytes, far.memory.offloaded().capacity_bytes),
                (bytes, 512e9 / 2.0)
            );
            assert!(
                (far.offload.exposed_s / seconds - 1.0).abs() < 1e-9,
                "{}: {seconds}",
                far.offload.exposed_s
            );
        }
    }
    // Another host with a port of its own takes half of the card, and where channels are what is slow half of their pace.
    let alone = step(&platform, "cxl", |offload| offload.optimizer = true);
    platform.rack.get_mut("server").unwrap().host.tiers.get_mut("cxl").unwrap().hosts = 2;
    let shared = step(&platform, "cxl", |offload| offload.optimizer = true);
    assert_eq!(shared.memory.offloaded().capacity_bytes, alone.memory.offloaded().capacity_bytes / 2.0);
    assert!(shared.offload.exposed_s > alone.offload.exposed_s);
}

#[test]
fn a_place_for_what_is_offloaded_is_told_by_its_name() {
    for name in ["host", "pool", "cxl", "a name of 24 bytes, just"] {
        let tier: TierId = name.parse().unwrap();
        assert_eq!(tier.to_string(), name);
        let json = serde_json::to_string(&tier).unwrap();
        assert_eq!(serde_json::from_str::<TierId>(&json).unwrap(), tier);
    }
    for name in ["", "a name of 25 bytes, a bit m", "c\0xl"] {
        let said = name.parse::<TierId>().unwrap_err().to_string();
        assert!(
            said.starts_with("expected host, pool or the name of a tier of the host, 1 to 24 bytes"),
            "{said}"
        );
    }
}

#[test]
fn in_32_bits_values_take_twice_the_bytes_and_weights_have_no_copy() {
    let mut platform = Platform::load("dgx-a100").unwrap();
    let compute = &mut platform.rack.get_mut("dgx").unwrap().accelerator.compute;
    compute.fp32 = compute.bf16;
    let model = Model::load("gpt3-175b").unwrap();
    let step = |precision| predict(&platform, &model, &Layout { precision, ..layout() });
    let (narrow, wide) = (step(Precision::Bf16), step(Precision::Fp32));
    assert_eq!(wide.memory.accelerator().weights_bytes, 2.0 * narrow.memory.accelerator().weights_bytes);
    // These are added up in 32 bits as it is.
    assert_eq!(wide.memory.accelerator().gradients_bytes, narrow.memory.accelerator().gradients_bytes);
    assert!(
        (wide.memory.accelerator().optimizer_bytes
            / narrow.memory.accelerator().optimizer_bytes
            / (8.0 / 12.0)
            - 1.0)
            .abs()
            < 1e-12
    );
    let kept = wide.memory.accelerator().activations_bytes / narrow.memory.accelerator().activations_bytes;
    assert!(kept > 1.5 && kept <= 2.0, "{kept}");
    assert!(wide.compute.forward_s > narrow.compute.forward_s && wide.total_s < 2.0 * narrow.total_s);
    let refusal =
        refusal("dgx-a100", "gpt3-175b", &Layout { precision: Precision::Fp32, ..layout() }).to_string();
    assert_eq!(
        refusal,
        "fp32 needs accelerators whose file has a rate of 32-bit floats, which this platform does not have; take bf16"
    );
}

/// However experts and copies share it, all accelerators together hold 12 bytes a parameter.
#[test]
fn all_accelerators_together_hold_the_optimizers_states() {
    let platform = Platform::load("nvl72-ndr").unwrap();
    let (job, model) = (Job::new(&platform), Model::load("mixtral-8x7b").unwrap());
    for ep in [1, 2, 8] {
        let cut =
            Layout { tp: 4, ep, dp: 32, pp: 1, batch: 512, zero: Zero::Optimizer, flash: true, ..layout() };
        let bytes = job.predict(&model, &cut).unwrap().step.memory.accelerator().optimizer_bytes * 128.0;
        assert!((bytes / (12.0 * model.parameters()) - 1.0).abs() < 1e-9, "ep {ep}: {bytes}");
    }
}

/// Of two stages that compute all again, the last has the logits and so the most.
#[test]
fn the_fullest_stage_counts() {
    let platform = Platform::load("dgx-h100").unwrap();
    let (job, model) = (Job::new(&platform), Model::load("llama3-8b").unwrap());
    let recompute = Recompute::Full;
    let cut = Layout {
        tp: 1,
        pp: 2,
        dp: 4,
        batch: 128,
        micro_batch: 2,
        sequence_parallel: false,
        recompute,
        flash: true,
        ..layout()
    };
    let used = job.predict(&model, &cut).unwrap().step.memory.accelerator().used_bytes;
    let logits = 4.0 * 128_256.0 * 2.0 * 8192.0;
    let parameters = 18.0 * model.parameters() / 2.0;
    assert!(used > parameters + logits, "{used} for {parameters} and {logits}");
}

fn stages(model: &Model, layout: &Layout) -> Vec<u32> {
    let platform = Platform::load("dgx-h100").unwrap();
    Job::new(&platform)
        .predict_stages(model, layout)
        .unwrap()
        .1
        .into_iter()
        .map(|stage| stage.blocks)
        .collect()
}

/// Whatever the number of stages, every block lies in one, and no stage is slower than if blocks were dealt out otherwise by
/// one: from any stage to any other.
#[test]
fn blocks_are_dealt_out_as_evenly_as_they_go() {
    let platform = Platform::load("dgx-h100").unwrap();
    for name in ["gpt3-175b", "llama3-70b", "llama3-8b"] {
        let model = Model::load(name).unwrap();
        for pp in 1..=model.layers {
            let cut = Layout { pp, dp: 1, tp: 8, batch: pp, flash: true, ..layout() };
            let blocks = stages(&model, &cut);
            assert_eq!((blocks.len() as u32, blocks.iter().sum::<u32>()), (pp, model.layers));
            let (most, least) = (blocks.iter().max().unwrap(), blocks.iter().min().unwrap());
            assert!(most - least <= 2, "{blocks:?}");
            if model.layers.is_multiple_of(pp) {
                assert_eq!(most, least);
            }
        }
    }
    let model = Model::load("llama3-70b").unwrap();
    assert_eq!(stages(&model, &Layout { pp: 6, dp: 1, batch: 6, ..layout() }), [13, 14, 14, 13, 13, 13]);
    // With a head that takes as long as several blocks, the last stage gets one block less.
    let wide = Model { vocabulary: 1 << 20, ..model };
    assert_eq!(stages(&wide, &Layout { pp: 6, dp: 1, batch: 6, ..layout() }), [13, 14, 14, 14, 13, 12]);
    assert!(Job::new(&platform).predict_stages(&wide, &Layout { pp: 81, ..layout() }).is_err());
}

/// The step is that of as many blocks as the slowest stage has in every stage, less what the others' bubble is shorter.
#[test]
fn the_slowest_of_uneven_stages_sets_the_pace_and_the_fullest_the_memory() {
    let platform = Platform::load("dgx-h100").unwrap();
    let job = Job::new(&platform);
    // Without embedding and head, a stage is its blocks.
    let model = |layers| Model { layers, vocabulary: 0, ..gpt3() };
    for (pp, interleave) in [(4, 1), (4, 3), (6, 2)] {
        let cut = Layout { pp, interleave, dp: 2, batch: 96, ..layout() };
        let step = |layers| job.predict(&model(layers), &cut).unwrap().step;
        let (uneven, fewer, more) = (step(25 * pp / 2 + 1), step(12 * pp), step(13 * pp));
        assert_eq!(uneven.compute, more.compute, "pp {pp} x {interleave}");
        assert_eq!(uneven.communication, more.communication);
        assert_eq!(uneven.memory.accelerator().weights_bytes, more.memory.accelerator().weights_bytes);
        assert!(fewer.bubble_s < uneven.bubble_s && uneven.bubble_s < more.bubble_s);
        assert!(fewer.total_s < uneven.total_s && uneven.total_s < more.total_s);
        assert!(fewer.memory.accelerator().used_bytes <= uneven.memory.accelerator().used_bytes);
        assert!(uneven.memory.accelerator().used_bytes <= more.memory.accelerator().used_bytes);
    }
}

/// Of a token each expert keeps what it got, and what its products made of that.
#[test]
fn one_expert_more_keeps_its_inputs_too() {
    let platform = Platform::load("nvl72-ndr").unwrap();
    let mut model = Model::load("mixtral-8x7b").unwrap();
    let cut =
        Layout { tp: 1, ep: 8, dp: 64, pp: 1, batch: 512, flash: true, sequence_parallel: false, ..layout() };
    let activations = |model: &Model| predict(&platform, model, &cut).memory.accelerator().activations_bytes;
    let before = activations(&model);
    model.experts.as_mut().unwrap().active += 1;
    let one = 2.0 * f64::from(model.hidden + 3 * model.feed_forward());
    let expected = f64::from(model.sequence) * f64::from(model.layers) * one;
    assert!(((activations(&model) - before) / expected - 1.0).abs() < 1e-9);
}

/// Six links of a switch for what 32 endpoints send in place of six, over the same way.
#[test]
fn endpoints_share_the_links_between_switches() {
    let data = |endpoints| {
        let mut platform = Platform::load("nvl72-ndr").unwrap();
        let topology = Topology::Torus { dimensions: [16, 16, 16], endpoints };
        platform.between.as_mut().unwrap().topology = topology;
        let cut = Layout { dp: 64, pp: 2, ..layout() };
        predict(&platform, &gpt3(), &cut).communication.data.between.exposed_s
    };
    let ratio = data(32) / data(6);
    assert!(ratio > 5.0 && ratio <= 32.0 / 6.0, "{ratio}");
}

/// A token of 8 of 128 experts, over 16 ranks of two hosts, goes once to the other host, and to 6.6 of the ranks on average: of choices
/// without repetition, 16 (1 - C(120, 8) / C(128, 8)).
#[test]
fn a_token_goes_once_to_each_host_and_each_rank_that_has_experts_of_it() {
    let platform = Platform::load("dgx-h100").unwrap();
    let fabrics =
        [platform.rack["dgx"].fabric.as_ref(), platform.between.as_ref()].map(|it| it.unwrap().payload());
    let fitted = &platform.rack["dgx"].accelerator.fitted;
    let [near, far] = [fabrics[0].value() * fitted.inside, fabrics[1].value() * fitted.between];
    let mut model = Model::load("qwen3-235b-a22b").unwrap();
    assert_eq!(model.experts.map(|it| (it.count, it.active)), Some((128, 8)));
    model.sequence = 1 << 16;
    let cut =
        Layout { tp: 1, ep: 16, dp: 16, pp: 1, batch: 16, flash: true, sequence_parallel: false, ..layout() };
    let Scoped { inside, between } = predict(&platform, &model, &cut).communication.expert;
    let chosen = |left: f64| (0..8).map(f64::from).map(|it| (left - it) / (128.0 - it)).product::<f64>();
    let (ranks, hosts) = (16.0 * (1.0 - chosen(120.0)), 2.0 * (1.0 - chosen(64.0)));
    assert!((ranks - 6.6).abs() < 0.05 && hosts > 1.99, "{ranks} {hosts}");
    // To the experts and back, in both passes of each block.
    let [layers, tokens] = [model.layers, model.sequence].map(f64::from);
    let token = 4.0 * layers * tokens * 2.0 * f64::from(model.hidden);
    // And what all ranks chose, a byte for each token and expert, once.
    let map = 16.0 * layers * tokens * 128.0;
    for (seconds, expected) in [
        (inside.exposed_s, (token * ranks + map) * 7.0 / 8.0 / near),
        (between.exposed_s, (token * hosts + map / 8.0) / 2.0 / far),
    ] {
        assert!((seconds / expected - 1.0).abs() < 0.01, "{seconds} {expected}");
    }
}

/// Of 512 ranks of a mixture of experts: hidden beside computation as far as there is some, but for the first and the last
/// pass; and kept of more micro-batches.
#[test]
fn what_goes_to_experts_hides_beside_another_micro_batch() {
    let platform = Platform::load("nvl72-ndr").unwrap();
    let (job, model) = (Job::new(&platform), Model::load("mixtral-8x7b").unwrap());
    let cut =
        Layout { tp: 1, ep: 8, dp: 64, pp: 1, batch: 512, flash: true, sequence_parallel: false, ..layout() };
    let step = |cut: Layout, expert| {
        let overlap = Overlap { expert, ..Overlap::USUAL };
        job.predict(&model, &Layout { overlap, ..cut }).unwrap().step
    };
    let sent = |step: &Step| {
        let Scoped { inside, between } = step.communication.expert;
        (inside.exposed_s + between.exposed_s, inside.hidden_s + between.hidden_s)
    };
    let (plain, beside) = (step(cut, false), step(cut, true));
    let ((all, none), (exposed, hidden)) = (sent(&plain), sent(&beside));
    assert!(none == 0.0 && hidden > 0.0 && beside.total_s < plain.total_s);
    assert!((exposed + hidden - all).abs() < 1e-9 * all, "{exposed} and {hidden} of {all}");
    // There is room for all of it: one micro-batch of eight has none beside it.
    assert!((exposed / all - 1.0 / 8.0).abs() < 1e-9, "{}", exposed / all);
    assert!(
        beside.memory.accelerator().activations_bytes > 1.9 * plain.memory.accelerator().activations_bytes
    );
    // With one micro-batch there is nothing to hide beside, and without experts elsewhere nothing to hide.
    let one = Layout { batch: 64, ..cut };
    assert_eq!(sent(&step(one, true)), sent(&step(one, false)));
    let own = Layout { ep: 1, ..cut };
    assert_eq!(step(own, true), step(own, false));
    // Slow links are not hidden beside more than is computed.
    let mut slow = platform.clone();
    slow.rack.get_mut("nvl72").unwrap().fabric.as_mut().unwrap().link.rate =
        TransferRate::parse("1 GT/s").unwrap();
    let overlap = Overlap { expert: true, ..Overlap::NONE };
    let step = predict(&slow, &model, &Layout { overlap, ..cut });
    let (exposed, hidden) = sent(&step);
    assert!(hidden <= step.compute.total_s() && exposed > hidden, "{exposed} and {hidden}");
    // Stages that fill wait for it, and keep what Megatron-Core's schedule keeps.
    let deep = Layout { pp: 4, dp: 16, interleave: 2, ..cut };
    let [plain, beside] = [false, true].map(|expert| {
        let overlap = Overlap { expert, ..Overlap::USUAL };
        job.predict(&model, &Layout { overlap, ..deep }).unwrap().step
    });
    assert!(
        (beside.bubble_s / plain.bubble_s - 1.0).abs() < 1e-9,
        "{} and {}",
        beside.bubble_s,
        plain.bubble_s
    );
    let kept = beside.memory.accelerator().activations_bytes / plain.memory.accelerator().activations_bytes;
    assert!((kept / (12.0 / 11.0) - 1.0).abs() < 0.02, "4 + 6 + 1 parts, and one more: {kept}");
}

#[test]
fn keys_and_values_hide_or_hold_attention_up() {
    let sent = |context| {
        let overlap = Overlap { context, ..Overlap::NONE };
        let step = step("dgx-a100", &Layout { tp: 4, cp: 2, overlap, ..layout() });
        let Exposure { exposed_s, hidden_s } = step.communication.context.inside;
        (exposed_s, hidden_s)
    };
    let ((exposed, hidden), (all, none)) = (sent(true), sent(false));
    assert!(hidden > 0.0 && none == 0.0 && all > 0.0);
    assert!((all / (exposed + hidden) - 1.0).abs() < 1e-12);
    assert_eq!(Overlap::default(), Overlap { context: true, ..Overlap::NONE });
    let named: Overlap = serde_json::from_str(r#"{"data": true}"#).unwrap();
    assert_eq!(named, Overlap { data: true, ..Overlap::NONE });
}

#[test]
fn what_lies_elsewhere_is_told_by_kind() {
    let offload = Offload { weights: true, optimizer: true, activations: true, ..Offload::default() };
    let near = *step("nvl72-cxl", &layout()).memory.accelerator();
    let far = *step("nvl72-cxl", &Layout { offload, ..layout() }).memory.offloaded();
    assert_eq!((near.tier, far.tier), (None, Some(TierId::Host)));
    assert_eq!(far.weights_bytes, near.weights_bytes);
    assert_eq!(far.optimizer_bytes, near.optimizer_bytes);
    assert!(far.activations_bytes > 0.9 * near.activations_bytes);
    assert_eq!(far.used_bytes, far.weights_bytes + far.optimizer_bytes + far.activations_bytes);
    let offload = Offload { optimizer: true, ..Offload::default() };
    let far = *step("nvl72-cxl", &Layout { offload, ..layout() }).memory.offloaded();
    assert_eq!((far.weights_bytes, far.activations_bytes, far.used_bytes), (0.0, 0.0, far.optimizer_bytes));
}

/// Groups that would straddle racks are cut to what lies in every rack alike.
#[test]
fn groups_that_straddle_racks_send_between_them() {
    let tensor = |tp, dp, fill| {
        let platform = Platform::load("dgx-h100").unwrap();
        let job = Job::new(&platform).with_fill(fill).unwrap();
        let cut = Layout { tp, dp, pp: 1, batch: 1536, sequence_parallel: false, ..layout() };
        job.predict(&gpt3(), &cut).unwrap().step.communication.tensor
    };
    assert_eq!(tensor(8, 2, 8).between.exposed_s, 0.0);
    assert!(tensor(6, 2, 8).between.exposed_s > 0.0, "ranks 6 to 11 lie in two racks");
    assert_eq!(tensor(6, 2, 6).between.exposed_s, 0.0);
}

/// With stages counted before copies, the stages of a copy share a server and copies lie in others: sends take what they
/// take where all lies in one rack, and gradients what they take where no two copies share a server.
#[test]
fn stages_that_are_counted_before_copies_send_inside_racks_and_copies_between_them() {
    let platform = Platform::load("dgx-h100").unwrap();
    let mut one_rack = platform.clone();
    let rack = one_rack.rack.get_mut("dgx").unwrap();
    (rack.accelerators, rack.fabric.as_mut().unwrap().switch.ports) = (64, 512);
    let cut = Layout { tp: 2, pp: 4, dp: 8, batch: 1536, sequence_parallel: false, ..layout() };
    let sent = |job: Job<'_>| job.predict(&gpt3(), &cut).unwrap().step.communication;
    let order = |text: &str| text.parse().unwrap();

    let usual = sent(Job::new(&platform));
    let turned = sent(Job::new(&platform).with_order(order("tp-cp-ep-pp-dp")));
    let total = |seconds: Exposure| seconds.exposed_s + seconds.hidden_s;
    assert!(total(usual.pipeline.between) > 0.0 && total(usual.data.inside) > 0.0);
    assert_eq!((total(turned.pipeline.between), total(turned.data.inside)), (0.0, 0.0));
    assert_eq!(total(turned.pipeline.inside), total(sent(Job::new(&one_rack)).pipeline.inside));
    let apart = sent(Job::new(&platform).with_fill(2).unwrap());
    assert_eq!(total(turned.data.between), total(apart.data.between));
    assert_eq!(turned.tensor, usual.tensor);

    // Copies first: tensor groups are cut up, and their all-reduces go between servers.
    let scattered = sent(Job::new(&platform).with_order(order("dp-tp-cp-ep-pp")));
    assert!(total(scattered.tensor.between) > 0.0 && total(scattered.data.between) == 0.0);
    assert_eq!(sent(Job::new(&platform).with_order(order("tp-cp-ep-dp-pp"))), usual);
}

#[test]
fn an_order_has_each_kind_once() {
    for text in ["", "tp", "tp-cp-ep-dp-tp", "tp-cp-ep-dp-pp-tp", "tp,cp,ep,dp,pp"] {
        let said = text.parse::<Order>().unwrap_err().to_string();
        assert!(said.ends_with(&format!("such as \"tp-cp-ep-dp-pp\", found {text:?}")), "{said}");
    }
    assert_eq!("pp-dp-ep-cp-tp".parse::<Order>().unwrap().to_string(), "pp-dp-ep-cp-tp");
}

/// A job that takes less of a rack than it may fill lies in it whole.
#[test]
fn filling_more_than_there_are_fills_what_there_are() {
    let platform = Platform::load("nvl72").unwrap();
    let cut = Layout { tp: 8, pp: 1, dp: 8, batch: 1536, sequence_parallel: false, ..layout() };
    let [own, filled] = [Job::new(&platform), Job::new(&platform).with_fill(72).unwrap()]
        .map(|job| job.predict(&gpt3(), &cut).unwrap());
    assert_eq!(own, filled);
    assert!(own.step.communication.data.inside.hidden_s + own.step.communication.data.inside.exposed_s > 0.0);
}

#[test]
fn nothing_is_hidden_beside_more_than_is_computed() {
    let mut platform = Platform::load("dgx-h100").unwrap();
    platform.between.as_mut().unwrap().link.rate = TransferRate::parse("1 GT/s").unwrap();
    let overlap = Overlap::USUAL;
    let cut = Layout { overlap, zero: Zero::Optimizer, interleave: 3, ..layout() };
    let step = predict(&platform, &gpt3(), &cut);
    let (computed, communication) = (step.compute.total_s(), step.communication);
    let hidden = communication.pipeline.between.hidden_s + communication.data.between.hidden_s;
    // Links between racks are idle while those inside hold computation up.
    let Scoped { inside, .. } = communication.tensor;
    let room = computed + inside.exposed_s + communication.data.inside.exposed_s;
    assert!(inside.exposed_s > 0.0 && hidden > 0.0 && hidden <= room, "{hidden} beside {room}");
}

/// Beside computation NCCL's kernels hold 24 of the 132 processors of H100 inside a host and 16 between hosts; exposed ones take none.
#[test]
fn a_collective_takes_its_processors_from_computation_beside_it() {
    let whole = Platform::load("dgx-h100").unwrap();
    let predict = |platform: &Platform, dp: u32, data: bool| {
        let overlap = Overlap { data, ..Overlap::NONE };
        let cut = Layout { tp: 1, dp, pp: 1, batch: 512, flash: true, sequence_parallel: false, ..layout() };
        let cut = Layout { zero: Zero::Weights, overlap, ..cut };
        predict(platform, &gpt3(), &cut)
    };
    let mut free = whole.clone();
    let rack = free.rack.get_mut("dgx").unwrap();
    rack.fabric.as_mut().unwrap().software.processors = 0.0;
    free.between.as_mut().unwrap().software.processors = 0.0;
    // In one host, and between eight, where one kernel does both parts.
    for (dp, taken) in [(8, 24.0 / 132.0), (64, 16.0 / 132.0)] {
        let [alone, beside] = [&free, &whole].map(|platform| predict(platform, dp, true));
        let Scoped { inside, between } = beside.communication.data;
        assert!(inside.hidden_s > 0.0 && (between.hidden_s > 0.0) == (dp > 8));
        assert_eq!(alone.compute.contention_s, 0.0);
        let contention = beside.compute.contention_s;
        let expected = taken * (inside.hidden_s + between.hidden_s);
        assert!((contention / expected - 1.0).abs() < 5e-3, "{contention} {expected}");
        let longer = beside.compute.total_s() - alone.compute.total_s();
        assert!((longer / contention - 1.0).abs() < 1e-9 && beside.total_s > alone.total_s);
        assert_eq!(predict(&free, dp, false), predict(&whole, dp, false));
    }
}

/// A pass of a block in 8 bits with products as fast as in 16 bits: what it takes more is its casts, of what goes into the four products, and
/// backward of the gradients of what they give. Each reads two bytes twice and writes one twice.
#[test]
fn eight_bits_cost_a_cast_of_what_goes_into_each_product() {
    let mut platform = Platform::load("dgx-h100").unwrap();
    let chip = &mut platform.rack.get_mut("dgx").unwrap().accelerator;
    chip.compute.fp8 = chip.compute.bf16;
    let (stream, launch) = (chip.memory.read.value() * chip.fitted.stream, chip.fitted.launch.value());
    let model = gpt3();
    let step = |precision| predict(&platform, &model, &Layout { precision, ..layout() });
    let [half, eight] = [Precision::Bf16, Precision::Fp8].map(step);
    let (tokens, h) = (2048.0, 12288.0);
    let (into, out) = (h + h / 8.0 + h + h / 2.0, 3.0 * h / 8.0 + h + h / 2.0 + h);
    for (more, values) in [
        (eight.compute.forward_s - half.compute.forward_s, into),
        (eight.compute.backward_s - half.compute.backward_s, out),
    ] {
        let expected = 192.0 * 6.0 * (6.0 * tokens * values / stream + 4.0 * launch);
        assert!((more / expected - 1.0).abs() < 1e-9, "{more} {expected}");
    }
    // Weights once a step.
    assert!(eight.compute.optimizer_s > half.compute.optimizer_s);
    // What was cast is kept as it was: 2 of 10 bytes of the stream, 1 of 4 of the feed-forward part; attention keeps what it gives beside.
    let fused = |precision| {
        let cut = Layout { precision, flash: true, pp: 1, ..layout() };
        predict(&platform, &model, &cut).memory.accelerator().activations_bytes
    };
    let [half, eight] = [Precision::Bf16, Precision::Fp8].map(fused);
    assert!(eight < 0.95 * half && eight > 0.7 * half, "{eight} {half}");
}

/// As torchtitan does by operator: of a gated block keys, attention's output and the gate's second matrix, and all that only moves data.
#[test]
fn by_operator_every_second_product_is_computed_again() {
    let platform = Platform::load("dgx-h100").unwrap();
    let model = Model::load("llama3-8b").unwrap();
    let cut = Layout {
        tp: 1,
        dp: 8,
        pp: 1,
        batch: 16,
        micro_batch: 2,
        flash: true,
        zero: Zero::Weights,
        ..layout()
    };
    let cut = Layout { sequence_parallel: false, ..cut };
    let step = |recompute| predict(&platform, &model, &Layout { recompute, ..cut });
    let [none, full, operators] = [Recompute::None, Recompute::Full, Recompute::Operators].map(step);
    assert_eq!(none.compute.forward_s, operators.compute.forward_s);
    // 19,456 of 53,248 columns, and what only moves data, without attention.
    let part = operators.compute.recompute_s / full.compute.recompute_s;
    assert!((0.3..0.5).contains(&part), "{part}");
    let kept = |step: &Step| step.memory.accelerator().activations_bytes;
    assert!(kept(&full) < kept(&operators) && kept(&operators) < 0.6 * kept(&none));
}

/// PyTorch's checkpoint stops once it has what gradients need: the last product of a block, the residual and the scatter behind it are missing.
/// What is kept is what full recomputation keeps.
#[test]
fn recomputation_that_stops_leaves_out_the_last_product_and_what_follows_it() {
    let platform = Platform::load("dgx-h100").unwrap();
    let chip = &platform.rack["dgx"].accelerator;
    let (stream, launch) = (chip.memory.read.value() * chip.fitted.stream, chip.fitted.launch.value());
    let rate = chip.compute.bf16.unwrap().value() * chip.fitted.matrix;
    let model = Model::load("llama3-8b").unwrap();
    let [tokens, h, f] = [8192.0, 4096.0, 14336.0];
    for sequence_parallel in [true, false] {
        let cut = Layout { pp: 1, batch: 64, flash: true, sequence_parallel, ..layout() };
        let step = |recompute| predict(&platform, &model, &Layout { recompute, ..cut });
        let [full, needed] = [Recompute::Full, Recompute::Needed].map(step);
        let shared = if sequence_parallel { tokens / 8.0 } else { tokens };
        let product = 2.0 * tokens * h * (f / 8.0 + chip.fitted.depth) / rate + launch;
        let residual = 6.0 * h * shared / stream + launch;
        let expected = 32.0 * 8.0 * (product + residual);
        let fewer = full.compute.recompute_s - needed.compute.recompute_s;
        assert!((fewer / expected - 1.0).abs() < 1e-9, "{fewer} {expected}");
        // Of seven pairs of halves, one of them an all-gather more for each weight, half a pair; of six sums one.
        let sent = |step: &Step| step.communication.tensor.inside.exposed_s;
        let left = if sequence_parallel { 6.5 / 7.0 } else { 5.0 / 6.0 };
        assert!((sent(&needed) / sent(&full) - left).abs() < 1e-9, "{}", sent(&needed) / sent(&full));
        assert_eq!(needed.memory, full.memory);
        assert_eq!(needed.compute.forward_s, full.compute.forward_s);
    }
}

/// Queries and keys are read and written once by what rotates them, and by their norms, which backward read one value more.
#[test]
fn queries_and_keys_are_rotated_and_normed_by_kernels_of_their_own() {
    let platform = Platform::load("dgx-h100").unwrap();
    let chip = &platform.rack["dgx"].accelerator;
    let (stream, launch) = (chip.memory.read.value() * chip.fitted.stream, chip.fitted.launch.value());
    let cut = Layout { tp: 1, pp: 1, batch: 64, sequence_parallel: false, flash: true, ..layout() };
    let whole = Model::load("qwen3-235b-a22b").unwrap();
    assert!(whole.rotary && whole.query_key_norms);
    let cost = |model: &Model| predict(&platform, model, &cut).compute;
    let all = cost(&whole);
    // 64 heads of queries and 4 of keys, 128 wide, in 94 blocks, for 8 micro-batches of 4,096 tokens.
    let seconds = |bytes: f64| 94.0 * 8.0 * (bytes * 68.0 * 128.0 * 4096.0 / stream + 2.0 * launch);
    for (model, forward, backward) in [
        (Model { rotary: false, ..whole.clone() }, 4.0, 4.0),
        (Model { query_key_norms: false, ..whole.clone() }, 4.0, 6.0),
    ] {
        let less = cost(&model);
        for (more, bytes) in
            [(all.forward_s - less.forward_s, forward), (all.backward_s - less.backward_s, backward)]
        {
            assert!((more / seconds(bytes) - 1.0).abs() < 1e-6, "{more} {}", seconds(bytes));
        }
    }
    // Out of latents, 64 of 192 columns of queries are rotated in place; keys and values of 128 heads are put in place beside one rotated key.
    let latent = Model { others: vec![], layers: 1, ..Model::load("deepseek-v3").unwrap() };
    let still = Model { rotary: false, ..latent.clone() };
    let more = cost(&latent).forward_s - cost(&still).forward_s;
    let columns = 2.0 * 128.0 * 64.0 + 2.0 * 128.0 * (128.0 + 128.0) + (128.0 + 1.0) * 64.0;
    let expected = 8.0 * (2.0 * columns * 4096.0 / stream + 2.0 * launch);
    assert!((more / expected - 1.0).abs() < 1e-6, "{more} {expected}");
}

/// Out of a padded batch queries, keys and values are gathered, and put back into zeros backward; what attention gives the other way about.
#[test]
fn what_is_taken_out_of_a_padded_batch_is_copied_there_and_back() {
    let platform = Platform::load("dgx-h100").unwrap();
    let chip = &platform.rack["dgx"].accelerator;
    let (stream, launch) = (chip.memory.read.value() * chip.fitted.stream, chip.fitted.launch.value());
    let cost = |model: &Model| predict(&platform, model, &Layout { pp: 1, ..layout() }).compute;
    let (plain, padded) = (cost(&gpt3()), cost(&Model { unpadded: true, ..gpt3() }));
    // Twelve heads of 128 on each rank, and as many of keys and values.
    let bytes = 2.0 * 12.0 * 128.0 * 2048.0;
    for (more, times, kernels) in
        [(padded.forward_s - plain.forward_s, 9.0, 5.0), (padded.backward_s - plain.backward_s, 11.0, 7.0)]
    {
        let expected = 96.0 * 192.0 * (times * bytes / stream + kernels * launch);
        assert!((more / expected - 1.0).abs() < 1e-6, "{more} {expected}");
    }
}

/// What tensor parallelism gathers is cast before, so that it has half the bytes; what it scatters is a sum in 16 bits.
#[test]
fn in_8_bits_tensor_parallelism_gathers_half_the_bytes() {
    let platform = Platform::load("dgx-h100").unwrap();
    let rack = &platform.rack["dgx"];
    let near = rack.fabric.as_ref().unwrap().payload().value() * rack.accelerator.fitted.inside;
    let sent = |precision, gather_again| {
        let cut = Layout { pp: 1, precision, gather_again, ..layout() };
        predict(&platform, &gpt3(), &cut).communication.tensor.inside.exposed_s
    };
    for (gather_again, gathers) in [(true, 6.0), (false, 4.0)] {
        let fewer = sent(Precision::Bf16, gather_again) - sent(Precision::Fp8, gather_again);
        let expected = 96.0 * 192.0 * gathers * 2048.0 * 12288.0 * 7.0 / 8.0 / near;
        assert!((fewer / expected - 1.0).abs() < 1e-6, "{fewer} {expected}");
    }
    // Sums, and what goes to experts, are as in 16 bits.
    let sums = |precision| {
        let cut = Layout { pp: 1, precision, sequence_parallel: false, ..layout() };
        predict(&platform, &gpt3(), &cut).communication.tensor
    };
    assert_eq!(sums(Precision::Bf16), sums(Precision::Fp8));
}

/// What a router does beside its product: three kernels each way, of 30 and 29 bytes for each token and expert.
#[test]
fn a_router_chooses_by_kernels_of_its_own() {
    let platform = Platform::load("dgx-h100").unwrap();
    let fitted = platform.rack["dgx"].accelerator.fitted;
    let launches = |seconds: f64| {
        let mut other = platform.clone();
        other.rack.get_mut("dgx").unwrap().accelerator.fitted.launch = Time::new(seconds);
        let cut = Layout { tp: 1, pp: 1, batch: 8, sequence_parallel: false, flash: true, ..layout() };
        let mut model = Model::load("mixtral-8x7b").unwrap();
        let compute = predict(&other, &model, &cut).compute;
        model.experts = None;
        let dense = predict(&other, &model, &cut).compute;
        [compute.forward_s - dense.forward_s, compute.backward_s - dense.backward_s]
    };
    let [with, without] = [fitted.launch.value(), 0.0].map(launches);
    // Each of eight experts has two products and an activation forward, four products and an activation backward. Beside them stand the
    // router's products, its kernels, and what goes to experts and back. One such part is there without experts.
    for (more, kernels) in
        with.iter().zip(without).map(|(a, b)| a - b).zip([7.0 * 3.0 + 5.0, 7.0 * 5.0 + 6.0])
    {
        let expected = 32.0 * kernels * fitted.launch.value();
        assert!((more / expected - 1.0).abs() < 1e-6, "{more} {expected}");
    }
}

/// Weights that are gathered twice a micro-batch are read and written in 16 bits each time, and gradients are read so and written in 32.
#[test]
fn what_copies_share_is_copied_out_of_buffers_and_into_them() {
    let platform = Platform::load("dgx-h100").unwrap();
    let chip = &platform.rack["dgx"].accelerator;
    let (stream, launch) = (chip.memory.read.value() * chip.fitted.stream, chip.fitted.launch.value());
    let model = gpt3();
    let cut = Layout { dp: 16, pp: 1, flash: true, ..layout() };
    let step = |zero| predict(&platform, &model, &Layout { zero, ..cut }).compute;
    let [optimizer, gradients, weights] = [Zero::Optimizer, Zero::Gradients, Zero::Weights].map(step);
    let count = f64::from(cut.micro_batches());
    let seconds = |bytes: f64| count * (bytes * model.parameters() / 8.0 / stream + launch);
    for (more, expected) in [
        (gradients.forward_s - optimizer.forward_s, 0.0),
        (gradients.backward_s - optimizer.backward_s, seconds(6.0)),
        (weights.forward_s - optimizer.forward_s, seconds(4.0)),
        (weights.backward_s - optimizer.backward_s, seconds(10.0)),
    ] {
        assert!((more - expected).abs() <= 0.01 * expected, "{more} {expected}");
    }
}

/// Where links are slow, what is computed takes as long as what is sent and no longer: computation that is slowed down finds more time.
#[test]
fn a_step_that_waits_for_its_links_loses_nothing_to_their_collectives() {
    let mut platform = Platform::load("dgx-h100").unwrap();
    platform.between.as_mut().unwrap().link.rate = TransferRate::parse("1 GT/s").unwrap();
    let overlap = Overlap { data: true, ..Overlap::NONE };
    let cut = Layout { tp: 1, dp: 64, pp: 1, batch: 512, flash: true, zero: Zero::Weights, ..layout() };
    let cut = Layout { overlap, sequence_parallel: false, ..cut };
    let taken = predict(&platform, &gpt3(), &cut);
    platform.between.as_mut().unwrap().software.processors = 0.0;
    let free = predict(&platform, &gpt3(), &cut);
    assert!(taken.communication.data.between.exposed_s > 0.0);
    // The part inside hosts, which hides, counts beside that.
    assert!((taken.total_s / free.total_s - 1.0).abs() < 2e-3, "{} {}", taken.total_s, free.total_s);
}

#[test]
fn each_expert_of_a_token_is_gathered_and_scattered_for() {
    let platform = Platform::load("dgx-h100").unwrap();
    let mut model = Model::load("mixtral-8x7b").unwrap();
    let cut = Layout { pp: 1, flash: true, ..layout() };
    let sent = |model: &Model| {
        let Scoped { inside, .. } = predict(&platform, model, &cut).communication.tensor;
        inside.exposed_s
    };
    // Two experts a token, and attention once; without latencies it would be 3 to 2.
    let two = sent(&model);
    model.experts.as_mut().unwrap().active = 1;
    let one = sent(&model);
    model.experts = None;
    assert_eq!(sent(&model), one);
    assert!((two / one - 1.5).abs() < 0.05, "{two} to {one}");
}

#[test]
fn what_is_whole_at_a_time_is_a_table_where_that_is_larger_than_blocks() {
    let platform = Platform::load("dgx-h100").unwrap();
    let model = Model::load("llama3-8b").unwrap();
    let offload = Offload { weights: true, optimizer: true, activations: true, ..Offload::default() };
    let cut = Layout {
        tp: 1,
        pp: 1,
        dp: 8,
        batch: 64,
        sequence_parallel: false,
        zero: Zero::Weights,
        flash: true,
        ..layout()
    };
    let memory = |layout: &Layout| predict(&platform, &model, layout).memory;
    let head = 128_256.0 * 4096.0;
    let [near, far] = memory(&Layout { offload, ..cut }).tiers;
    assert_eq!(near.weights_bytes, 2.0 * head);
    assert_eq!(far.weights_bytes, 2.0 * model.parameters() / 8.0);
    assert!((near.gradients_bytes - 4.0 * (model.parameters() / 8.0 + head)).abs() < 1.0, "{near:?}");
    // Of activations a block of one micro-batch in use, and one on its way, whatever the stages.
    let kept = |pp: u32| {
        let model = Model::load("llama3-70b").unwrap();
        let activations = Offload { activations: true, ..Offload::default() };
        let cut = Layout { tp: 8, pp, dp: 8, batch: 512, flash: true, offload: activations, ..layout() };
        predict(&platform, &model, &cut).memory.accelerator().activations_bytes
    };
    assert!(kept(4) < 1.5 * kept(2), "{} with four stages, {} with two", kept(4), kept(2));
}

#[test]
fn experts_take_the_software_of_a_message_to_each_other_rank() {
    let model = Model::load("mixtral-8x7b").unwrap();
    let sent = |seconds: f64| {
        let mut platform = Platform::load("dgx-h100").unwrap();
        let fabric = platform.rack.get_mut("dgx").unwrap().fabric.as_mut().unwrap();
        fabric.software.message = Time::new(seconds);
        let cut =
            Layout { tp: 1, ep: 8, pp: 1, sequence_parallel: false, flash: true, batch: 64, ..layout() };
        predict(&platform, &model, &cut).communication.expert.inside.exposed_s
    };
    // Seven messages, four times in each of 32 blocks, for each of 8 micro-batches; and once around the ring that tells what all chose.
    let seconds = 7.0 * 1e-4 * 5.0 * 32.0 * 8.0;
    assert!(((sent(1e-4) - sent(0.0)) / seconds - 1.0).abs() < 1e-6, "{}", sent(1e-4) - sent(0.0));
}

#[test]
fn a_call_between_racks_counts_once_for_a_sum() {
    let step = |seconds: f64| {
        let mut platform = Platform::load("dgx-a100").unwrap();
        platform.between.as_mut().unwrap().software.call = Time::new(seconds);
        let cut = Layout { dp: 16, pp: 8, ..layout() };
        let sent = predict(&platform, &gpt3(), &cut).communication.data;
        sent.between.exposed_s
    };
    assert!((step(0.1) - step(0.0) - 0.1).abs() < 1e-9, "{} and {}", step(0.1), step(0.0));
}

#[test]
fn port_ids_of_a_cxl_fabric_are_counted() {
    let mut platform = Platform::load("nvl72-cxl").unwrap();
    let between = platform.between.as_mut().unwrap();
    between.pbr = Some(Pbr { ids: 4096, domains: 1, rack_bridges: false });
    platform.pool = None;
    let large = Layout { dp: 48, ..layout() };
    let refused = Job::new(&platform).predict(&gpt3(), &large).unwrap_err();
    assert!(matches!(refused, Refusal::Ports { what: "PBR ids", needs: 6144, has: 4096, .. }), "{refused}");
    platform.between.as_mut().unwrap().pbr.as_mut().unwrap().domains = 2;
    assert!(Job::new(&platform).predict(&gpt3(), &large).is_ok());
    // One rack takes ports between racks for its pool alone.
    let mut platform = Platform::load("nvl72-cxl").unwrap();
    platform.between.as_mut().unwrap().pbr = Some(Pbr { ids: 4, domains: 1, rack_bridges: false });
    let offload = Offload { tier: TierId::Pool, optimizer: true, ..Offload::default() };
    let small = Layout { pp: 8, dp: 1, ..layout() };
    assert!(Job::new(&platform).predict(&gpt3(), &small).is_ok());
    let refused = Job::new(&platform).predict(&gpt3(), &Layout { offload, ..small }).unwrap_err();
    assert!(matches!(refused, Refusal::Ports { what: "PBR ids", has: 4, .. }), "{refused}");
}

/// A ring of n around which each rank's part goes: 2 (n - 1) / n of the bytes, and as many steps.
#[test]
fn data_parallelism_between_racks_takes_what_its_ring_takes() {
    let mut platform = Platform::load("dgx-a100").unwrap();
    platform.rack.get_mut("dgx").unwrap().accelerator.fitted.between = 1.0;
    let job = Job::new(&platform);
    // One rank of each rack: tensor parallelism fills the others.
    let layout = Layout { pp: 1, dp: 4, zero: Zero::Optimizer, ..layout() };
    let data = job.predict(&gpt3(), &layout).unwrap().step.communication.data;
    let parameters = gpt3().parameters() / 8.0;
    let between = platform.between.as_ref().unwrap();
    let alpha = between.latency().value() + between.software.step.value();
    let bytes = (4.0 + 2.0) * parameters * 3.0 / 4.0;
    let seconds = bytes / between.payload().value() + 2.0 * (3.0 * alpha + between.software.call.value());
    assert_eq!(data.inside.exposed_s, 0.0);
    assert!(
        (data.between.exposed_s / seconds - 1.0).abs() < 1e-9,
        "{} for {seconds}",
        data.between.exposed_s
    );
}

/// Half of the blocks of one kind and half of another cost what lies in the middle, in time, bytes and operations.
#[test]
fn blocks_that_differ_cost_their_mean_and_blocks_that_do_not_what_they_cost_without() {
    let platform = Platform::load("dgx-a100").unwrap();
    let layout = Layout { interleave: 1, flash: true, ..layout() };
    let figures = |model: &Model| {
        model.check().unwrap();
        let step = predict(&platform, model, &layout);
        [
            step.compute.forward_s,
            step.compute.backward_s,
            step.memory.tiers[0].activations_bytes,
            model.parameters(),
            model.flops(8),
        ]
    };
    let usual = gpt3();
    let same = Model { others: vec![OtherBlocks { blocks: 40, ..OtherBlocks::default() }], ..usual.clone() };
    for (one, other) in figures(&usual).into_iter().zip(figures(&same)) {
        assert!((one / other - 1.0).abs() < 1e-12, "{one} {other}");
    }
    let recurrent =
        Recurrent { into: 50176, width: 24576, state: 128, convolved: 25600, kernel: 4, inside: 0 };
    let window = Window { tokens: 512, chunks: false };
    for (whole, half) in [
        (
            Model { window: Some(window), ..usual.clone() },
            OtherBlocks { window: Some(window), ..OtherBlocks::default() },
        ),
        (
            Model { feed_forward: Some(12288), ..usual.clone() },
            OtherBlocks { feed_forward: Some(12288), ..OtherBlocks::default() },
        ),
        (
            Model { mixer: Mixer::Recurrent, recurrent: Some(recurrent), ..usual.clone() },
            OtherBlocks { mixer: Some(Mixer::Recurrent), ..OtherBlocks::default() },
        ),
        (
            Model { heads: 48, kv_heads: Some(8), head_width: Some(128), ..usual.clone() },
            OtherBlocks {
                heads: Some(48),
                kv_heads: Some(8),
                head_width: Some(128),
                ..OtherBlocks::default()
            },
        ),
    ] {
        let others = vec![OtherBlocks { blocks: 48, ..half }];
        let mixed = Model { others, recurrent: whole.recurrent, ..usual.clone() };
        let all = figures(&usual).into_iter().zip(figures(&whole)).zip(figures(&mixed));
        for (index, ((one, other), mean)) in all.enumerate() {
            let (least, most) = (one.min(other), one.max(other));
            assert!(
                least <= mean * (1.0 + 1e-9) && mean <= most * (1.0 + 1e-9),
                "{index}: {one} {other} {mean}"
            );
            // Embedding, head and bubble are the same in each.
            assert!(
                index == 2 || (mean - (one + other) / 2.0).abs() <= 0.02 * mean,
                "{index}: {one} {other} {mean}"
            );
        }
    }
}

/// DeepSeek-V3.2, 2025, section 2.1: small heads score all tokens, and attention looks at those that they choose.
#[test]
fn an_indexer_has_its_own_products_and_leaves_attention_the_tokens_that_it_chooses() {
    let latent = Latent { queries: 1536, keys: 512, rotated: 64, values: 128, indexer: None };
    let whole = Model {
        sequence: 32768,
        heads: 128,
        head_width: Some(192),
        latent: Some(latent),
        kv_heads: None,
        ..gpt3()
    };
    let indexer = Some(Indexer { heads: 64, width: 128, tokens: 2048 });
    let sparse = Model { latent: Some(Latent { indexer, ..latent }), ..whole.clone() };
    let layers = f64::from(whole.layers);
    let products = layers * (1536.0 * 64.0 * 128.0 + f64::from(whole.hidden) * (128.0 + 64.0));
    assert!(((sparse.parameters() - whole.parameters()) / products - 1.0).abs() < 1e-9);
    // A sixteenth of the tokens, of which the first have fewer before them.
    let seen = (2.0 - 1.0 / 16.0) / 16.0;
    let tokens = 32768.0;
    let scores = layers * tokens * (64.0 * 128.0 - (1.0 - seen) * 128.0 * (192.0 + 128.0));
    let operations = 6.0 * tokens * (products + scores);
    assert!(((sparse.flops(1) - whole.flops(1)) / operations - 1.0).abs() < 1e-9);
    // It keeps a key a token besides, and whatever may be chosen.
    let kept = kv_bytes(&sparse, 4096.0) - kv_bytes(&whole, 4096.0);
    assert_eq!(kept, layers * 2.0 * 128.0 * 4096.0);
    let platform = Platform::load("dgx-h100").unwrap();
    let fused = Layout { flash: true, ..layout() };
    let seconds = |model| predict(&platform, model, &fused).total_s;
    assert!(seconds(&sparse) < seconds(&whole));
}

/// Nemotron 3, 2025: what goes to experts and back is narrower than the residual stream.
#[test]
fn experts_behind_a_latent_are_narrower_and_get_fewer_bytes() {
    let experts = Experts { count: 64, active: 8, shared: 1, shared_feed_forward: Some(4096), latent: None };
    let whole = Model { experts: Some(experts), feed_forward: Some(2048), ..gpt3() };
    let narrow = Model { experts: Some(Experts { latent: Some(1024), ..experts }), ..whole.clone() };
    let [layers, hidden] = [whole.layers, whole.hidden].map(f64::from);
    let matrices = if whole.gated { 3.0 } else { 2.0 };
    let fewer =
        |experts: f64| layers * (experts * matrices * 2048.0 * (hidden - 1024.0) - 2.0 * hidden * 1024.0);
    assert!(((whole.parameters() - narrow.parameters()) / fewer(64.0) - 1.0).abs() < 1e-9);
    let tokens = f64::from(whole.sequence);
    assert!(((whole.flops(1) - narrow.flops(1)) / (6.0 * tokens * fewer(8.0)) - 1.0).abs() < 1e-9);
}

/// DeepSeek-V2, 2024, section 2.1: keys and values out of one latent.
#[test]
fn latents_have_the_parameters_and_the_operations_of_their_products() {
    let latent = Latent { queries: 1536, keys: 512, rotated: 64, values: 128, indexer: None };
    let model = Model { heads: 128, head_width: Some(192), latent: Some(latent), kv_heads: None, ..gpt3() };
    let straight = Model { latent: None, ..model.clone() };
    let hidden = f64::from(model.hidden);
    let of = |model: &Model| (model.parameters(), model.flops(1));
    let products = hidden * 1536.0
        + 1536.0 * 128.0 * 192.0
        + hidden * 576.0
        + 512.0 * 128.0 * 256.0
        + 128.0 * 128.0 * hidden;
    let (own, other) = (of(&model), of(&straight));
    let layers = f64::from(model.layers);
    let fewer = layers * (4.0 * hidden * 128.0 * 192.0 - products);
    assert!(((other.0 - own.0) / fewer - 1.0).abs() < 1e-9);
    let scores = layers * f64::from(model.sequence) * 128.0 * (192.0 - 128.0);
    let tokens = f64::from(model.sequence);
    assert!(((other.1 - own.1) / (6.0 * tokens * (fewer + scores)) - 1.0).abs() < 1e-9);
}
