//! A search predicts what a single prediction does, on any number of threads.

use polder_platform::{Bandwidth, Fabric, Folder, Host, Platform, Rack, TierId, Time, TransferRate, names};
use polder_sim::{
    Answer, FoundLayout, GivenLayout, Job, Layout, Margin, MemoryUse, Model, Offload, Outcome, Overlap,
    Precision, Random, Recompute, Request, Space, Step, StepClass, TierUse, Tiers, front, search,
};

struct Dice(Random);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0.below(below as u32) as usize
    }

    /// Two of `all`, or one.
    fn two<T: Clone>(&mut self, all: &[T]) -> Vec<T> {
        let (a, b) = (self.roll(all.len()), self.roll(all.len()));
        if a == b { vec![all[a].clone()] } else { vec![all[a.min(b)].clone(), all[a.max(b)].clone()] }
    }
}

fn random_space(dice: &mut Dice, model: &Model) -> Space {
    let accelerators = [64, 512, 1024, 6144][dice.roll(4)];
    let all = Space::default_for(model, accelerators, [1024, 1536, 6144][dice.roll(3)]);
    let offloads: Vec<_> = Offload::all(TierId::Host).chain(Offload::all(TierId::Pool)).collect();
    Space {
        tp: dice.two(&all.tp),
        cp: dice.two(&[1, 2, 4]),
        ep: dice.two(&all.ep),
        pp: all.pp.clone(),
        interleave: dice.two(&all.interleave),
        uneven: all.interleave.clone(),
        micro_batch: dice.two(&all.micro_batch),
        gather_again: dice.two(&[true, false]),
        recompute: dice.two(&all.recompute),
        flash: vec![true, false],
        zero: dice.two(&all.zero),
        precision: vec![[Precision::Bf16, Precision::Fp8][dice.roll(2)]],
        wide_gradients: vec![true, false],
        overlap: dice.two(&Overlap::all().collect::<Vec<_>>()),
        offload: dice.two(&offloads),
        ..all
    }
}

#[test]
fn ten_thousand_points_of_searches_equal_single_predictions_to_the_last_bit() {
    let mut dice = Dice(Random::new(1));
    let (mut compared, mut spaces, mut uneven, mut beside) = (0, 0, 0, 0);
    while compared < 10_000 {
        let platform = Platform::load(["dgx-h100", "nvl72-xdr", "nvl72-cxl"][dice.roll(3)]).unwrap();
        let model = Model::load(["gpt3-175b", "llama3-70b", "mixtral-8x7b"][dice.roll(3)]).unwrap();
        let order = ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp", "dp-ep-cp-tp-pp"][dice.roll(4)];
        let job = Job::new(&platform).with_order(order.parse().unwrap());
        let space = random_space(&mut dice, &model);
        let outcome = search(&job, &model, &space, 1, &|_, _| ());
        for FoundLayout { layout, step } in outcome.front.iter().chain(&outcome.nearest) {
            assert_eq!(job.predict(&model, layout).unwrap().step, *step, "{layout:?}");
            compared += 1;
            let parts = layout.pp * layout.interleave;
            uneven += u32::from([0, 2].iter().all(|edges| !(model.layers + edges).is_multiple_of(parts)));
            beside += u32::from(layout.overlap.expert && layout.ep > 1);
        }
        spaces += 1;
    }
    println!("{compared} points of {spaces} searches");
    assert!(
        uneven > 1000 && beside > 100,
        "{uneven} with uneven stages, {beside} with experts' beside passes"
    );
}

#[test]
fn any_number_of_threads_finds_the_same() {
    let mut dice = Dice(Random::new(2));
    let platform = Platform::load("nvl72-cxl").unwrap();
    for name in ["llama3-70b", "mixtral-8x7b"] {
        let model = Model::load(name).unwrap();
        let job = Job::new(&platform);
        for _ in 0..20 {
            let space = random_space(&mut dice, &model);
            let [one, two, five] = [1, 2, 5].map(|threads| search(&job, &model, &space, threads, &|_, _| ()));
            assert_eq!(one, two);
            assert_eq!(one, five);
        }
    }
}

/// What makes a part of a machine faster.
type Change<'a> = &'a dyn Fn(&mut Platform, &mut Rack);

