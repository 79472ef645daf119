//! `polder plan inference`: KV caches, embedding tables and retrieval that outgrow an accelerator, by the memories that they take.

use clap::{Args, ValueEnum};
use polder_platform::{Bytes, Platform};
use polder_sim::memory::{
    Configuration, InferenceLoad, InferenceStep, Question, configurations, kv_token_bytes,
};
use polder_sim::{Model, accelerators};
use serde_json::{Value, json};

use super::fidelity::ClosedForm;
use super::memory::{WayArguments, size, ways_line};
use super::mpi::time;
use super::table;
use super::train::accelerator_count;
use crate::Failure;

/// Predicts steps of inference.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The machine: a name (`polder plan list`), or the path of a file.
    #[arg(long, value_name = "PLATFORM")]
    platform: String,
    /// Another machine. Software manages what its accelerators do not hold: it is the baseline.
    #[arg(long, value_name = "PLATFORM")]
    against: Option<String>,
    /// Kind of rack, if the platform has several [default: the first by name].
    #[arg(long, value_name = "NAME")]
    rack: Option<String>,
    /// Number of accelerators of the machine [default: those of 16 racks].
    #[arg(long, value_name = "COUNT", allow_negative_numbers = true)]
    gpus: Option<String>,
    /// Accelerators of a rack that serve together; the others lend their memory [default: the whole rack].
    #[arg(long, value_name = "COUNT")]
    serving: Option<u32>,
    /// What is read in each step: the keys and values of all sequences, rows of embedding tables, or vectors of an index, one after
    /// another.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "kv")]
    load: LoadKind,
    /// The model that is served.
    #[arg(long, value_name = "MODEL", default_value = "llama3-70b")]
    model: String,
    /// Tokens of each sequence.
    #[arg(long, value_name = "TOKENS", default_value_t = 131_072, value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,
    /// Sequences that are served at once, such as "64,256,1024".
    #[arg(long, value_name = "COUNT", value_delimiter = ',', default_value = "64,256,512,1024,4096",
        value_parser = clap::value_parser!(u32).range(1..))]
    sequences: Vec<u32>,
    /// Bytes of a page of keys and values, of a row, or of a vector with its neighbours [default: 64 KiB, 512 B, 4 KiB].
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse)]
    access: Option<Bytes>,
    /// Size of the tables or of the index, of all accelerators that serve.
    #[arg(long, value_name = "SIZE", value_parser = Bytes::parse, default_value = "40 TB")]
    set: Bytes,
    /// Accesses that are under way at once [default: 64; in an index 1 of each sequence, where each depends on the one before].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    outstanding: Option<u32>,
    /// Rows that a sequence looks up in a step, or vectors that it visits [default: 64 rows, 100 vectors].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    visits: Option<u32>,
    #[command(flatten)]
    ways: WayArguments,
    #[command(flatten)]
    fidelity: ClosedForm,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LoadKind {
    Kv,
    Embedding,
    Retrieval,
}

impl LoadKind {
    /// Bytes of an access, accesses at once, and visits of a sequence.
    const fn defaults(self) -> (f64, u32, u32) {
        match self {
            Self::Kv => (65536.0, 64, 0),
            Self::Embedding => (512.0, 64, 64),
            Self::Retrieval => (4096.0, 1, 100),
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::Kv => "all keys and values",
            Self::Embedding => "rows of embedding tables",
            Self::Retrieval => "vectors of an index",
        }
    }
}

