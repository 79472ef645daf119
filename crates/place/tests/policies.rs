//! What every policy keeps to, on random problems.

use polder_place::{
    Computing, Kind, Moved, Object, Phase, PlaceError, Placement, Policy, Problem, Rates, Stream, Tier,
};
use polder_platform::{Bandwidth, Bytes};
use proptest::prelude::*;

const KINDS: [Kind; 8] = [
    Kind::Momentum,
    Kind::Variance,
    Kind::MasterGradient,
    Kind::MasterParameter,
    Kind::Parameter,
    Kind::Activation,
    Kind::Gradient,
    Kind::Other,
];

fn rates() -> impl Strategy<Value = Rates> {
    (1.0..400.0, 1.0..400.0).prop_map(|(read, write)| Rates {
        read: Bandwidth::new(read * 1e9),
        write: Bandwidth::new(write * 1e9),
    })
}

fn tiers() -> impl Strategy<Value = Vec<Tier>> {
    let tier = (1.0..500.0, rates(), proptest::option::of(rates()), any::<bool>());
    proptest::collection::vec(tier, 1..5).prop_map(|tiers| {
        let named =
            |(index, (capacity, cpu, device, staged)): (usize, (f64, Rates, Option<Rates>, bool))| Tier {
                name: format!("tier{index}"),
                capacity: Bytes::new(capacity * 1e9),
                cpu,
                device,
                through: (staged && index > 0).then_some(0),
            };
        tiers.into_iter().enumerate().map(named).collect()
    })
}

fn problems() -> impl Strategy<Value = Problem> {
    let object = (0.001..200.0, 0..KINDS.len());
    let objects = proptest::collection::vec(object, 1..9);
    let passes = proptest::collection::vec((0.0..3.0, 0.0..3.0), 9);
    let computing = prop_oneof![
        Just(Computing::default()),
        (0.0..2.0, 0.0..=1.0).prop_map(|(seconds, overlap)| Computing { seconds, overlap }),
    ];
    let stream = (proptest::collection::vec(any::<bool>(), 9), 0.0..2.0, 0.0..2.0);
    let streams = proptest::collection::vec(stream, 0..3);
    let phases = proptest::collection::vec((any::<bool>(), 0.0..2.0, computing, streams, passes), 1..4);
    (tiers(), objects, phases, 0..4_usize).prop_map(|(tiers, objects, phases, stays)| {
        // The first object lies in any tier, in one, or in all but the last.
        let stays = match stays {
            0 | 1 => vec![],
            2 => vec![0],
            _ => (0..tiers.len() - 1).collect(),
        };
        let objects: Vec<_> = objects
            .into_iter()
            .enumerate()
            .map(|(index, (bytes, kind))| Object {
                name: format!("object{index}"),
                kind: KINDS[kind],
                bytes: Bytes::new(bytes * 1e9),
                only: if index == 0 { stays.clone() } else { vec![] },
            })
            .collect();
        let phases = phases
            .into_iter()
            .enumerate()
            .map(|(index, (by_device, least_s, computing, streams, passes))| Phase {
                name: format!("phase{index}"),
                by_device,
                least_s,
                computing,
                streams: streams
                    .into_iter()
                    .map(|(has, exchanged_s, least_s)| Stream {
                        moved: (0..objects.len()).filter(|it| has[*it]).collect(),
                        exchanged_s,
                        least_s,
                    })
                    .collect(),
                moved: (0..objects.len())
                    .map(|object| Moved { object, read: passes[object].0, write: passes[object].1 })
                    .collect(),
            })
            .collect();
        Problem { tiers, objects, phases }
    })
}

fn total(problem: &Problem, placement: &Placement) -> f64 {
    problem.seconds(placement).iter().sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn optimal_is_never_behind_another_policy_that_fits(problem in problems()) {
        for policy in [Policy::Dram, Policy::Interleave, Policy::Paper] {
            if let Ok(other) = problem.place(policy) {
                let optimal = problem.place(Policy::Optimal).unwrap();
                let (ours, theirs) = (total(&problem, &optimal), total(&problem, &other));
                prop_assert!(ours <= theirs * (1.0 + 1e-7), "{policy}: {ours} {theirs}");
            }
        }
    }

    #[test]
    fn optimal_is_never_behind_any_fractions_that_fit(
        problem in problems(),
        rows in proptest::collection::vec(proptest::collection::vec(0.0_f64..1.0, 5), 9),
    ) {
        let fractions = problem.objects.iter().zip(&rows).map(|(object, row)| {
            let open = |tier: &usize| object.only.is_empty() || object.only.contains(tier);
            let row = (0..problem.tiers.len()).map(|tier| if open(&tier) { row[tier] } else { 0.0 });
            let sum: f64 = row.clone().sum();
            row.map(|it| it / sum).collect::<Vec<f64>>()
        });
        let other = Placement { fractions: fractions.collect() };
        if problem.check_placement(&other).is_ok() {
            let optimal = problem.place(Policy::Optimal).unwrap();
            prop_assert!(total(&problem, &optimal) <= total(&problem, &other) * (1.0 + 1e-7));
        }
    }

    #[test]
    fn a_policy_places_every_byte_and_no_tier_overflows(problem in problems()) {
        for policy in Policy::ALL {
            match problem.place(policy) {
                Ok(placement) => {
                    prop_assert!(problem.check_placement(&placement).is_ok());
                    let held: f64 = (0..problem.tiers.len()).map(|tier| problem.held(&placement, tier)).sum();
                    let bytes: f64 = problem.objects.iter().map(|it| it.bytes.value()).sum();
                    prop_assert!((held / bytes - 1.0).abs() < 1e-9);
                }
                Err(PlaceError::TooSmall { .. } | PlaceError::NoRoom { .. }) => {}
                Err(error) => prop_assert!(false, "{policy}: {error}"),
            }
        }
    }
}

