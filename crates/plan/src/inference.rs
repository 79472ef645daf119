//! `polder plan inference`: KV caches, embedding tables and retrieval that outgrow an accelerator, by the memories that they take.

use clap::Args;
use polder_platform::Bytes;
use polder_sim::memory::{
    CONTEXT, Configuration, Inference, InferenceKind, InferenceLoad, InferenceQuestion, InferenceRow,
    InferenceStep, MODEL, kv_bytes,
};
use polder_sim::{Fidelity, accelerators};
use serde_json::{Value, json};

use super::fidelity::{Closeness, followed};
use super::memory::{MachineArguments, WayArguments, ways_line};
use super::option::{choice, of_memory};
use super::table::{self, digits, size, three, time};
use super::written::Json;
use crate::Failure;

/// Predicts steps of inference.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    machines: MachineArguments,
    /// Accelerators of a rack that serve together; the others lend their memory [default: the whole rack].
    #[arg(long, value_name = "COUNT")]
    serving: Option<u32>,
    /// What is read in each step: the keys and values of all sequences, rows of embedding tables, or vectors of an index, one after
    /// another.
    #[arg(long, value_name = "WHAT", value_parser = choice::<InferenceKind>(["kv", "embedding", "retrieval"]), default_value = "kv")]
    load: InferenceKind,
    /// The model whose keys and values are read [default: llama3-70b].
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Tokens of each sequence whose keys and values are read [default: 131072].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Sequences that are served at once, such as "64,256,1024".
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "64,256,512,1024,4096",
        value_parser = clap::value_parser!(u32).range(1..))]
    sequences: Vec<u32>,
    /// Bytes of a page of keys and values, of a row, or of a vector with its neighbours [default: 64 KiB, 512 B, 4 KiB].
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    access: Option<Bytes>,
    /// Size of the tables or of the index, of all accelerators that serve [default: 40 TB].
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    set: Option<Bytes>,
    /// Accesses that are under way at once [default: 64; in an index 1 of each sequence, where each depends on the one before].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    outstanding: Option<u32>,
    /// Rows that a sequence looks up in a step, or vectors that it visits [default: 64 rows, 100 vectors].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    visits: Option<u32>,
    #[command(flatten)]
    ways: WayArguments,
    #[command(flatten)]
    closeness: Closeness,
    #[command(flatten)]
    json: Json,
}

/// What a load reads.
const fn words(kind: InferenceKind) -> &'static str {
    match kind {
        InferenceKind::Kv => "all keys and values",
        InferenceKind::Embedding => "rows of embedding tables",
        InferenceKind::Retrieval => "vectors of an index",
    }
}

impl Arguments {
    fn row_of(&self, sequences: u32) -> InferenceRow {
        InferenceRow {
            sequences,
            context: self.context,
            set_bytes: self.set.map(Bytes::value),
            access_bytes: self.access.map(Bytes::value),
            outstanding: self.outstanding,
            visits: self.visits,
        }
    }
}

/// What a number of sequences takes on each configuration.
struct Row {
    sequences: u32,
    load: InferenceLoad,
    steps: Vec<Option<InferenceStep>>,
}

/// Prints steps by the number of sequences.
pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let question = InferenceQuestion {
        machines: arguments.machines.question(&arguments.ways)?,
        serving: arguments.serving,
        load: arguments.load,
        model: arguments.model.clone(),
        sequence: Some(arguments.context.unwrap_or(CONTEXT)),
        fidelity: arguments.closeness.level(),
        flits: arguments.closeness.flits()?,
    };
    let inference = Inference::new(&question).map_err(of_memory)?;
    let loads = arguments.sequences.iter().map(|sequences| inference.load(&arguments.row_of(*sequences)));
    let loads = loads.collect::<Result<Vec<_>, _>>().map_err(of_memory)?;
    let steps = inference.steps(&loads).map_err(of_memory)?;
    let rows = arguments.sequences.iter().zip(loads).zip(steps);
    let rows: Vec<_> =
        rows.map(|((sequences, load), steps)| Row { sequences: *sequences, load, steps }).collect();
    match arguments.json.json {
        true => println!("{}", report(arguments, &inference, &rows)),
        false => print(arguments, &inference, &rows),
    }
    Ok(())
}

fn report(arguments: &Arguments, found: &Inference, rows: &[Row]) -> Value {
    let Inference { configurations, serving, .. } = found;
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            let steps = configurations.iter().zip(&row.steps).map(|(on, step)| (on.name.to_owned(), json!(step)));
            json!({
                "sequences": row.sequences, "load": row.load, "steps": steps.collect::<serde_json::Map<_, _>>(),
            })
        })
        .collect();
    json!({
        "platform": arguments.machines.machine.platform, "against": arguments.machines.against, "model": model_of(arguments), "serving": serving,
        "fidelity": arguments.closeness.level(), "configurations": configurations, "rows": rows,
    })
}

