//! How far predictions may be from published steps. The bars are those of docs/plan-accuracy.md.

use polder_platform::{Fitted, Platform};
use polder_sim::{Job, Margin, Pooled, fitted, scalepool, tables, validate};

#[test]
fn predicted_steps_are_as_near_to_published_ones_as_docs_plan_says() {
    let tables = validate().unwrap();
    let pooled = Pooled::of(&tables);
    assert!(pooled.rows >= 28.0, "{pooled:?}");
    assert!(pooled.mean <= 0.06, "{pooled:?}");
    assert!(pooled.worst <= 0.15, "{pooled:?}");
    assert!(pooled.mean <= pooled.constant_mean / 2.0, "{pooled:?}");
    assert!(pooled.worst_ratio <= 0.05, "{pooled:?}");
}

/// Every published step ran, so each fits but those of which a table says why not.
#[test]
fn published_steps_fit_in_the_memory_that_they_ran_in() {
    let tables = validate().unwrap();
    let Pooled { steps, fits, .. } = Pooled::of(&tables);
    assert_eq!((steps, fits), (38, 36));
    for table in &tables {
        let over = table.rows.iter().filter(|row| !row.memory.fits());
        let names: Vec<_> = over.map(|row| row.name.as_str()).collect();
        match table.table.as_str() {
            "llama3-405b" => assert_eq!(names, ["8192 accelerators", "16384 accelerators"]),
            name => assert_eq!(names, [""; 0], "{name}"),
        }
        assert!(names.is_empty() || table.unexplained.iter().any(|it| it.contains("memory")));
    }
}

/// Which the table does not say: neither is fitted to or judged beside the other.
#[test]
fn steps_of_sc21_are_compared_in_whole_stages_and_in_parts() {
    let tables = validate().unwrap();
    let table = tables.iter().find(|table| table.table == "megatron-sc21").unwrap();
    let taken: Vec<_> = table.rows.iter().map(|row| row.interleave).collect();
    assert_eq!(taken, [1, 1, 1, 1, 1, 1, 2, 2, 1, 2]);
    assert!(table.assumed.iter().any(|assumed| assumed.starts_with("interleave: 2 from eight stages on")));
    assert_eq!(table.also.len(), 6, "each row with stages");
    for also in &table.also {
        let (name, interleave) = also.name.split_once(", interleave ").unwrap();
        assert_eq!(interleave, also.interleave.to_string());
        let row = table.rows.iter().find(|row| row.name == name).unwrap();
        assert_eq!((row.published_s, row.judged, also.judged), (also.published_s, true, false));
        let (parts, whole) = if row.interleave > 1 { (row, also) } else { (also, row) };
        assert!(parts.interleave > 1 && whole.interleave == 1);
        assert!(whole.predicted_s > 1.02 * parts.predicted_s, "{also:?}");
    }
    let (last, also) = (table.rows.last().unwrap(), &table.also[0]);
    assert!(also.predicted_s > 1.04 * last.predicted_s, "{also:?}");
}

#[test]
fn the_margin_of_an_accelerator_is_that_of_its_tables() {
    let tables = validate().unwrap();
    let own = Margin::of("A100-SXM4-80GB").unwrap();
    let of = |name: &str| tables.iter().find(|table| table.table == name).unwrap();
    let its = ["korthikanti-table5", "megatron-sc21", "mt-nlg"].map(of);
    assert_eq!(own.least, its.map(|table| table.shipped[0]).into_iter().fold(f64::INFINITY, f64::min));
    assert_eq!(own.most, its.map(|table| table.shipped[1]).into_iter().fold(0.0, f64::max));
    assert_eq!(own.mean_without_scalar, Pooled::of(its).mean_without_scalar);
    assert_eq!(own.rows, 7.0 + 9.0 + 2.0);
    let all = Margin::of("like MI350X").unwrap();
    let pooled = Pooled::of(&tables);
    assert_eq!((all.accelerator, all.rows, all.mean), (None, pooled.rows, pooled.mean));
    assert_eq!((own.accelerator.as_deref(), own.worst), (Some("A100-SXM4-80GB"), pooled.worst));
    assert!(all.least <= own.least && own.most <= all.most);
}

/// With the constants that are shipped, which are others than those that a table is judged with.
#[test]
fn the_range_of_an_accelerator_has_every_published_step_of_it() {
    for (name, table, platform) in tables().unwrap() {
        let job = Job::new(&platform);
        let margin = Margin::of(&job.rack().accelerator.name).unwrap();
        for row in &table.row {
            let took = row.seconds() / job.predict(&row.model, &row.layout).unwrap().step.total_s;
            assert!(
                (margin.least..=margin.most).contains(&took),
                "{name}, {}: {took} of {margin:?}",
                row.name
            );
        }
    }
    // Of GB200 one table was published, whose steps are alike.
    let own = Margin::of("GB200, one of two B200").unwrap();
    assert!(own.most < 1.05 * own.least, "{own:?}");
}

