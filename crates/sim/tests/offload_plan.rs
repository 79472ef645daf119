//! Offloaded steps of models on platforms.

use polder_platform::{Bytes, Platform};
use polder_sim::Model;
use polder_sim::offload::{Optimizer, Pinned, Placed, PlacingPolicy, Planner, Point, Settings};

const GIB: f64 = 1073741824.0;

fn policies(names: &[&str]) -> Vec<PlacingPolicy> {
    names.iter().map(|name| PlacingPolicy::parse(name).unwrap()).collect()
}

fn point(platform: &str, model: &str, context: u32, batch: u32, settings: Settings, names: &[&str]) -> Point {
    let (platform, name) = (Platform::load(platform).unwrap(), platform);
    let planner = Planner::new(&platform, name, settings).unwrap();
    let model = Model::load_with(model, Some(context)).unwrap();
    planner.point(&model, batch, &policies(names)).unwrap()
}

fn bytes(point: &Point, name: &str) -> f64 {
    point.objects.iter().find(|it| it.name == name).unwrap().bytes
}

#[test]
fn a_step_takes_what_table_1_of_the_paper_gives() {
    let settings = Settings { gpus: 2, ..Settings::default() };
    let point = point("finetuning-a", "mistral-nemo-12b", 4096, 5, settings, &[]);
    let parameters = Model::load("mistral-nemo-12b").unwrap().parameters();
    for (name, each) in [
        ("momentum", 4.0),
        ("variance", 4.0),
        ("fp32 gradients", 4.0),
        ("fp32 parameters", 4.0),
        ("bf16 parameters", 2.0),
        ("bf16 gradients", 2.0),
    ] {
        assert_eq!(bytes(&point, name), each * parameters, "{name}");
    }
    assert_eq!(bytes(&point, "activations"), 2.0 * (2 * 5 * 4096 * 40) as f64 * 5120.0);
    for name in ["pinned rounding", "double buffers", "framework"] {
        assert_eq!(bytes(&point, name), 0.0, "{name}");
    }
}

#[test]
fn other_optimizers_adapters_and_mixtures_take_what_they_keep() {
    let with =
        |settings: Settings, model: &str| point("finetuning-a", model, 4096, 1, settings, &["optimal"]);
    let whole = Model::load("qwen2.5-7b").unwrap().parameters();
    let lion = with(Settings { optimizer: Optimizer::Lion, ..Settings::default() }, "qwen2.5-7b");
    let wide: f64 =
        ["momentum", "fp32 gradients", "fp32 parameters"].map(|name| bytes(&lion, name)).iter().sum();
    assert_eq!(wide, 12.0 * whole);
    assert!(lion.objects.iter().all(|it| it.name != "variance"));
    let lora = with(Settings { lora: Some(16), ..Settings::default() }, "qwen2.5-7b");
    // 28 blocks with four matrices of attention and three of the feed-forward part.
    let adapters =
        28.0 * 16.0 * (2.0 * (3584.0 + 3584.0) + 2.0 * (3584.0 + 512.0) + 3.0 * (3584.0 + 18944.0));
    assert_eq!(bytes(&lora, "momentum"), 4.0 * adapters);
    assert_eq!(bytes(&lora, "bf16 parameters"), 2.0 * (whole + adapters));
    assert!(lora.policies[0].step_s < lion.policies[0].step_s);
    let mixture = with(Settings { cards: Some(2), ..Settings::default() }, "mixtral-8x7b");
    assert!((bytes(&mixture, "bf16 parameters") / 93.4e9 - 1.0).abs() < 0.01);
}