fn print(arguments: &Arguments, inference: &Inference, rows: &[Row]) {
    let Inference { accelerators: count, serving, configurations, model, .. } = inference;
    let what = words(arguments.load);
    println!("a step of inference that reads {what}, {serving} of {} serve, simulated", accelerators(*count));
    for on in configurations {
        let memories: Vec<_> = on.tiers.iter().map(|it| it.name).collect();
        println!("  {}: {}, in {}", on.name, on.platform, memories.join(", "));
    }
    if let Some(name) = model_of(arguments) {
        let context = arguments.context.unwrap_or(CONTEXT);
        let token = size(kv_bytes(model, context.into()) / f64::from(context));
        println!("{name}: {} tokens of {token} each in each sequence", polder_sim::grouped(context.into()));
        let weights = rows.first().map_or(0.0, |row| row.load.resident_bytes * f64::from(*serving));
        println!("weights of {}, keys and values in 16 bits, whatever its file says", size(weights));
        if model.experts.is_some() {
            println!("a step reads the experts that its tokens choose, each as likely");
        }
    }
    println!();
    let mut head = vec!["sequences".to_owned(), "the set".into()];
    for on in configurations {
        head.extend([format!("{}, a step", on.name), "tokens/s".into()]);
    }
    if configurations.len() > 1 {
        head.push(format!("over {}", configurations[0].name));
    }
    head.push(format!("where it lies, {}", configurations[configurations.len() - 1].name));
    let mut table_rows = vec![head];
    for row in rows {
        let mut cells =
            vec![polder_sim::grouped(row.sequences.into()), size(row.load.set_bytes * f64::from(*serving))];
        for step in &row.steps {
            match step {
                Some(step) => {
                    cells.extend([time(step.seconds), rate(f64::from(row.sequences) / step.seconds)])
                }
                None => cells.extend(["does not fit".into(), String::new()]),
            }
        }
        let last = row.steps.last().and_then(Option::as_ref);
        if configurations.len() > 1 {
            let times = row.steps[0].as_ref().zip(last).map(|(one, last)| one.seconds / last.seconds);
            cells.push(times.map_or_else(String::new, |times| format!("{times:.2}")));
        }
        cells.push(last.map_or_else(String::new, |last| places(last, row.load.set_bytes)));
        table_rows.push(cells);
    }
    table::print(&table_rows);
    if let Some(row) = rows.first() {
        configurations
            .iter()
            .filter_map(|on| weights_line(arguments, on, row))
            .for_each(|line| println!("{line}"));
    }
    print_rates(arguments.closeness.level(), configurations, rows, *serving);
    println!("{}", ways_line(arguments.ways.ways()));
    println!(
        "software-managed: what is copied costs the software of a message for each page or row; loads cost none (--access, --outstanding)"
    );
    println!("no run over CXL validates this");
}

/// Says it where weights alone are more than the accelerators that serve hold, so that no number of sequences fits.
fn weights_line(arguments: &Arguments, on: &Configuration, row: &Row) -> Option<String> {
    let (own, weights) = (on.tiers.first()?.capacity_bytes, row.load.resident_bytes);
    (weights > own).then(|| {
        let [weights, own] = [weights, own].map(size);
        let remedy = if arguments.serving.is_some() { "; let more serve (--serving)" } else { "" };
        format!(
            "{}: weights alone take {weights} of each accelerator that serves, which has {own}{remedy}",
            on.name
        )
    })
}

/// The model whose keys and values are read, if any are.
fn model_of(arguments: &Arguments) -> Option<&str> {
    (arguments.load == InferenceKind::Kv).then(|| arguments.model.as_deref().unwrap_or(MODEL))
}

/// A number a second.
fn rate(each_s: f64) -> String {
    if each_s < 100.0 { three(each_s) } else { polder_sim::grouped(each_s as u64) }
}

/// How closely reads were looked at; and of each memory over a fabric the rates at which accelerators read it, in the last row that does.
fn print_rates(fidelity: Fidelity, configurations: &[Configuration], rows: &[Row], serving: u32) {
    let how = match fidelity {
        Fidelity::L0 => {
            println!("each accelerator reads at its share of links and memories (--fidelity L0)");
            return;
        }
        Fidelity::L1 => "as flows",
        Fidelity::L2 => "flit by flit",
    };
    println!("reads over fabrics, {serving} accelerators at once, {how} (--fidelity {}):", fidelity.name());
    let head = ["", "closed form, GB/s", "all at once, GB/s", "sequences"].map(String::from);
    let mut table = vec![head.to_vec()];
    let mut flits = vec![];
    for (at, on) in configurations.iter().enumerate() {
        for (place, tier) in on.tiers.iter().enumerate() {
            let read = |row: &&Row| row.steps[at].as_ref().is_some_and(|step| step.tiers[place].bytes > 0.0);
            let Some(row) = rows.iter().rev().find(read).filter(|_| tier.is_over_fabric()) else { continue };
            let part = row.steps[at].as_ref().map(|step| step.tiers[place]).expect("a step that fits");
            table.push(vec![
                format!("{}, {}", on.name, tier.name),
                digits(tier.access.bytes_per_s / 1e9),
                digits(part.bytes_per_s / 1e9),
                polder_sim::grouped(row.sequences.into()),
            ]);
            flits.extend(part.flits.map(|flits| (format!("{}, {}", on.name, tier.name), flits)));
        }
    }
    match table.len() {
        1 => println!("  no step reads over a fabric"),
        _ => table::print(&table),
    }
    for (name, counts) in flits {
        println!("{name}: {}", followed(counts.into()));
    }
}

fn places(step: &InferenceStep, all: f64) -> String {
    let parts = step.tiers.iter().filter(|it| it.bytes > 0.0);
    let parts: Vec<_> = parts.map(|it| format!("{} {:.0}%", it.name, 100.0 * it.bytes / all)).collect();
    parts.join(", ")
}