fn problem(dram: f64, card: f64, objects: &[(&str, f64)]) -> Problem {
    let tier = |name: &str, capacity, rate| Tier {
        name: name.into(),
        capacity: Bytes::new(capacity),
        cpu: Rates { read: Bandwidth::new(rate), write: Bandwidth::new(rate) },
        device: None,
        through: None,
    };
    let objects: Vec<_> = objects
        .iter()
        .map(|(name, bytes)| Object {
            name: (*name).into(),
            kind: Kind::Other,
            bytes: Bytes::new(*bytes),
            only: vec![],
        })
        .collect();
    let moved = (0..objects.len()).map(|object| Moved { object, read: 1.0, write: 1.0 }).collect();
    Problem {
        tiers: vec![tier("dram", dram, 4e9), tier("card", card, 1e9)],
        objects,
        phases: vec![Phase {
            name: "STEP".into(),
            by_device: false,
            least_s: 0.0,
            computing: Computing::default(),
            streams: vec![],
            moved,
        }],
    }
}

#[test]
fn what_does_not_fit_is_said_in_one_line() {
    let small = problem(1e9, 1e9, &[("states", 3e9)]);
    assert_eq!(
        small.place(Policy::Optimal).unwrap_err().to_string(),
        "3 GB do not fit in all tiers together, which hold 2 GB: they are 1 GB too small; add a tier, or enlarge one"
    );
    assert_eq!(
        small.place(Policy::Dram).unwrap_err().to_string(),
        "tier dram of 1 GB cannot hold 3 GB: it is 2 GB too small; enlarge it, or place less there"
    );
    let mut kept = problem(1e9, 9e9, &[("weights", 3e9)]);
    kept.objects[0].only = vec![0];
    assert!(
        kept.place(Policy::Optimal)
            .unwrap_err()
            .to_string()
            .starts_with("tier dram of 1 GB cannot hold 3 GB")
    );
}

#[test]
fn what_cannot_lie_in_every_tier_has_its_room_first() {
    let mut three = problem(2e9, 2e9, &[("states", 2e9), ("weights", 3e9)]);
    let far = Tier { name: "disk".into(), capacity: Bytes::new(9e9), ..three.tiers[1].clone() };
    three.tiers.push(far);
    three.objects[1].only = vec![0, 1];
    for policy in [Policy::Interleave, Policy::Paper, Policy::Optimal] {
        let placed = three.place(policy).unwrap().fractions;
        assert!(placed[1][2] == 0.0 && placed[0][2] > 0.0, "{policy}: {placed:?}");
    }
    let astray = Placement { fractions: vec![vec![1.0, 0.0, 0.0], vec![0.0, 0.5, 0.5]] };
    assert_eq!(
        three.check_placement(&astray).unwrap_err().to_string(),
        "weights: expected none of it in disk; it can lie in dram, card"
    );
    three.objects[1].bytes = Bytes::new(5e9);
    let refusal = three.place(Policy::Optimal).unwrap_err().to_string();
    assert!(refusal.starts_with("tier dram and card of 4 GB cannot hold 5 GB"), "{refusal}");
}

#[test]
fn of_equally_good_placements_the_one_that_moves_least_is_taken() {
    // Computation hides all transfers, so that anything would be as good.
    let mut hidden = problem(9e9, 9e9, &[("activations", 6e9)]);
    hidden.phases[0].least_s = 100.0;
    assert_eq!(hidden.place(Policy::Optimal).unwrap().fractions, [[1.0, 0.0]]);
    hidden.tiers[0].capacity = Bytes::new(2e9);
    let fractions = hidden.place(Policy::Optimal).unwrap().fractions;
    assert!((fractions[0][0] - 1.0 / 3.0).abs() < 1e-9, "{fractions:?}");
}

#[test]
fn fractions_that_do_not_add_up_name_their_object() {
    let problem = problem(9e9, 9e9, &[("weights", 1e9), ("states", 1e9)]);
    let said = |fractions: &[&[f64]]| {
        let fractions = fractions.iter().map(|row| row.to_vec()).collect();
        problem.check_placement(&Placement { fractions }).unwrap_err().to_string()
    };
    assert_eq!(said(&[&[1.0, 0.0], &[0.5, 0.4]]), "states: expected fractions that add up to 1, found 0.9");
    assert_eq!(said(&[&[1.5, -0.5], &[1.0, 0.0]]), "weights: expected fractions from 0 to 1, found 1.5");
    assert_eq!(said(&[&[f64::NAN, 0.5], &[1.0, 0.0]]), "weights: expected fractions from 0 to 1, found NaN");
    assert_eq!(said(&[&[1.0], &[1.0, 0.0]]), "weights: expected a fraction for each of 2 tiers, found 1");
    assert_eq!(said(&[&[1.0, 0.0]]), "objects: expected a row for each of 2, found 1");
}

#[test]
fn a_policy_that_is_not_there_is_refused_with_those_that_are() {
    let said = "best".parse::<Policy>().unwrap_err().to_string();
    assert_eq!(said, "\"best\" is no policy; there are dram, interleave, paper and optimal");
}
