//! Access times by working set: what they are made of, how they grow, and what of Figure 7 of ScalePool follows.

use polder_platform::{Folder, Platform, names};
use polder_sim::Fidelity;
use polder_sim::contention::FlitOptions;
use polder_sim::memory::{
    Caching, CoherentRack, Configuration, How, Inference, InferenceKind, InferenceQuestion, InferenceRow,
    Inside, LINE, MemoryError, NodeLatency, Nodes, Question, RegionQuestion, Ways, configurations, curves,
    landmarks, pays_from, ratio,
};

fn question(platform: &str, against: Option<&str>, ways: Ways) -> Question {
    Question {
        platform: platform.into(),
        against: against.map(Into::into),
        rack: None,
        accelerators: None,
        ways,
    }
}

fn ways() -> Vec<Ways> {
    let all = [Inside::Copy, Inside::Load].into_iter().flat_map(|inside| {
        [Nodes::Near, Nodes::Far].into_iter().flat_map(move |nodes| {
            [NodeLatency::Given, NodeLatency::Added].map(|node_latency| Ways {
                nodes,
                inside,
                node_latency,
                bulk: nodes == Nodes::Near,
                ..Ways::default()
            })
        })
    });
    all.collect()
}

/// The configurations of every platform that has some, in every way.
fn all() -> Vec<Configuration> {
    let mut every = vec![];
    for name in names(Folder::Platforms) {
        for ways in ways() {
            let Ok((_, configurations)) = configurations(&question(name, None, ways)) else { continue };
            every.extend(configurations);
        }
    }
    assert!(every.len() > 80, "{}", every.len());
    every
}

const SIZES: [f64; 5] = [1.0, 64.0, 4096.0, 1e5, 1e7];

#[test]
fn a_larger_working_set_or_access_takes_no_less_time_where_memories_are_taken_fastest_first() {
    let mut ordered = 0;
    for configuration in all() {
        for bytes in SIZES {
            let times: Vec<_> = configuration.tiers.iter().map(|tier| tier.access.seconds(bytes)).collect();
            let sets = landmarks(std::slice::from_ref(&configuration));
            let means: Vec<_> = sets.iter().map(|set| configuration.seconds(bytes, *set).unwrap()).collect();
            if times.is_sorted() {
                ordered += 1;
                let grows = means.windows(2).all(|pair| pair[1] >= pair[0] * (1.0 - 1e-12));
                assert!(grows, "{} {} {bytes}: {means:?}", configuration.platform, configuration.name);
            }
            // Whatever the order, no mean is outside of its memories' times.
            let least = times.iter().copied().fold(f64::INFINITY, f64::min) * (1.0 - 1e-12);
            let most = times.iter().copied().fold(0.0, f64::max) * (1.0 + 1e-12);
            assert!(means.iter().all(|mean| (least..=most).contains(mean)), "{means:?}");
            let larger = sets.iter().map(|set| configuration.seconds(bytes * 2.0, *set).unwrap());
            assert!(means.iter().zip(larger).all(|(mean, larger)| *mean <= larger));
        }
    }
    assert!(ordered > 100, "{ordered}");
}

#[test]
fn a_configuration_holds_its_capacity_and_no_byte_more() {
    for configuration in all() {
        let whole: f64 = configuration.tiers.iter().map(|tier| tier.capacity_bytes).sum();
        assert!(configuration.seconds(64.0, whole).is_some());
        assert_eq!(configuration.seconds(64.0, whole * 1.001), None);
        let own = &configuration.tiers[0];
        assert_eq!(own.access.how, How::Own);
        let inside = configuration.seconds(64.0, own.capacity_bytes / 2.0).unwrap();
        assert!((inside / own.access.seconds(64.0) - 1.0).abs() < 1e-12);
    }
}

#[test]
fn memories_are_as_large_as_so_many_accelerators_make_them() {
    let of = |accelerators| {
        let question = Question {
            accelerators: Some(accelerators),
            ..question("nvl72-cxl", Some("nvl72-ndr"), Ways::default())
        };
        let (count, all) = configurations(&question).unwrap();
        assert_eq!(count, accelerators);
        all.iter()
            .map(|configuration| {
                configuration.tiers.iter().map(|tier| (tier.name, tier.capacity_bytes / 1e9)).collect()
            })
            .collect()
    };
    let tiers: [Vec<_>; 3] = <Vec<_> as TryInto<_>>::try_into(of(144)).unwrap();
    let alone = [("own", 186.0), ("rack", 71.0 * 186.0), ("racks", 72.0 * 186.0)];
    assert_eq!(tiers[0], alone);
    assert_eq!(tiers[1], alone);
    assert_eq!(tiers[2], [("own", 186.0), ("rack", 71.0 * 186.0), ("pool", 144.0 * 500.0)]);
    // Part of a rack, and one accelerator.
    let part: Vec<Vec<_>> = of(8);
    assert_eq!(part[0], [("own", 186.0), ("rack", 7.0 * 186.0)]);
    assert_eq!(of(1)[2], [("own", 186.0), ("pool", 500.0)]);
}