#[test]
fn pinned_memory_in_powers_of_two_is_a_row_of_its_own() {
    let settings = Settings { pinned: Pinned::PowersOfTwo, ..Settings::default() };
    let point = point("finetuning-a", "qwen2.5-7b", 4096, 1, settings, &[]);
    let parameters = Model::load("qwen2.5-7b").unwrap().parameters();
    let rest = parameters - 7e9;
    let wide = 7.0 * ((1_u64 << 32) as f64 - 4e9) + (4.0 * rest).log2().ceil().exp2() - 4.0 * rest;
    let narrow = 7.0 * ((1_u64 << 31) as f64 - 2e9) + (2.0 * rest).log2().ceil().exp2() - 2.0 * rest;
    // A checkpoint of 28 MiB takes 32.
    let checkpoints = 28.0 * 4.0 * 1048576.0;
    let expected = 4.0 * wide + 2.0 * narrow + checkpoints;
    assert!((bytes(&point, "pinned rounding") - expected).abs() < 1.0, "{expected}");
}

#[test]
fn a_gpu_without_flash_attention_chunked_loss_or_checkpoints_holds_more() {
    let used = |settings| point("finetuning-a", "qwen2.5-7b", 4096, 2, settings, &[]).gpu.used_bytes;
    let all = used(Settings::default());
    let scores = used(Settings { flash: false, ..Settings::default() }) - all;
    assert_eq!(scores, 4.0 * 2.0 * 28.0 * 4096.0 * 4096.0);
    assert!(used(Settings { liger: false, ..Settings::default() }) > all + 8.0 * 152064.0 * 8192.0);
    let settings = Settings { checkpointing: false, ..Settings::default() };
    let kept = point("finetuning-a", "qwen2.5-7b", 4096, 2, settings, &[]);
    assert!(kept.gpu.used_bytes > 10.0 * all && bytes(&kept, "activations") == 0.0);
}

#[test]
fn optimal_is_never_behind_another_policy_in_the_same_memory() {
    let mut compared = 0;
    for model in ["qwen2.5-7b", "mistral-nemo-12b"] {
        for (platform, gpus) in
            [("finetuning-a", 1), ("finetuning-a", 2), ("finetuning-b", 1), ("finetuning-b", 2)]
        {
            for (context, batch) in [(4096, 1), (4096, 16), (32768, 1), (32768, 8)] {
                let dram = Some(Bytes::new(128.0 * GIB));
                let settings = Settings { gpus, dram, ..Settings::default() };
                let names = ["optimal", "dram", "interleave", "paper"];
                let point = point(platform, model, context, batch, settings, &names);
                let [optimal, others @ ..] = &point.policies[..] else { panic!() };
                assert!(optimal.fits, "{point:?}");
                for other in others.iter().filter_map(|it| it.step_s) {
                    let ours = optimal.step_s.unwrap();
                    assert!(ours <= other * (1.0 + 1e-7), "{platform} {model} {context} {batch}: {point:?}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared >= 64, "{compared}");
}

#[test]
fn what_does_not_fit_names_the_first_change_that_does() {
    let placed = |model: &str, context, batch, settings, policy: &str| -> Placed {
        point("finetuning-a", model, context, batch, settings, &[policy]).policies.remove(0)
    };
    let small = || Settings { dram: Some(Bytes::new(128.0 * GIB)), ..Settings::default() };
    let would = |it: Placed| {
        assert!(!it.fits && it.lacks.is_some() && it.step_s.is_none());
        it.would_fit.unwrap()
    };
    assert_eq!(would(placed("mistral-nemo-12b", 4096, 1, small(), "dram")), "--policy optimal");
    let few = Settings { cards: Some(0), ..small() };
    assert_eq!(would(placed("mistral-nemo-12b", 4096, 1, few.clone(), "optimal")), "--cards 1");
    let largest = would(placed("qwen2.5-7b", 32768, 32, Settings::default(), "optimal"));
    assert!(largest.starts_with("--batch "), "{largest}");
    let batch: u32 = largest.strip_prefix("--batch ").unwrap().parse().unwrap();
    assert!(placed("qwen2.5-7b", 32768, batch, Settings::default(), "optimal").fits);
    assert!(!placed("qwen2.5-7b", 32768, 2 * batch, Settings::default(), "optimal").fits);
}