/// Nothing gets slower, to one part in 10,000, when a part of the machine gets faster, also where several links are busy for longer
/// than there is computed.
#[test]
fn a_better_machine_never_takes_longer() {
    let halve = |time: &mut Time| *time = Time::new(time.value() / 2.0);
    let double = |rate: &mut Bandwidth| *rate = Bandwidth::new(rate.value() * 2.0);
    let links = |fabric: &mut Fabric| fabric.links *= 2;
    let better: [(&str, Change); 7] = [
        ("products", &|_, rack| rack.accelerator.fitted.matrix *= 2.0),
        ("attention", &|_, rack| rack.accelerator.fitted.attention *= 2.0),
        ("memory", &|_, rack| rack.accelerator.fitted.stream *= 2.0),
        ("launches", &|_, rack| halve(&mut rack.accelerator.fitted.launch)),
        ("links inside racks", &|_, rack| rack.fabric.iter_mut().for_each(links)),
        ("links between racks", &|platform, _| platform.between.iter_mut().for_each(links)),
        ("hosts", &|_, rack| {
            let Host { memory, attach, .. } = &mut rack.host;
            [&mut memory.read, &mut memory.write, &mut attach.bandwidth].into_iter().for_each(double);
        }),
    ];
    let (mut dice, mut compared, mut busy) = (Dice(Random::new(4)), 0, 0);
    while compared < 4_000 {
        let mut platform = Platform::load(["dgx-h100", "nvl72-ndr", "nvl72-cxl"][dice.roll(3)]).unwrap();
        if dice.roll(2) == 0 {
            // So slow that nothing has room beside computation.
            let between = platform.between.as_mut().unwrap();
            between.link.rate = TransferRate::new(between.link.rate.value() / 8.0);
        }
        let model = Model::load(["gpt3-175b", "llama3-70b", "mixtral-8x7b"][dice.roll(3)]).unwrap();
        let space = random_space(&mut dice, &model);
        let all: Vec<_> = each_alone(&space).collect();
        let predicted = (0..20).filter_map(|_| {
            let layout = all.get(dice.roll(all.len().max(1)))?;
            Some((*layout, Job::new(&platform).predict(&model, layout).ok()?.step))
        });
        for (layout, usual) in predicted.collect::<Vec<_>>() {
            let sent = usual.communication;
            busy += u32::from(sent.data.exposed_s() > 0.0 && usual.offload.exposed_s > 0.0);
            for (what, change) in better {
                let mut faster = platform.clone();
                let mut racks = std::mem::take(&mut faster.rack);
                racks.values_mut().for_each(|rack| change(&mut faster, rack));
                faster.rack = racks;
                let step = Job::new(&faster).predict(&model, &layout).unwrap().step;
                assert!(
                    step.total_s <= usual.total_s * (1.0 + 1e-4),
                    "{} s in place of {} with faster {what}: {layout:?}",
                    step.total_s,
                    usual.total_s
                );
            }
            compared += 1;
        }
    }
    println!("{compared} layouts, {busy} of them with gradients and offload exposed");
    assert!(busy > 500, "{busy}");
}

/// Of all points, by the definition: what no other covers.
#[test]
fn the_front_is_what_no_point_beats() {
    let mut dice = Dice(Random::new(3));
    let platform = Platform::load("dgx-h100").unwrap();
    let model = Model::load("llama3-8b").unwrap();
    let job = Job::new(&platform);
    let cost = |point: &FoundLayout| {
        let [used, far] = point.step.memory.tiers.map(|tier| tier.used_bytes);
        [point.step.total_s, used, far]
    };
    let mut points = 0;
    for _ in 0..20 {
        let space = Space { pp: vec![1, 2, 4], ..random_space(&mut dice, &model) };
        let Outcome { front, fits, .. } = search(&job, &model, &space, 1, &|_, _| ());
        // Each choice alone gives a point at a time.
        let alone = each_alone(&space).filter_map(|layout| job.predict(&model, &layout).ok());
        let all: Vec<_> = alone
            .map(|plan| FoundLayout { layout: plan.layout, step: plan.step })
            .filter(|point| point.step.memory.fits())
            .collect();
        // What is the same in other words is looked at once.
        let is_again = |point: &&FoundLayout| {
            let Layout { flash, recompute, .. } = point.layout;
            flash && recompute == Recompute::Selective && space.recompute.contains(&Recompute::None)
        };
        for point in all.iter().filter(is_again) {
            let none = Layout { recompute: Recompute::None, ..point.layout };
            assert_eq!(job.predict(&model, &none).unwrap().step, point.step);
        }
        assert_eq!(all.iter().filter(|point| !is_again(point)).count() as u64, fits);
        points += all.len();
        let beaten = |point: &FoundLayout| {
            all.iter().any(|other| {
                cost(other) != cost(point) && (0..3).all(|axis| cost(other)[axis] <= cost(point)[axis])
            })
        };
        let mut best: Vec<_> = all.iter().filter(|point| !beaten(point)).map(cost).collect();
        best.sort_by(|a, b| a.partial_cmp(b).unwrap());
        best.dedup();
        let mut costs: Vec<_> = front.iter().map(cost).collect();
        costs.sort_by(|a, b| a.partial_cmp(b).unwrap());
        assert_eq!(costs, best);
    }
    assert!(points > 1000, "{points}");
}

