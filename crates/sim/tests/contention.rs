//! Flows that share links, against sharing that is computed step by step; and patterns on fabrics.

use polder_platform::{Fabric, Platform, Topology};
use polder_sim::contention::{
    FabricError, FabricQuestion, FlitOptions, Flow, Network, NetworkError, Node, Routing, TrafficPattern,
    TransferError, Transfers, answer, finish_times,
};
use polder_sim::{Fidelity, Random};

/// Rates of these flows by progressive filling, all of them anew.
fn rates(capacities: &[f64], flows: &[Flow], under_way: &[usize]) -> Vec<f64> {
    let mut rates = vec![0.0; flows.len()];
    let mut spare = capacities.to_vec();
    let mut open = under_way.to_vec();
    while !open.is_empty() {
        let crossing =
            |link: u32| open.iter().filter(|flow| flows[**flow].links.contains(&link)).count() as f64;
        let used: Vec<u32> = open.iter().flat_map(|flow| flows[*flow].links.clone()).collect();
        let more =
            used.iter().map(|link| spare[*link as usize] / crossing(*link)).fold(f64::INFINITY, f64::min);
        for flow in &open {
            rates[*flow] += more;
            flows[*flow].links.iter().for_each(|link| spare[*link as usize] -= more);
        }
        open.retain(|flow| {
            flows[*flow].links.iter().all(|link| spare[*link as usize] > 1e-9 * capacities[*link as usize])
        });
    }
    rates
}

/// When flows end, where every start and every end shares all flows anew.
fn slowly(capacities: &[f64], flows: &[Flow]) -> Vec<f64> {
    let mut left: Vec<_> = flows.iter().map(|flow| flow.bytes).collect();
    let mut ends = vec![f64::NAN; flows.len()];
    let mut now = 0.0;
    loop {
        let waits = |flow: &usize| ends[*flow].is_nan() && flows[*flow].start_s > now;
        let start =
            (0..flows.len()).filter(waits).map(|flow| flows[flow].start_s).fold(f64::INFINITY, f64::min);
        let under_way: Vec<_> =
            (0..flows.len()).filter(|flow| ends[*flow].is_nan() && flows[*flow].start_s <= now).collect();
        if under_way.is_empty() && start.is_infinite() {
            return ends;
        }
        let rates = rates(capacities, flows, &under_way);
        let end = under_way.iter().map(|flow| now + left[*flow] / rates[*flow]).fold(f64::INFINITY, f64::min);
        let next = start.min(end);
        for flow in under_way {
            left[flow] -= rates[flow] * (next - now);
            if left[flow] <= 1e-9 * flows[flow].bytes {
                ends[flow] = next;
            }
        }
        now = next;
    }
}

#[test]
fn every_flow_ends_when_sharing_anew_at_each_start_and_end_says() {
    let mut compared = 0;
    for seed in 0..2000 {
        let mut random = Random::new(seed);
        let links = 2 + random.below(12);
        let wide = random.below(2) == 0;
        // The links between those that flows cross carry nothing.
        let every = 1 + 20 * random.below(2);
        let mut capacities = vec![0.0; (links * every) as usize];
        for link in capacities.iter_mut().step_by(every as usize) {
            *link = if wide { 1.0 } else { 0.25 + random.unit() };
        }
        let (same_size, same_start) = (random.below(2) == 0, random.below(2) == 0);
        let flows: Vec<_> = (0..1 + random.below(24))
            .map(|_| {
                let mut crossed: Vec<_> =
                    (0..1 + random.below(4)).map(|_| every * random.below(links)).collect();
                crossed.sort_unstable();
                crossed.dedup();
                Flow {
                    links: crossed,
                    bytes: if same_size { 1.0 } else { 0.1 + random.unit() },
                    start_s: if same_start { 0.5 } else { 4.0 * random.unit() },
                }
            })
            .collect();
        let (found, expected) = (finish_times(&capacities, &flows), slowly(&capacities, &flows));
        for (one, other) in found.iter().zip(&expected) {
            assert!((one / other - 1.0).abs() < 1e-7, "seed {seed}: {found:?}, not {expected:?}: {flows:?}");
            compared += 1;
        }
    }
    assert!(compared > 15_000, "{compared}");
}

#[test]
fn flows_that_are_alike_share_one_link_unevenly_where_another_link_binds_one() {
    let flow = |links: &[u32]| Flow { links: links.to_vec(), bytes: 9.0, start_s: 1.0 };
    let ends = finish_times(&[10.0, 1.0], &[flow(&[0]), flow(&[0, 1])]);
    assert_eq!(ends, [2.0, 10.0]);
}

