//! How far tables of the Vistara paper are made again. The bars are those of docs/plan-tier.md.

use polder_dev::judge::vistara::{KNEE_BANDWIDTH, KNEE_LATENCY, KneeBeside, KneeFigure, KneePoint, errors};
use polder_dev::judge::vistara_ratio::RatioFigure;
use polder_dev::judge::vistara_services::{gains, telemetry};
use polder_dev::judge::vistara_tier::traffic;
use polder_sim::pages::vistara_services::ServicesFigure;

#[test]
fn table_10_follows_from_hot_parts_and_capacities() {
    let figure = KneeFigure::load().unwrap();
    let report = figure.beside().unwrap();
    let judged: Vec<&KneeBeside> = report.rows.iter().filter(|knee| !knee.row.fitted).collect();
    assert_eq!((report.rows.len(), judged.len()), (8, 7));
    let worst = |at: usize, of: fn(&KneeBeside) -> KneePoint| {
        judged.iter().map(|knee| errors(&knee.row, &of(knee))[at].abs()).fold(0.0, f64::max)
    };
    let simulated = [0, 2].map(|at| worst(at, |knee| knee.simulated));
    let by_capacity = [0, 2].map(|at| worst(at, |knee| knee.by_capacity));
    assert!(simulated[0] <= KNEE_LATENCY && simulated[1] <= KNEE_BANDWIDTH, "{simulated:?}: {judged:#?}");
    assert!(by_capacity[1] > KNEE_BANDWIDTH, "the baseline falls short: {by_capacity:?}");
    // The same again, to the last bit.
    assert_eq!(figure.beside().unwrap(), report);
}

#[test]
fn losses_by_ratio_are_under_one_per_cent_until_half_of_the_memory_is_slow() {
    let report = RatioFigure::load().unwrap().beside().unwrap();
    assert!(report.below_until_1_1 && report.preprocessing_is_worse, "{report:#?}");
    assert!(report.steered_loss < 0.01, "{report:#?}");
}

#[test]
fn gains_by_capacity_are_those_that_docs_say() {
    let gains = gains(&ServicesFigure::load().unwrap());
    let off: Vec<_> = gains.iter().map(|it| (it.gain.service.as_str(), it.off_points())).collect();
    let short: Vec<_> = off.iter().filter(|(_, off)| off.abs() > 5.0).map(|(name, _)| *name).collect();
    assert_eq!(short, ["CacheB", "CI", "MRS"], "{off:?}");
}

#[test]
fn idle_times_of_table_1_and_traffic_of_table_8_cannot_be_of_one_service() {
    for row in telemetry(&ServicesFigure::load().unwrap()) {
        let Some(simulated) = row.simulated else { continue };
        assert!(simulated.cxl_bytes_per_s < row.row.cxl.value() / 10.0, "{row:#?}");
        assert!(simulated.published_turn_s < simulated.least_idle_s / 10.0, "{row:#?}");
    }
}

#[test]
fn what_cachea_draws_of_cxl_memory_lies_within_what_stays_and_hits_say() {
    let rows = telemetry(&ServicesFigure::load().unwrap());
    let [known, other] =
        ["CacheA", "CacheB"].map(|name| rows.iter().find(|it| it.row.service == name).unwrap());
    assert_eq!((known.is_within_turnover(), other.is_within_turnover()), (Some(true), None));
    let [least, most] = known.by_turnover.unwrap();
    // As much as can be said: a bound from below that Table I is far under, and one that the device itself has.
    let by_idle = known.simulated.unwrap().cxl_bytes_per_s;
    assert!(least > 10.0 * by_idle && most > least, "{least} {most} {by_idle}");
}

#[test]
fn slow_traffic_by_table_8_meets_section_v_g_where_idle_times_are_far_below() {
    let report = traffic().unwrap();
    assert_eq!((report.powers.len(), report.rows.len()), (7, 5));
    for row in &report.rows {
        assert!(row.is_met() && row.is_within(), "{row:#?}");
        assert!(row.by_idle.is_none_or(|bound| bound < row.published[0] / 10.0), "{row:#?}");
    }
}