#[test]
fn an_access_is_the_sum_of_what_its_way_has() {
    let far = Ways::default();
    let (_, all) = configurations(&question("nvl72-cxl", Some("nvl72-ndr"), far)).unwrap();
    let [baseline, clusters, tiered] = &all[..] else { panic!("{all:?}") };
    let ns = |it: &Configuration, tier: usize| (it.tiers[tier].access.idle() * 1e9).round();
    // Two ways of 5 switches and 6 wires; software where it copies, controllers where hardware loads.
    assert_eq!(ns(baseline, 2), 2000.0 + 2.0 * (5.0 * 130.0 + 6.0 * 25.0) + 400.0);
    assert_eq!(ns(clusters, 2), 120.0 + 2.0 * (5.0 * 150.0 + 6.0 * 25.0) + 400.0);
    assert_eq!(ns(clusters, 1), 1000.0 + 2.0 * (100.0 + 2.0 * 10.0) + 400.0);
    assert_eq!(ns(tiered, 1), 120.0 + 2.0 * (150.0 + 2.0 * 10.0) + 400.0);
    assert_eq!(ns(tiered, 2), 2.0 * (5.0 * 150.0 + 6.0 * 25.0) + 250.0);
    let near = Ways {
        nodes: Nodes::Near,
        node_latency: NodeLatency::Added,
        inside: Inside::Load,
        bulk: false,
        ..Ways::default()
    };
    let (_, all) = configurations(&question("nvl72-cxl", None, near)).unwrap();
    // One switch and two wires; 100 ns that a node adds to a Grace's own 150, and the accelerator's own 400.
    assert_eq!(ns(&all[1], 2), 2.0 * (150.0 + 2.0 * 25.0) + 100.0 + 400.0);
    assert_eq!(ns(&all[0], 1), 2.0 * (100.0 + 2.0 * 10.0) + 400.0);
    // Bulk: asked for over CXL, got over NVLink at its rate.
    let bulk = Ways { bulk: true, ..Ways::default() };
    let (_, all) = configurations(&question("nvl72-cxl", None, bulk)).unwrap();
    assert_eq!(ns(&all[1], 1), 120.0 + (150.0 + 2.0 * 10.0) + (100.0 + 2.0 * 10.0) + 400.0);
    assert_eq!(all[1].tiers[1].access.bytes_per_s, baseline.tiers[1].access.bytes_per_s);
    assert_eq!(all[0].tiers, clusters.tiers, "what is not coherent is as it was");
    // Loads move whole lines, copies bytes.
    let [copied, loaded] = [&baseline.tiers[2].access, &tiered.tiers[2].access];
    assert_eq!(loaded.seconds(1.0), loaded.seconds(LINE));
    assert!(copied.seconds(1.0) < copied.seconds(LINE));
    // Half the accelerators of a node get what it has, up to their link.
    assert_eq!(loaded.bytes_per_s, 800e9 / 8.0);
}

#[test]
fn a_slower_part_of_the_way_makes_that_memory_slower_by_as_much() {
    let (_, before) = configurations(&question("nvl72-cxl", None, Ways::default())).unwrap();
    let path = std::env::temp_dir().join(format!("polder-memory-{}.toml", std::process::id()));
    std::fs::write(&path, "extends = \"nvl72-cxl\"\n[between.switch]\nlatency = \"160 ns\"\n").unwrap();
    let after = configurations(&question(path.to_str().unwrap(), None, Ways::default()));
    std::fs::remove_file(&path).unwrap();
    let (_, after) = after.unwrap();
    for (before, after) in before.iter().zip(&after) {
        for (one, other) in before.tiers.iter().zip(&after.tiers) {
            let switches = if one.name == "racks" || one.name == "pool" { 5.0 } else { 0.0 };
            let longer = (other.access.seconds(64.0) - one.access.seconds(64.0)) * 1e9;
            assert!((longer - 2.0 * switches * 10.0).abs() < 1e-6, "{}: {longer}", one.name);
        }
    }
}

#[test]
fn a_memory_pays_from_where_an_access_is_faster_by_a_twentieth() {
    let (_, all) = configurations(&question("nvl72-cxl", Some("nvl72-ndr"), Ways::default())).unwrap();
    let [baseline, _, tiered] = &all[..] else { panic!("{all:?}") };
    let from = pays_from(tiered, 1, baseline, 64.0).unwrap();
    assert!((ratio(tiered, baseline, 64.0, from).unwrap() - 1.05).abs() < 1e-9);
    let own = tiered.tiers[0].capacity_bytes;
    assert!(from > own && from < 1.1 * own, "{from}");
    // In large pieces NVLink is faster, and CXL inside a rack never pays.
    assert_eq!(pays_from(tiered, 1, baseline, 1e6), None);
    let curves =
        curves(&question("nvl72-cxl", Some("nvl72-ndr"), Ways::default()), &[64.0, 1e6], &[]).unwrap();
    assert_eq!(curves.pays.len(), 2 * 2 * 2);
    assert!(curves.points.len() > 100 && curves.points.iter().any(|point| point.seconds.contains(&None)));
}

