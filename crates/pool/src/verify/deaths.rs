//! Two groups that share ranks: a rank of one is told which process of the other has died.

use polder_mem::model::{Outcome, Suite};
use polder_mem::{LINE, Offset};

use super::group::{Dice, Scene, tiny};
use crate::deaths::Deaths;
use crate::deviation::Deviation;
use crate::group::{Group, RankPlace, extent_bytes};

pub(super) fn suites() -> Vec<Suite> {
    let about = "ranks of two groups meet barriers in both; whoever waits in one for a rank that met a death in the other is told who died";
    // The barrier's suite judges what groups stand on.
    vec![Suite::new("deaths", about, deaths).mutates(&["src/deaths.rs"])]
}

/// Protocols that are known to be wrong.
pub(super) fn canaries() -> Vec<Suite> {
    let silent = "a rank that leaves a group after a death in another one does not say so";
    vec![Suite::new("deaths-kept-to-itself", silent, |seed| {
        Deviation::KeepsDeathsToItself.during(|| deaths(seed))
    })]
}

/// The first rank is in the second group alone and the last in the first; the others are in both.
fn deaths(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 11);
    let options = tiny(128);
    let scene = Scene::new(seed, &mut dice, 4, options, extent_bytes(&options) + 2 * LINE).with_two_groups();
    let scene = if dice.roll(2) == 0 { scene.with_heartbeats() } else { scene };
    let seconds: Vec<Offset> = (0..scene.size()).map(|rank| scene.extra(rank)).collect();
    let (rounds, gives_up) = (1 + dice.roll(3), dice.roll(2) == 0);
    scene.run_over(&mut dice, 80 * rounds, move |memory, members, rank, options| {
        let own = Deaths::default();
        let last = members.len() - 1;
        let moved = |(member, &at): (&RankPlace, &Offset)| RankPlace { at, ..*member };
        let second: Vec<RankPlace> = members.iter().zip(&seconds).map(moved).collect();
        let group = |members: &[RankPlace], rank| {
            let members = members.to_vec();
            let group = Group::over_extents(memory.clone(), members, rank, options).expect("the members fit");
            group.sharing(own.clone())
        };
        let mut groups: Vec<Group<_>> = vec![];
        groups.extend((rank > 0).then(|| group(&members[1..], rank - 1)));
        groups.extend((rank < last).then(|| group(&second[..last], rank)));
        let ended = (0..rounds).try_for_each(|_| groups.iter_mut().try_for_each(Group::barrier));
        for group in &mut groups {
            match gives_up && ended.is_err() {
                true => group.give_up(),
                false => group.leave(),
            }
        }
        ended
    })
}
