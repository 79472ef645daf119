//! Training steps and access times beside figures 6 and 7 of ScalePool.

use polder_dev::judge::open::Origin;
use polder_dev::judge::scalepool;
use polder_dev::judge::scalepool_tiers::{Over, TierFigure};
use polder_platform::Platform;
use polder_sim::Job;
use polder_sim::memory::{Inside, NodeLatency, Nodes, Ways, ratio};

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
    assert_eq!(open.origin, Origin::Taken);
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

/// What of the figure follows from the platforms, and what does not. Nothing here is fitted: where a platform changes, this may too.
#[test]
fn of_figure_7_each_way_meets_what_it_is_printed_to_meet() {
    let report = TierFigure::load().unwrap().predict().unwrap();
    let way = |inside, nodes, node_latency| Ways { nodes, inside, node_latency, ..Ways::default() };
    let expected: [(Ways, &[f64]); 6] = [
        (way(Inside::Copy, Nodes::Near, NodeLatency::Given), &[1.4, 1.4, 4.5]),
        (way(Inside::Copy, Nodes::Far, NodeLatency::Given), &[1.4, 1.4, 1.6]),
        (way(Inside::Load, Nodes::Near, NodeLatency::Given), &[4.5, 1.6]),
        (way(Inside::Load, Nodes::Far, NodeLatency::Given), &[]),
        (way(Inside::Copy, Nodes::Near, NodeLatency::Added), &[1.4, 1.4]),
        (Ways { bulk: true, ..way(Inside::Copy, Nodes::Near, NodeLatency::Given) }, &[1.4, 1.4, 4.5]),
    ];
    assert_eq!(report.variants.len(), expected.len());
    for (variant, (ways, met)) in report.variants.iter().zip(expected) {
        assert_eq!(variant.ways, ways);
        let claims = variant.claims.iter().filter(|it| it.is_met());
        assert_eq!(claims.map(|it| it.published).collect::<Vec<_>>(), met, "{ways:?}");
        let [baseline, clusters, tiered] = &variant.configurations[..] else { panic!("three") };
        for claim in &variant.claims {
            let other = if claim.over == Over::Baseline { baseline } else { clusters };
            let [least, most] = claim.simulated;
            assert!(least <= most);
            if let Some(set) = claim.met_at_bytes {
                let there = ratio(tiered, other, 64.0, set).unwrap();
                assert!((there / claim.published - 1.0).abs() < 1e-9, "{claim:?}");
                assert!((least..=most).contains(&claim.published), "{claim:?}");
            }
            assert_eq!((claim.map.len(), claim.map[0].len()), (8, claim.sets_bytes.len()));
        }
        // No memory node can meet both at one working set.
        let part = variant.clusters_over_baseline;
        assert!((part.needed - 4.5 / 1.6).abs() < 1e-12 && part.most < part.needed, "{part:?}");
    }
}