#[test]
fn what_has_no_accelerators_or_too_few_ports_is_refused_with_the_file_and_the_key() {
    let refused = |platform: &str, accelerators| {
        let question = Question { accelerators, ..question(platform, None, Ways::default()) };
        configurations(&question).unwrap_err().to_string()
    };
    assert_eq!(
        refused("cmpi", None),
        "cmpi: rack: expected a kind of rack, whose accelerators access memory"
    );
    assert_eq!(refused("dgx-a100", Some(0)), "dgx-a100: a count of accelerators is 0; it is at least 1");
    let ports = refused("nvl72-cxl", Some(1_000_000));
    assert!(ports.starts_with("nvl72-cxl: 1,000,000 accelerators need "), "{ports}");
    let lone = refused("nvl72", Some(73));
    assert!(lone.starts_with("nvl72: ") && lone.contains("a fabric between racks"), "{lone}");
    assert!(refused("no-such", None).starts_with("no-such: no platform of this name"));
}

#[test]
fn the_memory_of_a_cpu_is_loaded_over_c2c_and_copied_over_pcie() {
    let ask = |rack: &str| {
        let question = Question {
            platform: "mixed-nvlink-ualink-cxl".into(),
            against: None,
            rack: Some(rack.into()),
            accelerators: None,
            ways: Ways { host: true, ..Ways::default() },
        };
        let (_, found) = configurations(&question).unwrap();
        found.last().unwrap().tiers.iter().find(|tier| tier.name == "host").unwrap().clone()
    };
    let [near, far] = ["nvl72", "ualink"].map(ask);
    assert_eq!((near.access.how, near.access.software_s), (How::Load, 0.0));
    assert_eq!((far.access.how, far.access.software_s), (How::Copy, 1e-6));
    assert!(near.access.seconds(64.0) < far.access.seconds(64.0));
}

fn cached(caching: Caching, platform: &str) -> Result<Vec<Configuration>, MemoryError> {
    let ways = Ways { caching: Some(caching), ..Ways::default() };
    configurations(&question(platform, None, ways)).map(|(_, found)| found)
}

const CACHING: Caching = Caching { cache_bytes: 64e6, snoop_filter_bytes: 8e9, skew: 0.9 };

/// The part of a working set that lies in the rack is a region of `plan coherence` that nobody writes.
#[test]
fn what_a_rack_caches_hits_as_often_as_its_region_does() {
    let tiered = cached(CACHING, "nvl72-cxl").unwrap().pop().unwrap();
    let plain = configurations(&question("nvl72-cxl", None, Ways::default())).unwrap().1.pop().unwrap();
    let own = tiered.tiers[0].capacity_bytes;
    let rack = CoherentRack::new("nvl72-cxl", None).unwrap();
    for region_bytes in [1e9, 1e12] {
        let Caching { cache_bytes, snoop_filter_bytes, skew } = CACHING;
        let asked = RegionQuestion { region_bytes, cache_bytes, snoop_filter_bytes, writes: 0.0, skew };
        let region = rack.region(&asked).unwrap();
        let set = own + region_bytes;
        let expected = (own * tiered.tiers[0].access.seconds(64.0) + region_bytes * region.coherent_s) / set;
        let found = tiered.seconds(64.0, set).unwrap();
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
        assert!(found < plain.seconds(64.0, set).unwrap());
        let hits = tiered.hits(64.0, set).unwrap();
        assert!((hits / (region.rates.hits * region_bytes / set) - 1.0).abs() < 1e-9 && hits > 0.0, "{hits}");
    }
    assert_eq!(tiered.seconds(64.0, own), plain.seconds(64.0, own), "own memory is cached nowhere else");
    assert_eq!(plain.hits(64.0, 2.0 * own), Some(0.0));
    let [small, large] = [64e6, 1e9].map(|cache_bytes| {
        cached(Caching { cache_bytes, snoop_filter_bytes: 1e12, ..CACHING }, "nvl72-cxl")
            .unwrap()
            .pop()
            .unwrap()
    });
    assert!(large.seconds(64.0, 20e12) < small.seconds(64.0, 20e12), "and so do loads of memory nodes");
    for (caching, platform, expected) in [
        (CACHING, "nvl72-ndr", "cache: expected memory that is loaded over CXL"),
        (
            Caching { cache_bytes: 1e12, ..CACHING },
            "nvl72-cxl",
            "cache: expected 64 B to 186 GB, an accelerator's own memory",
        ),
        (Caching { skew: 5.0, ..CACHING }, "nvl72-cxl", "skew: expected a number from 0 to 4, found 5"),
    ] {
        let refusal = cached(caching, platform).unwrap_err().to_string();
        assert!(refusal.starts_with(expected), "{refusal}");
    }
}

