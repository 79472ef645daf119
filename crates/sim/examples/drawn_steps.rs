//! Prints the figures of 10,000 steps, drawn over all platforms, models and layouts from one seed, as a line of JSON each. A change
//! that is to change no figure is held against the lines of the code before it:
//!
//! ```sh
//! cargo run --release -p polder-sim --example drawn_steps > before.jsonl
//! ```

use polder_platform::{DataError, Folder, Platform, names};
use polder_sim::{Job, Layout, Model, Random};
use serde_json::{Value, json};

const STEPS: usize = 10_000;
const ANNOTATED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/platform.toml");

struct Dice(Random);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0.bits()
    }

    fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[(self.roll() % all.len() as u64) as usize]
    }

    fn power(&mut self, most: u64) -> u64 {
        1 << (self.roll() % (most + 1))
    }

    fn is_so(&mut self) -> bool {
        self.roll().is_multiple_of(2)
    }
}

fn drawn(dice: &mut Dice) -> Value {
    let (dp, micro_batch) = (dice.power(5), dice.power(2));
    json!({
        "tp": dice.power(3), "cp": dice.power(1), "ep": dice.power(3), "dp": dp,
        "pp": 1 + dice.roll() % 12, "interleave": 1 + dice.roll() % 3,
        "batch": dp * micro_batch * (1 + dice.roll() % 48), "micro_batch": micro_batch,
        "sequence_parallel": dice.is_so(), "gather_again": dice.is_so(), "flash": dice.is_so(),
        "recompute": dice.pick(&["none", "selective", "full"]),
        "zero": dice.pick(&["none", "optimizer", "gradients", "weights"]),
        "precision": dice.pick(&["bf16", "bf16", "fp8", "fp32"]),
        "wide_gradients": dice.is_so(),
        "overlap": {
            "tensor": dice.is_so(), "context": dice.is_so(), "expert": dice.is_so(), "pipeline": dice.is_so(),
            "data": dice.is_so(), "offload": dice.is_so(),
        },
        "offload": {
            "tier": dice.pick(&["host", "pool", "cxl"]), "weights": dice.is_so(), "optimizer": dice.is_so(),
            "activations": dice.is_so(),
        },
    })
}

fn main() -> Result<(), DataError> {
    let platforms = names(Folder::Platforms).into_iter().chain([ANNOTATED]);
    let platforms =
        platforms.map(|name| Ok((name.rsplit('/').next().unwrap_or(name), Platform::load(name)?)));
    let platforms: Vec<_> = platforms.collect::<Result<_, DataError>>()?;
    let models = names(Folder::Models).into_iter().map(|name| Ok((name, Model::load(name)?)));
    let models: Vec<_> = models.collect::<Result<_, DataError>>()?;
    let orders = ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-dp-ep-cp-tp", "ep-tp-cp-dp-pp"];
    let mut dice = Dice(Random::new(25));
    let mut count = 0;
    while count < STEPS {
        let ((platform, machine), (name, model)) = (dice.pick(&platforms), dice.pick(&models));
        let order = dice.pick(&orders).parse().ok();
        let layout = drawn(&mut dice);
        let Ok(layout) = serde_json::from_value::<Layout>(layout) else {
            unreachable!("it was drawn as one")
        };
        let Ok(job) = Job::chosen(machine, None, None, order) else { continue };
        let Ok((plan, stages)) = job.predict_stages(model, &layout) else { continue };
        println!(
            "{}",
            json!({"platform": platform, "model": name, "layout": layout, "step": plan.step, "stages": stages})
        );
        count += 1;
    }
    Ok(())
}