fn margin_of(platform: &str) -> Margin {
    let platform = Platform::load(platform).unwrap();
    Margin::of(&platform.rack["dgx"].accelerator, StepClass::Bf16).unwrap()
}

/// By the definition, over points that have few values and so many that are equal.
#[test]
fn a_front_over_more_axes_is_what_no_point_beats_in_any() {
    let (mut dice, margin) = (Dice(Random::new(4)), margin_of("dgx-a100"));
    let layout = layout(8);
    for _ in 0..100 {
        let points: Vec<_> = (0..60)
            .map(|place| {
                let axes = [(); 5].map(|()| dice.roll(4) as f64);
                let tiers = [axes[1], axes[2]].map(|used_bytes| TierUse { used_bytes, ..TierUse::default() });
                let memory = MemoryUse { tiers };
                let step = Step { total_s: axes[0], memory, ..Step::default() };
                ((place, axes), FoundLayout { layout, step })
            })
            .collect();
        let beaten = |(place, own): &(usize, [f64; 5])| {
            points.iter().any(|((at, axes), _)| {
                (0..5).all(|axis| axes[axis] <= own[axis]) && (axes != own || at < place)
            })
        };
        let mut best: Vec<_> = points.iter().map(|(point, _)| *point).filter(|it| !beaten(it)).collect();
        best.sort_by(|(_, a), (_, b)| a[0].total_cmp(&b[0]));
        let found = front(&points, |_| &margin, |((_, axes), _)| [axes[3], axes[4]]);
        assert_eq!(found.into_iter().map(|(point, _)| point).collect::<Vec<_>>(), best);
    }
}

/// What is predicted of both may be off differently: one that only may be better beats nothing of the other.
#[test]
fn a_point_on_another_accelerator_is_beaten_where_the_whole_of_both_ranges_says_so() {
    let margins = ["dgx-a100", "dgx-h100"].map(margin_of);
    let [older, newer] = [&margins[0], &margins[1]].map(|margin| margin.range);
    let point = |site: usize, seconds: f64| {
        let step = Step { total_s: seconds, ..Step::default() };
        (site, FoundLayout { layout: layout(8), step })
    };
    let front_of = |points: &[(usize, FoundLayout)], dear: f64| {
        let costs = |(site, candidate): &(usize, FoundLayout)| {
            [if *site == 0 { 1.0 } else { dear } * candidate.step.total_s]
        };
        let front = front(points, |(site, _)| &margins[*site], costs);
        front.into_iter().map(|(site, candidate)| (site, candidate.step.total_s)).collect::<Vec<_>>()
    };
    // Of two on one accelerator the lesser beats the other, by however little.
    assert_eq!(front_of(&[point(0, 1.001), point(0, 1.0)], 1.0), [(0, 1.0)]);
    let surely = newer[1] / older[0];
    assert_eq!(front_of(&[point(0, 1.01 * surely), point(1, 1.0)], 1.0), [(1, 1.0)]);
    let maybe = [point(0, 0.99 * surely), point(1, 1.0)];
    assert_eq!(front_of(&maybe, 1.0).len(), 2);
    // So with what is paid: twice as dear beats nothing that takes less than twice as long.
    assert_eq!(front_of(&[point(0, 1.01 * surely), point(1, 1.0)], 2.0).len(), 2);
    assert_eq!(front_of(&[point(0, 2.02 * surely), point(1, 1.0)], 2.0), [(1, 1.0)]);
    // The one that has surely ended first stands first.
    let first = newer[1] / older[1];
    assert_eq!(front_of(&[point(0, 0.99 * first), point(1, 1.0)], 1.0)[0].0, 0);
    assert_eq!(front_of(&[point(0, 1.01 * first), point(1, 1.0)], 1.0)[0].0, 1);
}

/// Of so many sequences a step.
fn layout(batch: u32) -> Layout {
    serde_json::from_value(serde_json::json!({ "tp": 1, "dp": 1, "batch": batch })).unwrap()
}