/// Where hits bend the line of access times, a memory pays from where it does, to a part in a hundred.
#[test]
fn a_memory_pays_where_an_access_with_its_hits_is_faster_by_a_twentieth() {
    let ways = Ways { caching: Some(CACHING), ..Ways::default() };
    let found = configurations(&question("nvl72-cxl", Some("nvl72-ndr"), ways)).unwrap().1;
    let [baseline, tiered] = [&found[0], found.last().unwrap()];
    let from = pays_from(tiered, 1, baseline, 64.0).unwrap();
    let own = tiered.tiers[0].capacity_bytes;
    assert!(from > own && from < 1.05 * own, "{from}");
    let ratio = ratio(tiered, baseline, 64.0, 1.02 * from).unwrap();
    assert!(ratio > 1.05, "{ratio}");
}

#[test]
fn rows_of_a_table_that_are_popular_are_read_from_caches() {
    let step = |caching, load| {
        let question = InferenceQuestion {
            machines: question("nvl72-cxl", None, Ways { caching, ..Ways::default() }),
            serving: None,
            load,
            model: None,
            sequence: None,
            fidelity: Fidelity::L0,
            flits: FlitOptions::default(),
        };
        let inference = Inference::new(&question)?;
        let row = InferenceRow {
            sequences: 4096,
            context: None,
            set_bytes: None,
            access_bytes: None,
            outstanding: None,
            visits: None,
        };
        Ok::<_, MemoryError>(inference.steps(&[inference.load(&row)?])?[0].last().unwrap().clone().unwrap())
    };
    let [plain, cached] =
        [None, Some(CACHING)].map(|caching| step(caching, InferenceKind::Embedding).unwrap());
    let tier = cached.tiers.last().unwrap();
    assert!(cached.seconds < plain.seconds && tier.hits > 0.05 && tier.hits < 1.0, "{cached:?}");
    assert_eq!((cached.tiers[0].hits, plain.tiers.last().unwrap().hits), (0.0, 0.0));
    let parts: f64 = cached.tiers.iter().map(|tier| tier.seconds).sum();
    assert!((cached.seconds / parts - 1.0).abs() < 1e-12);
    let refusal = step(Some(CACHING), InferenceKind::Kv).unwrap_err().to_string();
    assert_eq!(refusal, "cache: a step of load kv does not read it; leave it out");
}

/// Without CXL.mem software copies what lies in memory nodes, and storage always.
#[test]
fn memory_nodes_over_io_and_storage_are_copied() {
    let path = std::env::temp_dir().join(format!("polder-io-{}.toml", std::process::id()));
    let text = "extends = \"nvl72-cxl\"\ntitle = \"io\"\nsource = \"made up\"\n[between]\ncarries = [\"io\"]\n[storage]\naccelerators = 8\nports = 1\n\
                memory = { capacity = \"100 TB\", read = \"20 GB/s\", write = \"10 GB/s\", latency = \"80 us\" }\n";
    std::fs::write(&path, text).unwrap();
    let found = configurations(&question(path.to_str().unwrap(), None, Ways::default())).unwrap().1;
    std::fs::remove_file(&path).unwrap();
    let tiered = found.last().unwrap();
    let of = |name| tiered.tiers.iter().find(|tier| tier.name == name).unwrap();
    let loaded = configurations(&question("nvl72-cxl", None, Ways::default())).unwrap().1.pop().unwrap();
    let software = Platform::load("nvl72-cxl").unwrap().between.unwrap().software.message.value();
    let pool = loaded.tiers.iter().find(|tier| tier.name == "pool").unwrap();
    assert_eq!(
        (pool.access.how, of("pool").access.how, of("storage").access.how),
        (How::Load, How::Copy, How::Copy)
    );
    assert!((of("pool").access.seconds(64.0) - pool.access.seconds(64.0) - software).abs() < 1e-15);
    assert!(pool.is_cached && !of("pool").is_cached && !of("storage").is_cached);
    assert_eq!(tiered.tiers.last().unwrap().name, "storage", "it comes last");
    // 1,152 accelerators, eight to 100 TB that eight read at once.
    assert!((of("storage").capacity_bytes / 14.4e15 - 1.0).abs() < 1e-9);
    assert_eq!(of("storage").access.bytes_per_s, 2.5e9);
    assert!(of("storage").access.seconds(4096.0) > 80e-6);
}
