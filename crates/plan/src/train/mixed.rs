//! A training step on racks of two kinds, which one fabric joins.

use polder_sim::{Fidelity, MixedAnswer, MixedRequest, RackPart, accelerators, grouped};

use super::Arguments;
use crate::Failure;
use crate::fidelity::followed;
use crate::option::accelerator_count;
use crate::table::{self, span, three};

/// Prints the step.
pub(super) fn train(arguments: &Arguments) -> Result<(), Failure> {
    let request = arguments.mixed()?;
    let found = request.predict().map_err(|error| Failure(error.to_string()))?;
    arguments.json.print(&found, || print(&request, &found))
}

impl Arguments {
    /// What of each kind there is, and a step that either could take.
    fn mixed(&self) -> Result<MixedRequest, Failure> {
        let Self { subject, against, failed, trace, html, .. } = self;
        let given = [
            ("--against", against.is_some()),
            ("--failed", !failed.is_empty()),
            ("--trace", trace.is_some()),
            ("--html", html.is_some()),
            ("--layout", subject.layout.is_some()),
        ];
        if let Some((option, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Failure(format!(
                "{option}: a step on two kinds of rack has none; give one --platform"
            )));
        }
        let [racks, gpus] = [("--rack", &subject.rack), ("--gpus", &self.gpus)].map(|(option, text)| {
            let values: Vec<_> = text.iter().flat_map(|text| text.split(',')).collect();
            let count = values.len();
            let wrong =
                || Failure(format!("{option}: expected two values, of the two of --platform, found {count}"));
            <[&str; 2]>::try_from(values).map_err(|_| wrong())
        });
        let (racks, gpus) = (racks?, gpus?);
        let count = self.platform.len();
        let platforms: &[String; 2] = self.platform[..]
            .try_into()
            .map_err(|_| Failure(format!("--platform: expected two at most, found {count}")))?;
        let part = |at: usize| {
            let (platform, rack) = (platforms[at].clone(), racks[at].to_owned());
            Ok::<_, Failure>(RackPart { platform, rack, accelerators: accelerator_count(gpus[at])? })
        };
        let mut step = self.request("", None)?;
        step.layout.micro_batch = step.layout.micro_batch.or(Some(1));
        Ok(MixedRequest { parts: [part(0)?, part(1)?], step })
    }
}

fn print(request: &MixedRequest, answer: &MixedAnswer) {
    let count = answer.parts.iter().map(|part| part.accelerators).sum();
    let looked = match answer.fidelity {
        Fidelity::L0 => "in closed form",
        Fidelity::L1 => "by flows",
        Fidelity::L2 => "flit by flit",
    };
    let mut platforms = request.parts.each_ref().map(|part| part.platform.as_str()).to_vec();
    platforms.dedup();
    println!("{} on {}, {}, simulated", request.step.model, platforms.join(" and "), accelerators(count));
    println!(
        "a step of {} sequences takes {} s; predicted: {} s",
        grouped(request.step.layout.batch.unwrap_or(0).into()),
        span(answer.range_s),
        three(answer.total_s)
    );
    let mut rows = vec![table::head(
        "racks | accelerators | copies | sequences of a copy | they take | predicted | alone",
    )];
    for part in &answer.parts {
        rows.push(vec![
            part.rack.clone(),
            grouped(part.accelerators.into()),
            grouped(part.copies.into()),
            grouped(part.sequences.into()),
            format!("{} s", span(part.range_s)),
            format!("{} s", three(part.step_s)),
            part.alone_s.map_or_else(|| "cannot run".into(), |seconds| format!("{} s", three(seconds))),
        ]);
    }
    table::print(&rows);
    if let Some(even_s) = answer.even_s {
        println!("with as many sequences for each copy it takes {} s, predicted", three(even_s));
    }
    for part in &answer.parts {
        println!("{}: {}", part.rack, part.machine);
    }
    println!(
        "alone: the whole batch on these racks; no copy spans both kinds, gradients of all cross the fabric between racks"
    );
    let flits = answer.flits.map_or_else(String::new, |flits| format!(": {}", followed(flits)));
    println!("communication {looked} (--fidelity {}){flits}", answer.fidelity.name());
    println!("no run over CXL validates this");
}