impl Arguments {
    fn load(&self, model: &Model, sequences: u32, serving: f64) -> InferenceLoad {
        let (bytes, outstanding, visits) = self.load.defaults();
        let bytes = self.access.map_or(bytes, Bytes::value);
        let outstanding = f64::from(self.outstanding.unwrap_or(outstanding));
        let sequences = f64::from(sequences);
        let kv = InferenceLoad::kv(model, f64::from(self.context), sequences, serving, bytes, outstanding);
        match self.load {
            LoadKind::Kv => kv,
            // Sequences are spread over the accelerators, and the set too.
            LoadKind::Embedding | LoadKind::Retrieval => InferenceLoad {
                outstanding: match self.load {
                    // Sequences search beside one another.
                    LoadKind::Retrieval => outstanding * (sequences / serving).max(1.0),
                    _ => outstanding,
                },
                resident_bytes: 0.0,
                set_bytes: self.set.value() / serving,
                accesses: sequences / serving * f64::from(self.visits.unwrap_or(visits)),
                ..kv
            },
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
    arguments.fidelity.check(
        "inference",
        "all accelerators get their share; plan fabric has what messages that share links take",
    )?;
    let question = Question {
        platform: arguments.platform.clone(),
        against: arguments.against.clone(),
        rack: arguments.rack.clone(),
        accelerators: arguments.gpus.as_deref().map(accelerator_count).transpose()?,
        ways: arguments.ways.ways(),
    };
    let (count, found) = configurations(&question)?;
    let platform = Platform::load(&arguments.platform)?;
    let job = polder_sim::memory::job(&arguments.platform, &platform, arguments.rack.as_deref())?;
    let most = job.rack().accelerators.min(count);
    let serving = arguments.serving.unwrap_or(most);
    if serving == 0 || serving > most {
        return Err(Failure(format!(
            "--serving: expected 1 to {most}, the accelerators of a rack, found {serving}"
        )));
    }
    let model = Model::load(&arguments.model)?;
    let rows: Vec<_> = arguments
        .sequences
        .iter()
        .map(|sequences| {
            let load = arguments.load(&model, *sequences, f64::from(serving));
            let steps = found.iter().map(|on| load.step(on, f64::from(serving))).collect();
            Row { sequences: *sequences, load, steps }
        })
        .collect();
    match arguments.json {
        true => println!("{}", said(arguments, &found, serving, &rows)),
        false => print(arguments, &model, &found, (count, serving), &rows),
    }
    Ok(())
}

fn said(arguments: &Arguments, found: &[Configuration], serving: u32, rows: &[Row]) -> Value {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            let steps = found.iter().zip(&row.steps).map(|(on, step)| (on.name.to_owned(), json!(step)));
            json!({
                "sequences": row.sequences, "load": row.load, "steps": steps.collect::<serde_json::Map<_, _>>(),
            })
        })
        .collect();
    json!({
        "platform": arguments.platform, "against": arguments.against, "model": arguments.model, "serving": serving,
        "configurations": found, "rows": rows,
    })
}

fn print(
    arguments: &Arguments,
    model: &Model,
    found: &[Configuration],
    (count, serving): (u32, u32),
    rows: &[Row],
) {
    let what = arguments.load.words();
    println!("a step of inference that reads {what}, {serving} of {} serve, simulated", accelerators(count));
    for on in found {
        let memories: Vec<_> = on.tiers.iter().map(|it| it.name).collect();
        println!("  {}: {}, in {}", on.name, on.platform, memories.join(", "));
    }
    if arguments.load == LoadKind::Kv {
        println!(
            "{}: {} tokens of {} each in each sequence",
            arguments.model,
            polder_sim::grouped(arguments.context.into()),
            size(kv_token_bytes(model))
        );
    }
    println!();
    let mut head = vec!["sequences".to_owned(), "the set".into()];
    for on in found {
        head.extend([format!("{}, a step", on.name), "tokens/s".into()]);
    }
    if found.len() > 1 {
        head.push(format!("over {}", found[0].name));
    }
    head.push(format!("where it lies, {}", found[found.len() - 1].name));
    let mut table_rows = vec![head];
    for row in rows {
        let mut cells =
            vec![polder_sim::grouped(row.sequences.into()), size(row.load.set_bytes * f64::from(serving))];
        for step in &row.steps {
            match step {
                Some(step) => cells.extend([
                    time(step.seconds),
                    polder_sim::grouped((f64::from(row.sequences) / step.seconds) as u64),
                ]),
                None => cells.extend(["does not fit".into(), String::new()]),
            }
        }
        let last = row.steps.last().and_then(Option::as_ref);
        if found.len() > 1 {
            let times = row.steps[0].as_ref().zip(last).map(|(one, last)| one.seconds / last.seconds);
            cells.push(times.map_or_else(String::new, |times| format!("{times:.2}")));
        }
        cells.push(last.map_or_else(String::new, |last| places(last, row.load.set_bytes)));
        table_rows.push(cells);
    }
    table::print(&table_rows);
    println!("{}", ways_line(arguments.ways.ways()));
    println!(
        "software-managed: what is copied costs the software of a message for each page or row; loads cost none (--access, --outstanding)"
    );
    println!("no run over CXL validates this");
}

fn places(step: &InferenceStep, all: f64) -> String {
    let parts = step.tiers.iter().filter(|(_, bytes, _)| *bytes > 0.0);
    let parts: Vec<_> = parts.map(|(name, bytes, _)| format!("{name} {:.0}%", 100.0 * bytes / all)).collect();
    parts.join(", ")
}