/// Of every accelerator, and of one of which nothing was published: that of GB200 was half a per cent wide, beside an error of 32%.
#[test]
fn no_range_is_narrower_than_an_error_that_is_printed_beside_it() {
    let unpublished = Margin::of("like MI350X").unwrap();
    for (_, _, platform) in tables().unwrap() {
        let Margin { range: [low, high], least, most, mean_without_scalar, worst, .. } =
            Margin::of(&Job::new(&platform).rack().accelerator.name).unwrap();
        for off in [mean_without_scalar, worst] {
            assert!(low <= 1.0 - off && 1.0 / (1.0 - off) <= high, "{low} to {high}: {off}");
        }
        assert!(low <= least && most <= high, "{low} to {high}: {least} to {most}");
        let [lowest, highest] = unpublished.range;
        assert!(lowest <= low && high <= highest, "{low} to {high}: {unpublished:?}");
    }
}

#[test]
fn a_comparison_is_as_wide_as_both_ranges_and_on_one_accelerator_as_its_error() {
    let [older, newer, other] =
        ["A100-SXM4-80GB", "H100-SXM5-80GB", "none"].map(|name| Margin::of(name).unwrap());
    let [low, high] = older.times(&newer, 2.0);
    assert_eq!([low, high], [2.0 * older.range[0] / newer.range[1], 2.0 * older.range[1] / newer.range[0]]);
    let [back_low, back_high] = newer.times(&older, 0.5);
    assert!((back_low * high - 1.0).abs() < 1e-12 && (back_high * low - 1.0).abs() < 1e-12);
    let worst = Pooled::of(&validate().unwrap()).worst;
    let own = newer.times(&newer, 2.0);
    assert_eq!(own, [2.0 * (1.0 - worst), 2.0 / (1.0 - worst)]);
    assert!(low < own[0] && own[1] < high);
    // Two of which nothing was published are two.
    let second = Margin::of("neither").unwrap();
    assert_eq!(second.range, other.range);
    assert!(other.times(&second, 1.0)[1] > 2.0 * other.times(&other, 1.0)[1] / 1.2);
}

/// What the files say is what the tables give, to three digits: nobody turned it by hand.
#[test]
fn platforms_have_the_constants_that_are_fitted_to_what_was_published() {
    for name in ["dgx-a100", "dgx-h100", "nvl72"] {
        let platform = Platform::load(name).unwrap();
        let accelerator = &platform.rack.values().next().unwrap().accelerator;
        let fitted = fitted(&accelerator.name).unwrap();
        for ((constant, file), fit) in
            Fitted::NAMES.into_iter().zip(accelerator.fitted.values()).zip(fitted.values())
        {
            assert!((file / fit - 1.0).abs() < 0.005, "{name}: {constant} is {file}, the tables give {fit}");
        }
    }
}

/// The figure's memory of a host is faster than that of its platform, which is the low end.
#[test]
fn the_host_of_scalepool_is_taken_as_fast_as_its_link() {
    let figure = scalepool::Figure::load().unwrap();
    let platform = Platform::load(&figure.platform).unwrap();
    let host = &Job::new(&platform).rack().host;
    let link = host.attach.bandwidth.value();
    let memory = host.memory.read.value() / 2.0 / f64::from(host.accelerators);
    let open = figure.open.iter().find(|open| open.name == scalepool::Parameter::HostBandwidth).unwrap();
    assert_eq!((open.value, open.range), (link / 1e9, [memory / 1e9, link / 1e9]));
    assert_eq!(open.origin, polder_sim::Origin::Taken);
}

#[test]
fn the_three_numbers_of_scalepool_come_out() {
    let figure = scalepool::Figure::load().unwrap();
    let pairs = figure.predict(None).unwrap();
    for pair in &pairs {
        assert!(pair.baseline.memory.fits() && pair.scalepool.memory.fits(), "{}", pair.model);
    }
    // What was taken stands among nothing that it could be instead, and each of that moves the result.
    for instead in figure.choice.iter().flat_map(|choice| &choice.instead) {
        let moved = figure.with(instead).unwrap().predict(None).unwrap();
        assert_ne!(scalepool::summary(&moved), scalepool::summary(&pairs), "{instead:?}");
    }
    // Of each model what crosses racks is sent, not stepped: about as many times faster as the bandwidths, but for what starts it.
    let ratio = |of| figure.open.iter().find(|open| open.name == of).unwrap().value;
    let ratio = ratio(scalepool::Parameter::CxlBandwidth) / ratio(scalepool::Parameter::InfinibandBandwidth);
    for pair in &pairs {
        let by_bandwidth = pair.communication_speedup / ratio;
        assert!(
            (0.97..1.03).contains(&by_bandwidth) && pair.communication_speedup > pair.speedup,
            "{pair:?}"
        );
    }
    let (paper, ours) = (figure.paper, scalepool::summary(&pairs));
    for (name, paper, ours, tolerance) in [
        ("mean", paper.mean, ours.mean, 0.01),
        ("best", paper.best, ours.best, 0.04),
        ("communication", paper.communication, ours.communication, 0.01),
    ] {
        assert!((ours / paper - 1.0).abs() <= tolerance, "{name}: {ours} for {paper}");
    }
}