#[test]
fn the_order_of_flows_changes_no_end() {
    let mut random = Random::new(7);
    let capacities = [1.0; 40];
    let mut flows: Vec<_> = (0..300)
        .map(|_| {
            let first = random.below(40);
            let links = vec![first, (first + 1 + random.below(39)) % 40];
            Flow { links, bytes: 0.1 + random.unit(), start_s: random.unit() }
        })
        .collect();
    let forward = finish_times(&capacities, &flows);
    flows.reverse();
    let mut backward = finish_times(&capacities, &flows);
    backward.reverse();
    for (one, other) in forward.iter().zip(backward) {
        assert!((one / other - 1.0).abs() < 1e-9, "{one} {other}");
    }
}

fn fabric(topology: Topology, ports: u32) -> Fabric {
    let mut fabric = Platform::load("nvl72-ndr").unwrap().between.unwrap();
    (fabric.topology, fabric.switch.ports, fabric.links) = (topology, ports, 1);
    fabric
}

fn fabrics() -> [Fabric; 5] {
    [
        fabric(Topology::SingleHop, 64),
        fabric(Topology::Clos { levels: 2 }, 8),
        fabric(Topology::Clos { levels: 3 }, 4),
        fabric(Topology::Torus { dimensions: [4, 3, 2], endpoints: 2 }, 16),
        fabric(Topology::Dragonfly { endpoints: 2, group: 4, global: 2 }, 16),
    ]
}

#[test]
fn a_route_joins_its_ports_by_as_many_links_as_the_shortest_way_has() {
    for fabric in fabrics() {
        let ports = fabric.ports() as u32;
        let graph = fabric.topology.graph(fabric.switch.ports);
        let mut network = Network::new(&fabric, ports).unwrap();
        for routing in [Routing::Minimal, Routing::Adaptive] {
            for from in 0..ports {
                for to in (0..ports).filter(|to| *to != from) {
                    let links = network.route(from, to, routing).unwrap();
                    let ends: Vec<_> = links.iter().map(|link| network.ends(*link)).collect();
                    assert_eq!((ends[0].0, ends[ends.len() - 1].1), (Node::Port(from), Node::Port(to)));
                    assert!(ends.windows(2).all(|pair| pair[0].1 == pair[1].0), "{ends:?}");
                    let (Node::Switch(first), Node::Switch(last)) = (ends[0].1, ends[ends.len() - 1].0)
                    else {
                        panic!("{ends:?}");
                    };
                    let shortest = graph.distances(first as usize)[last as usize].unwrap();
                    assert_eq!(links.len() as u32, shortest + 2, "{:?} {from} {to}", fabric.topology);
                }
            }
        }
    }
}

#[test]
fn the_destination_selects_the_way_so_that_a_shift_of_a_clos_contends_nowhere() {
    let fabric = fabric(Topology::Clos { levels: 3 }, 8);
    let ports = fabric.ports() as u32;
    for shift in [1, 4, 16, ports / 2] {
        let mut network = Network::new(&fabric, ports).unwrap();
        for from in 0..ports {
            network.route(from, (from + shift) % ports, Routing::Minimal).unwrap();
        }
        assert!((0..network.len() as u32).all(|link| network.crossings(link) <= 1), "{shift}");
    }
}

#[test]
fn no_flow_takes_a_failed_link_and_a_cut_is_named() {
    let fabric = fabric(Topology::Clos { levels: 2 }, 8);
    let ports = fabric.ports() as u32;
    let mut network = Network::new(&fabric, ports).unwrap();
    let neighbours = fabric.topology.graph(8).links[0].clone();
    let cut = |network: &mut Network| network.route(0, ports - 1, Routing::Minimal);
    for (failed, spine) in neighbours.iter().enumerate() {
        assert!(cut(&mut network).is_ok(), "{failed} links failed");
        network.fail(0, *spine as u32).unwrap();
        for to in 0..4 {
            let Ok(links) = network.route(20, to, Routing::Adaptive) else { continue };
            assert!(links.iter().all(|link| !network.has_failed(*link)));
        }
    }
    let error = cut(&mut network).unwrap_err();
    assert_eq!(error, NetworkError::NoWay { from: 0, to: ports - 1 });
    let error = network.fail(0, 1).unwrap_err().to_string();
    assert!(error.starts_with("no link joins switch 0 and switch 1; switch 0's neighbours are "), "{error}");
    assert!(matches!(network.fail(99, 0), Err(NetworkError::NoSwitch { switch: 99, switches: 12 })));
}

