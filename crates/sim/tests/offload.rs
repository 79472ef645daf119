//! Offloaded steps beside what was measured on a host with CXL cards (facts published beside the code of Liaw and Chen).

use polder_place::{Policy, Problem, Rates, Tier};
use polder_platform::{Bandwidth, Bytes, Time};
use polder_sim::offload::{Offloaded, Optimizer, cached, optimizer};

/// Measured with 671,088,640 elements all in DRAM, and all on the card.
const DRAM: f64 = 278e9;
const CARD: f64 = 68.8e9;
/// Mistral NeMo 12B.
const PARAMETERS: f64 = 12_247_782_400.0;

fn tier(name: &str, capacity: f64, rate: f64) -> Tier {
    let rates = |read, write| Rates { read: Bandwidth::new(read), write: Bandwidth::new(write) };
    // A card's DMA; the GPU's own link is below what DRAM gives.
    let device = (name != "dram").then(|| rates(53.5e9, 37.2e9));
    Tier { name: name.into(), capacity: Bytes::new(capacity), cpu: rates(rate, rate), device, through: None }
}

/// A server of configuration A or B. Of 128 GiB, 125 are taken to be the program's: the published seconds of `paper` and
/// `optimal` follow from that, and from no other whole number of GiB.
fn tiers(dram_gib: f64, cards: usize) -> Vec<Tier> {
    let gib = f64::from(1 << 30);
    let card = |index| tier(&format!("card{index}"), 512.0 * gib / cards as f64, CARD);
    std::iter::once(tier("dram", dram_gib * gib, DRAM)).chain((0..cards).map(card)).collect()
}

fn step_s(dram_gib: f64, cards: usize, policy: Policy) -> f64 {
    let problem = optimizer(PARAMETERS, tiers(dram_gib, cards));
    problem.seconds(&problem.place(policy).unwrap())[0]
}

#[test]
fn twelve_billion_parameters_step_in_the_seconds_that_were_computed_for_the_papers_servers() {
    for (cards, expected) in [(1, [1.23, 2.49, 1.44, 1.08]), (2, [1.23, 1.66, 0.88, 0.83])] {
        let ours = [
            step_s(512.0, cards, Policy::Dram),
            step_s(125.0, cards, Policy::Interleave),
            step_s(125.0, cards, Policy::Paper),
            step_s(125.0, cards, Policy::Optimal),
        ];
        for (ours, expected) in ours.into_iter().zip(expected) {
            assert!((ours - expected).abs() < 0.0051, "{cards} cards: {ours} {expected}");
        }
    }
}

/// Milliseconds of a step of CPU Adam in one process: elements, then all in DRAM, all on the card, and pages interleaved
/// 1:1 to 1:4. DandinPower/numa-cpu-adam-bench, Apache-2.0.
const MEASURED: [(f64, [f64; 6]); 2] = [
    (671_088_640.0, [67.63, 273.29, 138.93, 175.59, 200.24, 216.25]),
    (67_895_296.0, [6.31, 23.75, 12.03, 16.69, 17.79, 18.96]),
];

#[test]
fn measured_steps_above_fifty_million_elements_are_predicted_to_within_four_percent_on_average() {
    let cache = Bytes::new(252e6);
    let mut errors = vec![];
    for (elements, milliseconds) in MEASURED {
        let cards = [0.0, 1.0, 1.0 / 2.0, 2.0 / 3.0, 3.0 / 4.0, 4.0 / 5.0];
        for (index, (on_card, measured)) in cards.into_iter().zip(milliseconds).enumerate() {
            // The two pure rows of the largest size give the bandwidths.
            if elements > 5e8 && index < 2 {
                continue;
            }
            let problem = optimizer(elements, vec![tier("dram", 1e12, DRAM), tier("card", 1e12, CARD)]);
            let mut placement = problem.place(Policy::Dram).unwrap();
            placement.fractions.iter_mut().for_each(|row| *row = vec![1.0 - on_card, on_card]);
            let error = cached(&problem, &placement, cache) * 1e3 / measured - 1.0;
            assert!(error.abs() < 0.08, "{elements} {on_card}: {error}");
            errors.push(error.abs());
        }
    }
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    assert!(mean < 0.04, "{mean}");
}

fn whole(cards: usize, gpus: u32) -> Problem {
    // 4,096 tokens in batches of 16, forty blocks of width 5,120.
    let activations = Bytes::new(2.0 * 16.0 * 4096.0 * 40.0 * 5120.0 * f64::from(gpus));
    let link = Bandwidth::new(55.6e9);
    let computation = [Time::new(0.0); 2];
    let (parameters, trained) = (PARAMETERS, PARAMETERS);
    let (optimizer, exchanged, element) = (Optimizer::Adam, computation, Time::new(0.0));
    Offloaded { parameters, trained, optimizer, activations, gpus, link, computation, exchanged, element }
        .problem(tiers(125.0, cards))
}

#[test]
fn a_whole_step_is_shortest_where_it_was_placed_for_all_phases() {
    for (cards, gpus) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        let problem = whole(cards, gpus);
        let seconds = |policy| problem.seconds(&problem.place(policy).unwrap());
        let sum = |policy| seconds(policy).iter().sum::<f64>();
        let optimal = sum(Policy::Optimal);
        for policy in [Policy::Interleave, Policy::Paper] {
            assert!(optimal <= sum(policy) * (1.0 + 1e-9), "{cards} cards, {gpus} GPUs: {policy}");
        }
        assert_eq!(seconds(Policy::Optimal).len(), 3);
    }
}

#[test]
fn a_phase_lasts_no_shorter_than_its_computation_or_its_gpus_links() {
    let mut problem = whole(2, 1);
    let link = problem.phases[0].least_s;
    assert!((link - (2.0 * PARAMETERS + 2.0 * 16.0 * 4096.0 * 40.0 * 5120.0) / 55.6e9).abs() < 1e-9);
    problem.phases[0].least_s = 100.0;
    let seconds = problem.seconds(&problem.place(Policy::Optimal).unwrap());
    assert_eq!(seconds[0], 100.0);
}