fn each_alone(space: &Space) -> impl Iterator<Item = Layout> + '_ {
    let base = layout(space.batch);
    let mut all = vec![];
    for &tp in &space.tp {
        for &cp in &space.cp {
            for &ep in &space.ep {
                for &pp in space.pp.iter().filter(|pp| space.accelerators.is_multiple_of(tp * cp * **pp)) {
                    for &interleave in &space.interleave {
                        for &micro_batch in &space.micro_batch {
                            let dp = space.accelerators / (tp * cp * pp);
                            all.push(Layout { tp, cp, ep, dp, pp, interleave, micro_batch, ..base });
                        }
                    }
                }
            }
        }
    }
    all.into_iter().flat_map(move |cut| {
        let mut these = vec![];
        for &sequence_parallel in &space.sequence_parallel {
            for &gather_again in &space.gather_again {
                for &recompute in &space.recompute {
                    for &flash in &space.flash {
                        for &zero in &space.zero {
                            for &wide_gradients in &space.wide_gradients {
                                for &overlap in &space.overlap {
                                    these.extend(space.offload.iter().map(|&offload| Layout {
                                        sequence_parallel,
                                        gather_again,
                                        recompute,
                                        flash,
                                        zero,
                                        wide_gradients,
                                        overlap,
                                        offload,
                                        precision: space.precision[0],
                                        ..cut
                                    }));
                                }
                            }
                        }
                    }
                }
            }
        }
        these
    })
}

#[test]
fn every_model_has_a_layout_on_every_platform_with_enough_accelerators() {
    for model in names(Folder::Models) {
        let model = Model::load(model).unwrap();
        for platform in
            ["dgx-h100", "nvl72-ndr", "nvl72-cxl", "nvl72-cxl-wide", "nvl72-xdr", "mixed-nvlink-ualink-cxl"]
        {
            let platform = Platform::load(platform).unwrap();
            let outcome =
                search(&Job::new(&platform), &model, &Space::default_for(&model, 2048, 2048), 1, &|_, _| ());
            let best = outcome.best().unwrap_or_else(|| panic!("{} on {}", model.title, platform.title));
            assert!(best.step.total_s > 0.0 && best.step.total_s.is_finite());
        }
    }
}

fn train(request: &Request, threads: usize) -> Answer {
    let answer = request.train(threads, &|index, all| assert!(index < all, "{index} of {all}"));
    answer.unwrap_or_else(|refused| panic!("{request:?}: {refused}"))
}

#[test]
fn what_may_lie_elsewhere_does_only_where_nothing_fits_without() {
    let mut needed = [0; 3];
    for (model, platform, accelerators) in [
        ("llama3-8b", "dgx-a100", 1),
        ("llama3-8b", "dgx-a100", 8),
        ("llama3-8b", "finetuning-a", 1),
        ("llama3-70b", "dgx-a100", 8),
        ("llama3-70b", "nvl72-cxl", 16),
        ("llama3-405b", "nvl72-cxl", 32),
        ("llama3-405b", "dgx-a100", 8),
    ] {
        let layout = GivenLayout { batch: Some(64), ..GivenLayout::default() };
        let request: Request = serde_json::from_value(serde_json::json!({
            "model": model, "platform": platform, "accelerators": accelerators, "layout": layout,
        }))
        .unwrap();
        let with = |layout| Request { layout, ..request.clone() };
        let without = with(GivenLayout { offload: Some(Offload::default()), ..layout.clone() });
        let anywhere = with(GivenLayout { tiers: Tiers::All, ..layout });
        let answer = train(&request, 1);
        for threads in [2, 5] {
            assert_eq!(train(&request, threads), answer);
        }
        let without = train(&without, 1);
        assert!(!without.layout.offload.is_any());
        if without.fits {
            assert_eq!(answer, without);
            needed[0] += 1;
            continue;
        }
        // What is told to fit is what the answer then looks for.
        let is_told = without
            .would_fit
            .iter()
            .any(|advice| advice.contains(" offloaded to the ") && !advice.contains("with"));
        assert_eq!(answer.fits, is_told, "{:?}", without.would_fit);
        let all = anywhere.search(1, &|_, _| ()).unwrap();
        let best = all.best().or(all.nearest.as_ref()).unwrap();
        assert_eq!((answer.layout, answer.points), (best.layout, all.points));
        assert_eq!((&answer.step, &answer.would_fit), (&best.step, &all.would_fit));
        let note = format!(
            "nothing fits in the accelerators' memory on {platform}: the layout has {}",
            answer.layout.offload
        );
        assert_eq!(answer.note.is_some_and(|text| text.starts_with(&note)), answer.fits);
        needed[1 + usize::from(answer.fits)] += 1;
    }
    assert!(needed.iter().all(|cases| *cases > 0), "fits, does not, does elsewhere: {needed:?}");
}