fn question(pattern: TrafficPattern, accelerators: u32) -> FabricQuestion {
    FabricQuestion {
        platform: "nvl72-ndr".into(),
        rack: None,
        accelerators,
        pattern,
        message_bytes: 1e9,
        routing: Routing::Minimal,
        failed: vec![],
        seed: 1,
        fidelity: Fidelity::L1,
        flits: FlitOptions::default(),
    }
}

/// What is followed of a long message: enough for a steady rate.
fn windowed(fidelity: Fidelity, bytes: f64) -> FlitOptions {
    let window_bytes = (fidelity == Fidelity::L2 && bytes > WINDOW).then_some(WINDOW);
    FlitOptions { window_bytes, ..FlitOptions::default() }
}

const WINDOW: f64 = 1048576.0;

/// The last end of a pattern by each fidelity.
fn ends(base: &FabricQuestion, bytes: f64) -> [f64; 3] {
    [Fidelity::L0, Fidelity::L1, Fidelity::L2].map(|fidelity| {
        let flits = windowed(fidelity, bytes);
        answer(&FabricQuestion { message_bytes: bytes, fidelity, flits, ..base.clone() })
            .unwrap()
            .seconds
            .max_s
    })
}

/// Parity: 64 B to 1 GiB, inside racks and between them, where each sends to the next and nothing contends.
#[test]
fn without_contention_all_fidelities_agree() {
    let mut compared = 0;
    for (platform, accelerators) in [
        ("nvl72-ndr", 8),
        ("nvl72-ndr", 96),
        ("nvl72-cxl", 8),
        ("nvl72-cxl", 96),
        ("dgx-h100", 8),
        ("dgx-a100", 32),
    ] {
        let base =
            FabricQuestion { platform: platform.into(), ..question(TrafficPattern::Ring, accelerators) };
        for bytes in [6, 10, 14, 18, 22, 26, 30].map(|power| f64::from(1u32 << power)) {
            let [alone, flows, flits] = ends(&base, bytes);
            for other in [flows, flits] {
                let apart = other / alone - 1.0;
                assert!(apart.abs() < 0.02, "{platform} {accelerators} {bytes}: {alone} {flows} {flits}");
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 6 * 7);
}

#[test]
fn on_one_shared_link_flows_and_flits_end_alike() {
    for (platform, accelerators) in [("nvl72-ndr", 3), ("nvl72-ndr", 80), ("nvl72-cxl", 9), ("nvl72-cxl", 80)]
    {
        let base =
            FabricQuestion { platform: platform.into(), ..question(TrafficPattern::Incast, accelerators) };
        for bytes in [16, 18, 20].map(|power| f64::from(1u32 << power)) {
            let [_, flows, flits] = ends(&base, bytes);
            assert!((flits / flows - 1.0).abs() < 0.05, "{platform} {accelerators} {bytes}: {flows} {flits}");
        }
    }
}

/// A window of 2 MiB of each rank's 16 MiB; and what is too long for flits offers one.
#[test]
fn a_window_ends_as_the_whole_does() {
    let base = FabricQuestion {
        fidelity: Fidelity::L2,
        message_bytes: 16.0 * 1048576.0,
        platform: "nvl72-cxl".into(),
        ..question(TrafficPattern::AllReduce, 72)
    };
    let whole = answer(&base).unwrap();
    let flits = FlitOptions { window_bytes: Some(65536.0), ..FlitOptions::default() };
    let cut = answer(&FabricQuestion { flits, ..base.clone() }).unwrap();
    assert!((cut.total_s / whole.total_s - 1.0).abs() < 0.02, "{} {}", cut.total_s, whole.total_s);
    let [cut, whole] = [cut, whole].map(|it| it.flits.unwrap().flit_hops);
    assert!(cut < whole / 2, "{cut} {whole}");
    let error = answer(&FabricQuestion { message_bytes: 1e13, ..base }).unwrap_err();
    assert!(
        matches!(error, FabricError::Transfers { error: TransferError::TooManyFlits { .. }, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("; give --window ") && error.to_string().ends_with("or fidelity L1"));
}

#[test]
fn what_flits_cannot_hold_is_refused() {
    let flits = |fidelity| FabricQuestion { fidelity, ..question(TrafficPattern::Ring, 8) };
    let window = FlitOptions { window_bytes: Some(1048576.0), ..FlitOptions::default() };
    let long = FabricQuestion { message_bytes: 1e30, flits: window, ..flits(Fidelity::L2) };
    let error = answer(&long).unwrap_err().to_string();
    assert!(error.contains("message: expected 9e15 flits on a link or fewer, or fidelity L1"), "{error}");
    let far = fabric(Topology::Torus { dimensions: [600, 1, 1], endpoints: 2 }, 16);
    let slow = {
        let mut slow = fabric(Topology::SingleHop, 64);
        slow.link.propagation = polder_platform::Time::new(20_000.0);
        slow
    };
    let times = |fabric: &Fabric, to: u32, channels: Option<u32>| {
        let flits = FlitOptions { channels, ..FlitOptions::default() };
        let transfers = Transfers {
            fabric,
            reached: 1.0,
            bytes: 4096.0,
            step_s: 0.0,
            routing: Routing::Minimal,
            seed: 1,
            fidelity: Fidelity::L2,
            flits,
        };
        transfers.times(&mut Network::new(fabric, to + 1).unwrap(), &[(0, to)])
    };
    let error = times(&far, 600, None).unwrap_err();
    assert_eq!(error, TransferError::TooManyChannels { needs: 300, most: 255 });
    assert_eq!(times(&far, 600, Some(255)).unwrap().flits.unwrap().channels, 255);
    let error = times(&slow, 1, None).unwrap_err().to_string();
    assert!(error.ends_with("expected 1000 s or less, or fidelity L1, found 20000 s"), "{error}");
}

/// In closed form nothing is said of links, because each message has them to itself.
#[test]
fn links_have_a_use_where_messages_share_them() {
    for (fidelity, is_known) in [(Fidelity::L0, false), (Fidelity::L1, true), (Fidelity::L2, true)] {
        let asked =
            FabricQuestion { message_bytes: 65536.0, fidelity, ..question(TrafficPattern::Incast, 80) };
        let found = answer(&asked).unwrap();
        assert!(!found.links.is_empty() && found.links.iter().all(|it| it.used.is_some() == is_known));
        let between = found.mean_used_between_switches.is_some();
        assert_eq!((between, found.bytes_per_s.is_some()), (is_known, is_known), "{fidelity:?}");
    }
}

#[test]
fn damage_slows_flits() {
    let base = FabricQuestion {
        fidelity: Fidelity::L2,
        message_bytes: 262144.0,
        ..question(TrafficPattern::Shift, 128)
    };
    let damaged = FlitOptions { error_rate: 0.02, ..FlitOptions::default() };
    let [whole, damaged] = [FlitOptions::default(), damaged]
        .map(|flits| answer(&FabricQuestion { flits, ..base.clone() }).unwrap());
    assert_eq!(whole.flits.unwrap().replays, 0);
    assert!(damaged.flits.unwrap().replays > 0 && damaged.total_s > whole.total_s);
}

#[test]
fn patterns_take_what_their_busiest_links_carry() {
    // Inside a rack each has a port of its own on each switch.
    let ring = answer(&question(TrafficPattern::Ring, 72)).unwrap();
    assert!(ring.messages.iter().all(|message| (message.slowdown - 1.0).abs() < 1e-9), "{:?}", ring.seconds);
    let incast = answer(&question(TrafficPattern::Incast, 9)).unwrap();
    let bare = 8.0 * 1e9 / incast.payload_bytes_per_s;
    assert!(incast.seconds.max_s > bare && incast.seconds.max_s < 1.01 * bare, "{incast:?}");
    // Between racks a random permutation meets on links up, and spreading by load spares it most of that.
    let apart = answer(&question(TrafficPattern::Permutation, 1024)).unwrap();
    let adaptive =
        answer(&FabricQuestion { routing: Routing::Adaptive, ..question(TrafficPattern::Permutation, 1024) })
            .unwrap();
    assert_eq!((apart.fabric, apart.messages.len()), ("between", 1024));
    assert!(apart.seconds.max_s > 1.9 * ring.seconds.max_s && apart.seconds.max_s > adaptive.seconds.max_s);
    // What each link carried, of what it could: none more than all of it.
    assert!(
        apart.links.iter().all(|link| link.used.is_some_and(|used| used <= 1.0 + 1e-9))
            && apart.links[0].used.is_some_and(|used| used > 0.99),
        "{:?}",
        apart.links[0]
    );
    // The same again to the last bit.
    assert_eq!(apart, answer(&question(TrafficPattern::Permutation, 1024)).unwrap());
}

#[test]
fn a_failed_link_slows_what_went_over_it() {
    let whole = answer(&question(TrafficPattern::Shift, 1024)).unwrap();
    let link =
        whole.links.iter().find(|it| it.from.starts_with("switch") && it.to.starts_with("switch")).unwrap();
    let switch = |name: &str| name.trim_start_matches("switch ").parse().unwrap();
    let failed = vec![(switch(&link.from), switch(&link.to))];
    let broken = answer(&FabricQuestion { failed, ..question(TrafficPattern::Shift, 1024) }).unwrap();
    assert!(broken.seconds.max_s > whole.seconds.max_s, "{:?} {:?}", broken.seconds, whole.seconds);
}
