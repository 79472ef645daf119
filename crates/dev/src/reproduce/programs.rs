//! Figure 10 of cMPI: percentages of the text beside ours, with the inputs of both parts of the paper.

use polder_dev::judge::cmpi::{
    JudgedPercent, LinkSharing, OnNodes, OtherNetwork, ProgramFigure, ProgramMetric, ProgramName,
    ProgramVariant,
};
use polder_dev::judge::skeleton::ProgramSeconds;

use crate::Failure;
use polder_plan::table;

pub(super) fn run(json: bool) -> Result<(), Failure> {
    let figure = ProgramFigure::load()?;
    let variants = figure.predict().map_err(|error| Failure(error.to_string()))?;
    match json {
        true => println!("{}", serde_json::to_string(&variants)?),
        false => print(&figure, &variants),
    }
    Ok(())
}

fn print(figure: &ProgramFigure, variants: &[ProgramVariant]) {
    println!("{}\n  {}\n", figure.title, figure.source);
    println!("Nothing is fitted. By how many percent CXL is better, the mean over {}:", nodes(figure));
    table::print(&percents(figure, variants));
    println!(
        "  (= sign and size hold: CG within {:.0} points, miniAMR within {:.0}% of the paper's; ~ the sign holds; ! it does not)",
        ProgramFigure::POINTS,
        100.0 * ProgramFigure::PART
    );
    println!(
        "\nwhat programs take where ranks of a node share its link, simulated; communication in brackets"
    );
    for variant in variants.iter().filter(|it| it.sharing == LinkSharing::Node) {
        println!("by {}", variant.input);
        table::print(&seconds(variant));
    }
    println!();
    for line in causes(figure, variants) {
        println!("{line}");
    }
    figure.assumed.iter().for_each(|line| println!("assumed: {line}"));
    figure.unexplained.iter().for_each(|line| println!("not explained: {line}"));
    println!("the paper simulated this too; no run over CXL validates it");
}

fn nodes(figure: &ProgramFigure) -> String {
    let nodes: Vec<_> = figure.nodes.iter().map(u32::to_string).collect();
    format!("{} nodes of {} ranks", nodes.join(", "), figure.ranks_per_node)
}

const fn program(name: ProgramName) -> &'static str {
    match name {
        ProgramName::Cg => "CG",
        ProgramName::MiniAmr => "miniAMR",
    }
}

fn what(claim: &JudgedPercent) -> String {
    let metric = match claim.claim.metric {
        ProgramMetric::Communication => "communication",
        ProgramMetric::Total => "total",
    };
    let over = match claim.claim.over {
        OtherNetwork::Smartnic => "CX-6 Dx",
        OtherNetwork::Ethernet => "Ethernet",
    };
    format!("{}, {metric}, over {over}", program(claim.claim.program))
}

fn percents(figure: &ProgramFigure, variants: &[ProgramVariant]) -> Vec<Vec<String>> {
    let mut rows = vec![vec![String::new(), "published".to_owned()]];
    rows[0].extend(variants.iter().map(|variant| variant.input.clone()));
    let mut below = vec![String::new(); 2];
    below.extend(variants.iter().map(|variant| short(variant.sharing).to_owned()));
    rows.push(below);
    for (index, claim) in variants[0].claims.iter().enumerate() {
        let mut row = vec![what(claim), format!("{:.1}", claim.claim.published)];
        row.extend(variants.iter().map(|variant| marked(&variant.claims[index])));
        rows.push(row);
    }
    let until = figure.ethernet_until;
    let mut last = vec!["miniAMR: Ethernet faster than CX-6 Dx up to".to_owned(), format!("{until} nodes")];
    last.extend(variants.iter().map(|variant| match variant.ethernet_until {
        Some(nodes) => format!("{nodes} nodes{}", if nodes == until { "=" } else { " " }),
        None => "never ".into(),
    }));
    rows.push(last);
    rows
}

const fn short(sharing: LinkSharing) -> &'static str {
    match sharing {
        LinkSharing::Node => "shared links",
        LinkSharing::Smpirun => "as smpirun",
        LinkSharing::Alone => "own links",
        LinkSharing::LatencyAlone => "latency alone",
    }
}

fn marked(claim: &JudgedPercent) -> String {
    let mark = match (claim.sign, claim.near) {
        (true, true) => '=',
        (true, false) => '~',
        (false, _) => '!',
    };
    format!("{:.1}{mark}", claim.simulated)
}

fn seconds(variant: &ProgramVariant) -> Vec<Vec<String>> {
    let mut rows = vec![table::head("| CXL | CX-6 Dx | Ethernet | of it communication")];
    for (name, list) in [(ProgramName::Cg, &variant.cg), (ProgramName::MiniAmr, &variant.mini_amr)] {
        for OnNodes { nodes, cxl, smartnic, ethernet } in list {
            let cell =
                |times: &ProgramSeconds| format!("{:.3} s ({:.3})", times.total_s, times.communication_s);
            let share =
                |times: &ProgramSeconds| format!("{:.0}%", 100.0 * times.communication_s / times.total_s);
            rows.push(vec![
                format!("  {}, {nodes} nodes", program(name)),
                cell(cxl),
                cell(smartnic),
                cell(ethernet),
                [cxl, smartnic, ethernet].map(share).join(" "),
            ]);
        }
    }
    rows
}

/// Which of the percentages miss, and why.
fn causes(figure: &ProgramFigure, variants: &[ProgramVariant]) -> Vec<String> {
    let mut lines = vec![];
    for input in &figure.input {
        let [cxl, smartnic, ethernet] = [input.cxl, input.smartnic, input.ethernet];
        let ratio = |over: f64, under: f64| format!("{:.1}", over / under);
        lines.push(format!(
            "by {}: latencies are {} and {} times CXL's, the bandwidth of Ethernet is CXL's by {}",
            input.name,
            ratio(smartnic.latency.value(), cxl.latency.value()),
            ratio(ethernet.latency.value(), cxl.latency.value()),
            ratio(cxl.bandwidth.value(), ethernet.bandwidth.value()),
        ));
    }
    let missed = |variant: &&ProgramVariant| variant.claims.iter().any(|claim| !claim.near);
    let all = variants.iter().filter(missed).count();
    lines.push(format!("{all} of {} columns miss a percentage", variants.len()));
    lines.push(
        "cause: so much less latency and so much more bandwidth leave less of TCP's time between nodes than the paper has left; its".into(),
    );
    lines.push(
        "percentages ask for communication that is mostly the same over all three networks: inside a node, or waiting for slower ranks".into(),
    );
    for (name, over) in [
        (ProgramName::Cg, OtherNetwork::Ethernet),
        (ProgramName::MiniAmr, OtherNetwork::Smartnic),
        (ProgramName::MiniAmr, OtherNetwork::Ethernet),
    ] {
        let is = |judged: &&JudgedPercent| {
            judged.claim.program == name
                && judged.claim.over == over
                && judged.claim.metric == ProgramMetric::Communication
        };
        if let Some(claim) = variants[0].claims.iter().find(is)
            && !claim.near
            && claim.simulated > claim.claim.published
        {
            let same = 100.0 * (1.0 - claim.claim.published / claim.simulated);
            lines.push(format!(
                "  {}: {same:.0}% of it would have to be the same, beside what differs here",
                what(claim)
            ));
        }
    }
    lines
}
