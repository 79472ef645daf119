//! How far predictions may be from published steps. The bars are those of docs/plan.md.

use polder_platform::{Fitted, Platform};
use polder_sim::{Pooled, fitted, scalepool, validate};

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

#[test]
fn the_three_numbers_of_scalepool_come_out() {
    let figure = scalepool::Figure::load().unwrap();
    let pairs = figure.predict(None).unwrap();
    for pair in &pairs {
        assert!(pair.baseline.memory.fits() && pair.scalepool.memory.fits(), "{}", pair.model);
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
