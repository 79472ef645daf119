//! `polder plan mixed`: a training step on racks of two kinds, which CXL joins.

use clap::Args;
use polder_sim::{Fidelity, GivenLayout, MixedAnswer, MixedRequest, RackPart, accelerators, grouped};

use super::fabric::followed;
use super::fidelity::Closeness;
use super::table::{self, span, three};
use crate::Failure;

/// Predicts a step on racks of two kinds.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The model: a name (`polder plan show`), or the path of a file.
    #[arg(long, value_name = "MODEL")]
    model: String,
    /// The machine, with both kinds of rack: a name, or the path of a file.
    #[arg(long, value_name = "PLATFORM", default_value = "mixed-nvlink-ualink-cxl")]
    platform: String,
    /// Accelerators in racks of each kind, such as "nvl72=144,ualink=144".
    #[arg(long, value_name = "RACK=COUNT", value_delimiter = ',', num_args = 1.., required = true)]
    racks: Vec<String>,
    /// Tensor parallelism of a copy of the model.
    #[arg(long, value_name = "COUNT")]
    tp: u32,
    /// Stages of a copy of the model.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pp: u32,
    /// Sequences of a step, of all copies together.
    #[arg(long, value_name = "COUNT")]
    batch: u32,
    /// Sequences at once.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    micro_batch: u32,
    #[command(flatten)]
    closeness: Closeness,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Prints the step.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let parts = arguments.racks.iter().map(|text| RackPart::parse(text)).collect::<Result<Vec<_>, _>>();
    let parts = parts.map_err(|error| Failure(format!("--racks: {error}")))?;
    let parts: [RackPart; 2] = parts.try_into().map_err(|parts: Vec<_>| {
        Failure(format!("--racks: expected two kinds of rack, found {}", parts.len()))
    })?;
    let request = MixedRequest {
        model: arguments.model.clone(),
        platform: arguments.platform.clone(),
        parts,
        fidelity: arguments.closeness.level(),
        flits: arguments.closeness.flits()?,
        layout: GivenLayout {
            tp: Some(arguments.tp),
            pp: Some(arguments.pp),
            batch: Some(arguments.batch),
            micro_batch: Some(arguments.micro_batch),
            ..GivenLayout::default()
        },
    };
    let found = request.predict().map_err(|error| Failure(error.to_string()))?;
    match arguments.json {
        true => println!("{}", serde_json::to_string(&found)?),
        false => print(arguments, &found),
    }
    Ok(())
}

fn print(arguments: &Arguments, found: &MixedAnswer) {
    let count = found.parts.iter().map(|it| it.accelerators).sum();
    let looked = match found.fidelity {
        Fidelity::L0 => "in closed form",
        Fidelity::L1 => "by flows",
        Fidelity::L2 => "flit by flit",
    };
    println!("{} on {}, {}, simulated", arguments.model, arguments.platform, accelerators(count));
    println!(
        "a step of {} sequences takes {} s; predicted: {} s",
        grouped(arguments.batch.into()),
        span(found.range_s),
        three(found.total_s)
    );
    let head = ["racks", "accelerators", "copies", "sequences of a copy", "they take", "predicted", "alone"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for it in &found.parts {
        rows.push(vec![
            it.rack.clone(),
            grouped(it.accelerators.into()),
            grouped(it.copies.into()),
            grouped(it.sequences.into()),
            format!("{} s", span(it.range_s)),
            format!("{} s", three(it.step_s)),
            it.alone_s.map_or_else(|| "cannot run".into(), |seconds| format!("{} s", three(seconds))),
        ]);
    }
    table::print(&rows);
    if let Some(even_s) = found.even_s {
        println!("with as many sequences for each copy it takes {} s, predicted", three(even_s));
    }
    for it in &found.parts {
        println!("{}: {}", it.rack, it.machine);
    }
    println!(
        "alone: the whole batch on these racks; no copy spans both kinds, gradients of all cross the fabric between racks"
    );
    let flits = found.flits.map_or_else(String::new, |it| format!(": {}", followed(it)));
    println!("communication {looked} (--fidelity {}){flits}", found.fidelity.name());
    println!("no run over CXL validates this");
}
