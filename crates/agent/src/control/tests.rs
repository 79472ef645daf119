//! Rounds over a fake host: what is decided, what is written, and what a kill leaves.

use polder_linux::fake::Tree;
use polder_linux::{DEMOTION, INTERLEAVE, INTERLEAVE_AUTO, PROMOTION_LIMIT};
use proptest::prelude::*;

use super::*;
use crate::{Forecast, contradictions, forecast};

const MIB: u64 = 1 << 20;
const JOURNAL: &str = "/run/polder/agent.journal";
const TEXT: &str = "step = \"32MiB\"
    [service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\nlocal_low = 0.45\nlocal_high = 0.55
    [service.web]\ncgroup = \"/web\"\ntier = \"opt-out\"\n";

fn machine() -> Tree {
    let tree = Tree::new(512 * MIB);
    tree.add_group("/cache", [200 * MIB, 0]);
    tree.add_group("/web", [80 * MIB, 20 * MIB]);
    tree
}

fn start(tree: &Tree) -> Agent<&Tree> {
    Agent::start(tree, Policy::parse(TEXT).unwrap(), JOURNAL, false).unwrap().0
}

/// A round of a test, where time does not pass.
fn look(agent: &mut Agent<&Tree>) -> Round {
    agent.round(0).unwrap().0
}

#[test]
fn a_share_over_its_bound_comes_within_it_in_steps() {
    let tree = machine();
    let mut agent = start(&tree);
    let demoted: Vec<u64> = (0..5).map(|_| look(&mut agent).services[0].demoted / MIB).collect();
    assert_eq!(demoted, [32, 32, 26, 0, 0]);
    assert_eq!(tree.bytes("/cache"), [110 * MIB, 90 * MIB]);
}

#[test]
fn services_over_their_bound_share_the_step_and_none_says_that_it_is_within() {
    let text = |low: f64| {
        format!(
            "step = \"32MiB\"\n[service.big]\ncgroup = \"/big\"\ntier = \"opt-in\"\nlocal_high = 0.40\n\
             [service.small]\ncgroup = \"/small\"\ntier = \"opt-in\"\nlocal_high = {low:?}\n"
        )
    };
    let tree = Tree::new(4096 * MIB);
    tree.add_group("/big", [2000 * MIB, 0]);
    tree.add_group("/small", [650 * MIB, 350 * MIB]);
    let (mut agent, _) = Agent::start(&tree, Policy::parse(&text(0.4)).unwrap(), JOURNAL, false).unwrap();
    let round = look(&mut agent);
    // 1,200 and 250 MiB are too much.
    let demoted: Vec<u64> = round.services.iter().map(|row| row.demoted).collect();
    assert_eq!(demoted.iter().sum::<u64>().div_ceil(MIB), 32);
    assert_eq!(demoted[1].div_ceil(MIB), 6, "{demoted:?}");
    for row in &round.services {
        assert_eq!(row.cause.what, "it is over local_high, and its coldest pages go down");
    }
    // A part of a byte a round is no page yet.
    tree.put_bytes("/big", [1 << 40, 0]);
    tree.put_bytes("/small", [MIB, 0]);
    let row = look(&mut agent).services.remove(1);
    assert_eq!(
        (row.demoted, row.cause.what.as_str()),
        (0, "it is over local_high, and waits for its part of step")
    );
    assert_eq!(row.cause.line, Some(9));
}

const PAGE: u64 = 4096;

/// A server of 768 + 256 GB with a link of 40 GB/s, and as many services of equal size without bounds yet, all on fast memory.
fn server(services: u64, all_gb: u64) -> (Tree, String) {
    let tree = Tree::new(768 * GB);
    tree.set_slow(256 * GB);
    tree.set_bandwidth(40_000);
    tree.moves_at(5e9);
    let mut text = String::new();
    for index in 0..services {
        tree.add_group(&format!("/s{index}"), [all_gb * GB / services, 0]);
        text +=
            &format!("[service.s{index}]\ncgroup = \"/s{index}\"\ntier = \"opt-in\"\nlocal_high = 0.75\n");
    }
    (tree, text)
}

const GB: u64 = 1_000_000_000;

#[test]
fn the_default_takes_a_tenth_of_the_link_of_a_terabyte_for_one_service_or_a_thousand_together() {
    for services in [1, 1000] {
        let (tree, text) = server(services, 650);
        let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
        let demoted: Vec<u64> =
            (0..30).map(|_| look(&mut agent).services.iter().map(|row| row.demoted).sum()).collect();
        // The first round measures. Then a tenth of the link in 2 s, until that is more than an eighth of what is too much.
        assert_eq!(demoted[0], Link::FIRST / PAGE / services * PAGE * services, "{demoted:?}");
        let most = 8 * GB;
        assert!(demoted.iter().all(|bytes| *bytes <= most), "{demoted:?}");
        assert!(demoted[1..10].iter().all(|bytes| *bytes > most / 1000 * 999), "{demoted:?}");
        let within = |index: u64| tree.bytes(&format!("/s{index}"))[0] <= 650 * GB / services / 4 * 3 + PAGE;
        assert!((0..services).all(within), "after a minute: {demoted:?}");
    }
}

#[test]
fn a_service_gives_less_the_nearer_it_is_to_suffering_and_nothing_beyond() {
    let demoted = |pressure: f64, refaults: u64| {
        let (tree, text) = server(1, 100);
        let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
        look(&mut agent);
        tree.suffer("/s0", pressure, refaults, 0);
        let round = look(&mut agent);
        round.services[0].demoted as f64
    };
    let free = demoted(0.0, 0);
    assert!(free > 3e9, "{free}");
    for (pressure, refaults, part) in
        [(5.0, 0, 0.5), (9.0, 0, 0.1), (0.0, 1000, 0.5), (5.0, 1500, 0.125), (10.5, 0, 0.0), (0.0, 2001, 0.0)]
    {
        let found = demoted(pressure, refaults) / free;
        assert!((found - part).abs() < 1e-6, "{pressure}% and {refaults} pages: {found} in place of {part}");
    }
}

#[test]
fn a_link_that_gets_slower_is_given_less_and_no_round_moves_for_much_longer_than_a_period() {
    let (tree, text) = server(1, 650);
    let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
    let seconds = |agent: &mut Agent<_>| {
        let began = tree.now();
        look(agent);
        (tree.now() - began).as_secs_f64()
    };
    for _ in 0..3 {
        assert!(seconds(&mut agent) <= 2.0 + 1e-6);
    }
    tree.moves_at(1e9);
    let took: Vec<f64> = (0..8).map(|_| seconds(&mut agent)).collect();
    assert!(took[0] > 7.9 && took[7] < 2.1, "{took:?}");
}

#[test]
fn where_the_bandwidth_is_not_known_a_tenth_of_what_moves_come_to_is_taken() {
    let (tree, text) = server(1, 650);
    tree.take("/sys/devices/system/node/node1/access0/initiators/read_bandwidth");
    let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
    assert_eq!(agent.link().rate(), None);
    let demoted = [0; 2].map(|_| look(&mut agent).services[0].demoted);
    assert_eq!(demoted[0], Link::FIRST);
    assert!(demoted[1].abs_diff(GB) < MIB, "{demoted:?}");
}

#[test]
fn what_is_forecast_is_what_comes() {
    let (tree, text) = server(2, 650);
    tree.put_bytes("/s1", [100 * GB, 200 * GB]);
    let text = text + "local_low = 0.6\n";
    let policy = Policy::parse(&text).unwrap();
    let (mut dry, _) = Agent::start(&tree, policy.clone(), JOURNAL, true).unwrap();
    let recorded = dry.round(0).unwrap().1;
    let told = forecast(&recorded, dry.link().steady_step(2.0), policy.period);
    let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
    let rounds: Vec<Round> = (0..60).map(|_| look(&mut agent)).collect();
    for (index, name) in ["s0", "s1"].into_iter().enumerate() {
        let moved = |round: &&Round| round.services[index].demoted + round.services[index].promoted > 0;
        let last = rounds.iter().rev().find(moved).unwrap().round;
        let bytes: u64 =
            rounds.iter().map(|it| it.services[index].demoted + it.services[index].promoted).sum();
        let Forecast { bytes: said, time } = told[name];
        assert!(said.abs_diff(bytes) < MIB, "{name}: {said} {bytes}");
        // The run begins with a round that measures.
        let late = 2 * last - time.unwrap().as_secs();
        assert!(late <= 2, "{name}: {last} {time:?}");
    }
}

#[test]
fn a_service_that_cannot_go_down_keeps_the_step_from_no_other_and_says_so() {
    let text = "step = \"32MiB\"\n[service.a]\ncgroup = \"/a\"\ntier = \"background\"\n[service.b]\ncgroup = \"/b\"\ntier = \"background\"\n\
        [service.c]\ncgroup = \"/c\"\ntier = \"background\"\n";
    let tree = Tree::new(4096 * MIB);
    tree.add_group("/a", [2000 * MIB, 0]);
    tree.lock("/a", 2000 * MIB);
    tree.add_group("/b", [2000 * MIB, 0]);
    tree.take("/sys/fs/cgroup/b/memory.reclaim");
    tree.add_group("/c", [60 * MIB, 0]);
    let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
    (0..3).for_each(|_| drop(look(&mut agent)));
    assert!(tree.bytes("/c")[0] < MIB, "{:?}", tree.bytes("/c"));
    let round = look(&mut agent);
    assert_eq!(round.services[0].cause.what, "it is background, and the kernel can move none of its pages");
    assert!(
        matches!(&round.alarms[..], [Alarm::Refused { service, error }] if service == "b" && error.contains("no memory.reclaim")),
        "{:?}",
        round.alarms
    );
    // Once it can, it goes on as before.
    tree.lock("/a", 0);
    look(&mut agent);
    assert_eq!(look(&mut agent).services[0].demoted.div_ceil(MIB), 32);
}

#[test]
fn a_service_that_cannot_come_up_keeps_the_step_from_no_other() {
    let text = "step = \"32MiB\"\n[service.a]\ncgroup = \"/a\"\ntier = \"opt-in\"\nlocal_low = 0.5\n\
        [service.b]\ncgroup = \"/b\"\ntier = \"opt-in\"\nlocal_low = 0.5\n";
    let tree = Tree::new(8192 * MIB);
    tree.add_group("/a", [0, 2000 * MIB]);
    tree.share("/a", 2000 * MIB);
    tree.add_group("/b", [0, 60 * MIB]);
    let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
    (0..3).for_each(|_| drop(look(&mut agent)));
    assert_eq!(tree.bytes("/b"), [30 * MIB, 30 * MIB]);
    assert!(agent.causes()["a"].last().unwrap().what.contains("is shared"), "{:?}", agent.causes());
}

#[test]
fn a_service_whose_cold_pages_the_kernel_demoted_comes_to_its_low_bound_within_12_rounds() {
    let tree = machine();
    tree.put("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
    let mut agent = start(&tree);
    (0..4).for_each(|_| drop(look(&mut agent)));
    // 25 points below 45%, and the tree promotes nothing by itself.
    tree.write("/sys/fs/cgroup/cache/memory.reclaim", &(70 * MIB).to_string()).unwrap();
    assert_eq!(tree.bytes("/cache"), [40 * MIB, 160 * MIB]);
    let rounds: Vec<ServiceRound> = (0..12).map(|_| look(&mut agent).services.remove(0)).collect();
    let promoted: Vec<u64> = rounds.iter().map(|row| row.promoted / MIB).collect();
    assert_eq!(promoted, [0, 32, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(rounds.iter().all(|row| row.demoted == 0), "it never goes down again");
    assert_eq!(tree.bytes("/cache"), [90 * MIB, 110 * MIB]);
    let causes = agent.causes();
    let reasons: Vec<&str> = causes["cache"].iter().map(|cause| cause.what.as_str()).collect();
    assert_eq!(reasons.last(), Some(&"it is within its bounds"));
    assert!(reasons.contains(&"it is under local_low, and its pages come up"), "{reasons:?}");
}

#[test]
fn nothing_comes_up_without_room_or_against_a_limit_or_where_it_cannot_be_moved() {
    let up = |text: &str, fast: u64, prepare: &dyn Fn(&Tree)| {
        let tree = Tree::new(fast * MIB);
        tree.add_group("/cache", [40 * MIB, 160 * MIB]);
        tree.add_group("/web", [80 * MIB, 20 * MIB]);
        prepare(&tree);
        let policy = Policy::parse(text).unwrap();
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
        let rounds: Vec<Round> = (0..12).map(|_| look(&mut agent)).collect();
        assert!(rounds.iter().all(|round| round.alarms.is_empty()), "{rounds:?}");
        tree.bytes("/cache")[0] / MIB
    };
    assert_eq!(up(TEXT, 512, &|_| {}), 90, "the control");
    // The kernel keeps back 2 MiB of 140, and web takes 100.
    assert_eq!(up(TEXT, 140, &|_| {}), 40);
    assert_eq!(up(&format!("free_low = 0.8\n{TEXT}"), 512, &|_| {}), 40);
    // 12 rounds of 1.9 MiB, but for the first.
    assert_eq!(up(&format!("promotion_limit = \"1MB/s\"\n{TEXT}"), 512, &|_| {}), 60);
    assert_eq!(up(TEXT, 512, &|tree| tree.lacks_promotion()), 40);
    assert_eq!(up(TEXT, 512, &|tree| tree.share("/cache", 150 * MIB)), 50);
    assert_eq!(up(TEXT, 512, &|tree| tree.suffer("/cache", 25.0, 0, 0)), 40);
}

#[test]
fn pages_that_cannot_be_moved_are_tried_ever_more_seldom() {
    let tree = machine();
    tree.put_bytes("/cache", [40 * MIB, 160 * MIB]);
    tree.share("/cache", 160 * MIB);
    let mut agent = start(&tree);
    look(&mut agent);
    let tried = |agent: &Agent<&Tree>| agent.known[&"cache".to_owned().into()].rise.rest;
    let mut tries = 0;
    for _ in 0..200 {
        let before = tried(&agent);
        look(&mut agent);
        tries += u32::from(tried(&agent) > before);
    }
    assert!((5..=8).contains(&tries), "{tries} tries");
    assert!(agent.causes()["cache"].last().unwrap().what.contains("is shared"));
    tree.share("/cache", 0);
    (0..70).for_each(|_| drop(look(&mut agent)));
    assert_eq!(tree.bytes("/cache")[0], 90 * MIB);
}

#[test]
fn an_opt_out_that_demotion_broke_is_repaired_in_the_round_that_sees_it() {
    let tree = machine();
    let mut agent = start(&tree);
    look(&mut agent);
    assert_eq!(tree.bytes("/web"), [100 * MIB, 0], "the cpuset moves what is there");
    tree.write("/sys/fs/cgroup/web/memory.reclaim", &(20 * MIB).to_string()).unwrap();
    assert_eq!(tree.bytes("/web"), [80 * MIB, 20 * MIB], "demotion ignores cpusets");
    let round = look(&mut agent);
    let broken = Alarm::OptOutBroken { service: "web".to_owned(), found: 20 * MIB, left: 0 };
    assert_eq!(round.alarms, [broken]);
    assert_eq!(tree.bytes("/web"), [100 * MIB, 0]);
}

#[test]
fn pages_that_came_up_and_are_counted_late_break_no_opt_out() {
    let tree = machine();
    let mut agent = start(&tree);
    look(&mut agent);
    tree.count_late("/web", 4096);
    let shown = tree.read("/sys/fs/cgroup/web/memory.numa_stat").unwrap();
    assert!(shown.contains("N1=4096"), "{shown}");
    assert_eq!(look(&mut agent).alarms, []);
    // Of what is there the last page that comes up is counted late.
    tree.write("/sys/fs/cgroup/web/memory.reclaim", &(20 * MIB).to_string()).unwrap();
    let broken = Alarm::OptOutBroken { service: "web".to_owned(), found: 20 * MIB, left: 0 };
    assert_eq!(look(&mut agent).alarms, [broken]);
    assert_eq!(look(&mut agent).alarms, []);
}

#[test]
fn a_service_that_is_gone_is_an_alarm_and_the_others_go_on() {
    let tree = machine();
    let mut agent = start(&tree);
    tree.remove_group("/web");
    let round = look(&mut agent);
    let gone = Alarm::NoSuchCgroup { service: "web".to_owned(), cgroup: "/web".to_owned() };
    assert_eq!((round.alarms, round.services.len()), (vec![gone], 1));
    agent.stop().unwrap();
}

#[test]
fn a_kernel_with_one_tier_is_refused_because_reclaim_would_evict() {
    let tree = machine();
    tree.merge_tiers();
    for dry_run in [false, true] {
        let started = Agent::start(&tree, Policy::parse(TEXT).unwrap(), JOURNAL, dry_run);
        let error = started.expect_err("it is refused").to_string();
        assert!(error.contains("puts nodes 0-1 into one memory tier"), "{error}");
    }
    assert!(tree.disk().is_empty());
}

#[test]
fn the_setting_of_a_cgroup_that_is_gone_is_not_given_to_a_later_one_of_its_path() {
    let tree = machine();
    let mut agent = start(&tree);
    look(&mut agent);
    tree.remove_group("/web");
    tree.add_group("/web", [10 * MIB, 0]);
    tree.set_nodes("/web", "1");
    look(&mut agent);
    assert_eq!(tree.settings()["/sys/fs/cgroup/web/cpuset.mems"], "0", "the later one is opted out too");
    agent.stop().unwrap();
    assert_eq!(tree.settings()["/sys/fs/cgroup/web/cpuset.mems"], "1");
}

#[test]
fn a_change_restores_what_the_new_policy_leaves_out_and_touches_nothing_else() {
    let tree = machine();
    tree.set_nodes("/web", "0-1");
    let mut agent = start(&tree);
    look(&mut agent);
    agent
        .change(Policy::parse("[service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\n").unwrap())
        .unwrap();
    let settings = tree.settings();
    assert_eq!(settings["/sys/fs/cgroup/web/cpuset.mems"], "0-1");
    assert_eq!(settings[DEMOTION], "true\n");
}

#[test]
fn a_dry_run_decides_and_writes_nothing() {
    let tree = machine();
    let before = tree.settings();
    let (mut agent, _) = Agent::start(&tree, Policy::parse(TEXT).unwrap(), JOURNAL, true).unwrap();
    assert_eq!(look(&mut agent).services[0].demoted, 32 * MIB);
    agent.stop().unwrap();
    assert_eq!((tree.settings(), tree.bytes("/cache"), tree.disk().len()), (before, [200 * MIB, 0], 0));
}

#[test]
fn a_dry_run_names_each_setting_that_a_run_writes_and_a_run_those_that_it_writes() {
    let text = format!("fair_share = \"kernel\"\npromotion_limit = \"200MB/s\"\n{TEXT}");
    let written = |dry_run: bool, prepare: &dyn Fn(&Tree)| {
        let tree = machine();
        tree.has_goals("6.19.0-fake");
        tree.add_cxl("mem0");
        prepare(&tree);
        let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, dry_run).unwrap();
        let rounds = [look(&mut agent), look(&mut agent)];
        assert!(rounds[1].settings.is_empty(), "each is named once: {:?}", rounds[1].settings);
        let alarms: Vec<Alarm> = rounds.iter().flat_map(|round| round.alarms.clone()).collect();
        (rounds[0].settings.iter().map(ToString::to_string).collect::<Vec<_>>(), alarms)
    };
    let (wrote, _) = written(false, &|_| {});
    let (would, alarms) = written(true, &|_| {});
    let state = "/sys/kernel/mm/damon/admin/kdamonds/0/state: off -> on";
    assert_eq!(wrote.last().map(String::as_str), Some(state));
    assert_eq!(would, wrote[..wrote.len() - 1], "the state is there once the kdamond is");
    for line in [
        "/proc/sys/kernel/numa_balancing: 1 -> 2",
        "/sys/kernel/mm/numa/demotion_enabled: false -> true",
        "/proc/sys/kernel/numa_balancing_promote_rate_limit_MBps: 65536 -> 190",
        "/sys/fs/cgroup/web/cpuset.mems: \"\" -> 0",
        "/sys/module/damon_stat/parameters/enabled: Y -> N",
        "/sys/kernel/tracing/instances/polder: absent -> made",
    ] {
        assert!(would.iter().any(|it| it == line), "{line} is not in {would:?}");
    }
    // What lies on the slow tier is told of; nothing is said of a repair.
    let broken = |alarm: &Alarm| matches!(alarm, Alarm::OptOutBroken { .. });
    assert!(alarms.iter().all(broken), "{alarms:?}");
    // Beside an agent that runs there is nothing to write.
    let agent = |tree: &Tree| {
        let (mut agent, _) = Agent::start(tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
        look(&mut agent);
        std::mem::forget(agent);
    };
    let (would, alarms) = written(true, &agent);
    assert!(would.is_empty() && alarms.is_empty(), "{would:?} {alarms:?}");
}

#[test]
fn a_policy_of_pods_costs_by_their_number_and_not_by_its_square() {
    const ADDRESS: &str = "http://127.0.0.1:10255/pods";
    let text = "[kubernetes]\npods = \"http://127.0.0.1:10255/pods\"\n\
        [service.web]\nlabel = \"app=web\"\ntier = \"opt-out\"\n";
    // Comparisons of names and calls of the kernel, in a round that looks at so many pods, half of which are there.
    let cost = |pods: usize| {
        let tree = machine();
        let pod = |index: usize| {
            if index.is_multiple_of(2) {
                tree.add_group(&format!("/kubepods/pod{index}"), [MIB, 0]);
            }
            format!(
                "{{\"metadata\":{{\"name\":\"p{index}\",\"uid\":\"{index}\",\"labels\":{{\"app\":\"web\"}}}}}}"
            )
        };
        let items: Vec<String> = (0..pods).map(pod).collect();
        tree.answer(ADDRESS, Some(&format!("{{\"items\":[{}]}}", items.join(","))));
        let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
        look(&mut agent);
        let before = (crate::name::COMPARISONS.get(), tree.calls());
        let round = agent.round(20_000).unwrap().0;
        assert_eq!((round.services.len(), round.alarms.len()), (pods / 2, pods / 2));
        (crate::name::COMPARISONS.get() - before.0, tree.calls() - before.1)
    };
    let (few, many) = (cost(200), cost(1600));
    println!("200 pods: {few:?}; 1,600 pods: {many:?}");
    // Eight times as many, and as the logarithm grows.
    assert!(many.0 <= 16 * few.0 && many.1 <= 9 * few.1, "{few:?} {many:?}");
    assert!(few.0 > 200 && few.1 > 200, "the control: {few:?}");
}

#[test]
fn an_agent_that_is_killed_at_any_of_its_writes_leaves_nothing_behind_after_the_next_start() {
    let kills = killed_at_each_write(TEXT, &|_| {});
    assert!(kills >= 12, "the agent wrote {kills} times only");
    let kills = killed_at_each_write(&format!("fair_share = \"kernel\"\n{TEXT}"), &|tree| {
        tree.has_goals("6.19.0-fake")
    });
    assert!(kills >= 50, "the agent wrote {kills} times only");
    let kills = killed_at_each_write(&format!("health.bad_memory = \"drain\"\n{TEXT}"), &|tree| {
        tree.add_cxl("mem0");
        tree.poison("mem0", 0x1000, u64::MAX);
    });
    assert!(kills >= 20, "the agent wrote {kills} times only");
}

/// How many writes an agent makes; it is killed at each of them once.
fn killed_at_each_write(text: &str, prepare: &dyn Fn(&Tree)) -> u32 {
    let mut kills = 0;
    for writes in 1.. {
        let tree = machine();
        prepare(&tree);
        let before = tree.settings();
        tree.kill_after(writes);
        let policy = || Policy::parse(text).unwrap();
        if let Ok((mut agent, _)) = Agent::start(&tree, policy(), JOURNAL, false) {
            for _ in 0..3 {
                drop(agent.round(0));
            }
            drop(agent.stop());
        }
        if !tree.is_dead() {
            break;
        }
        kills += 1;
        tree.revive();
        let (mut agent, _) = Agent::start(&tree, policy(), JOURNAL, false).unwrap();
        agent.stop().unwrap();
        assert_eq!(tree.settings(), before, "killed at write {writes}");
        assert!(tree.disk().is_empty(), "killed at write {writes}");
    }
    println!("killed at {kills} writes");
    kills
}

#[test]
fn the_kernel_holds_a_share_by_goals_that_follow_the_service() {
    let tree = machine();
    tree.has_goals("6.19.0-fake");
    let before = tree.settings();
    let policy = Policy::parse(&format!("fair_share = \"kernel\"\n{TEXT}")).unwrap();
    let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
    let local = |round: &Round| round.services[0].local;
    for _ in 0..6 {
        assert_eq!(look(&mut agent).services[0].demoted, 0, "the agent itself demotes nothing");
    }
    let round = look(&mut agent);
    assert!((0.45..=0.55).contains(&local(&round)) && round.alarms.is_empty(), "{round:?}");
    assert_eq!(round.services[0].cause.what, "the kernel holds its share by goals of DAMON");
    let goal = "/sys/kernel/mm/damon/admin/kdamonds/0/contexts/0/monitoring_attrs/intervals/intervals_goal";
    assert_eq!(
        tree.settings()[&format!("{goal}/access_bp")],
        "400\n",
        "the kernel sets its intervals itself"
    );
    tree.put_bytes("/cache", [60 * MIB, 240 * MIB]);
    (0..6).for_each(|_| drop(look(&mut agent)));
    assert!((0.45..=0.55).contains(&local(&look(&mut agent))), "it grew, and its hot pages went up");
    tree.remove_group("/cache");
    tree.add_group("/cache", [300 * MIB, 0]);
    (0..6).for_each(|_| drop(look(&mut agent)));
    assert!((0.45..=0.55).contains(&local(&look(&mut agent))), "it was made anew within a period");
    tree.put_bytes("/cache", [300 * MIB, 0]);
    tree.suffer("/cache", 25.0, 0, 0);
    look(&mut agent);
    // A goal is a whole part of 10,000 of the node.
    let part = 512 * MIB / 10_000 + 1;
    let left = tree.bytes("/cache")[0];
    assert!((300 * MIB - part..=300 * MIB).contains(&left), "one that suffers keeps what it has: {left}");
    agent.change(Policy::parse(TEXT).unwrap()).unwrap();
    assert_eq!(tree.settings()["/sys/module/damon_stat/parameters/enabled"], "Y\n", "DAMON_STAT runs again");
    agent.stop().unwrap();
    assert_eq!(tree.settings(), before);
}

#[test]
fn cold_pages_go_to_several_slow_nodes_by_their_bandwidth_or_by_reclaim_where_the_kernel_cannot() {
    const NODES: &str = "/sys/devices/system/node";
    let schemes = "/sys/kernel/mm/damon/admin/kdamonds/0/contexts/0/schemes";
    // What each target of the first scheme is, and the alarms.
    let run = |hmat: bool, prepare: &dyn Fn(&Tree)| {
        let tree = machine();
        tree.has_goals("6.19.0-fake");
        tree.put(&format!("{NODES}/has_memory"), "0-2\n");
        tree.put("/sys/devices/virtual/memory_tiering/memory_tier90/nodelist", "1-2\n");
        tree.put(&format!("{NODES}/node2/meminfo"), "Node 2 MemTotal: 1024 kB\nNode 2 MemFree: 512 kB\n");
        for (node, mbps) in [(0, 200_000), (1, 40_000), (2, 20_000)].into_iter().filter(|_| hmat) {
            tree.put(&format!("{NODES}/node{node}/access0/initiators/read_bandwidth"), &format!("{mbps}\n"));
        }
        prepare(&tree);
        let before = tree.settings();
        let policy = Policy::parse(&format!("fair_share = \"kernel\"\n{TEXT}")).unwrap();
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
        let alarms = look(&mut agent).alarms;
        (0..8).for_each(|_| drop(look(&mut agent)));
        let local = look(&mut agent).services[0].local;
        assert!((0.45..=0.55).contains(&local), "{local}");
        let settings = tree.settings();
        let of = |number: u32, name: &str| {
            settings.get(&format!("{schemes}/0/dests/{number}/{name}")).map(|text| text.trim().to_owned())
        };
        let targets: Vec<_> =
            (0..3).filter_map(|number| Some((of(number, "id")?, of(number, "weight")?))).collect();
        let up = settings.get(&format!("{schemes}/1/target_nid")).cloned();
        agent.stop().unwrap();
        assert_eq!(tree.settings(), before);
        (targets, up, alarms)
    };
    let pair = |id: &str, weight: &str| (id.to_owned(), weight.to_owned());
    let up = Some("0\n".to_owned());
    assert_eq!(run(true, &|_| {}), (vec![pair("1", "40000"), pair("2", "20000")], up.clone(), vec![]));
    assert_eq!(run(false, &|_| {}), (vec![pair("1", "1"), pair("2", "1")], up, vec![]));
    let (targets, _, alarms) = run(true, &|tree| tree.lacks_of_damon("dests"));
    assert_eq!(targets, []);
    let said: Vec<String> = alarms.iter().map(ToString::to_string).collect();
    assert!(said.len() == 1 && said[0].starts_with("fair_share: ") && said[0].contains("6.17"), "{said:?}");
}

#[test]
fn a_kernel_without_goals_or_with_another_user_of_damon_leaves_shares_to_the_agent() {
    let policy = || Policy::parse(&format!("fair_share = \"kernel\"\n{TEXT}")).unwrap();
    let said = |prepare: &dyn Fn(&Tree)| {
        let tree = machine();
        prepare(&tree);
        let before = tree.settings();
        let (mut agent, _) = Agent::start(&tree, policy(), JOURNAL, false).unwrap();
        let round = look(&mut agent);
        assert_eq!(round.services[0].demoted, 32 * MIB);
        agent.stop().unwrap();
        assert_eq!(tree.settings(), before);
        round.alarms.iter().map(ToString::to_string).collect::<String>()
    };
    let old = said(&|_| {});
    assert!(old.starts_with("fair_share: Linux 6.12.0-fake has no goals of DAMON by cgroup"), "{old}");
    let used = said(&|tree| {
        tree.has_goals("6.19.0-fake");
        tree.write("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "1").unwrap();
    });
    assert!(used.contains("has 1 kdamonds of another program"), "{used}");
}

#[test]
fn what_damon_lacks_is_tried_once_and_put_back_and_a_kernel_that_calls_itself_older_is_asked() {
    const DAMON: &str = "/sys/kernel/mm/damon/admin/kdamonds";
    let policy = || Policy::parse(&format!("fair_share = \"kernel\"\n{TEXT}")).unwrap();
    for lacks in [None, Some("path"), Some("nid"), Some("target_nid")] {
        let tree = machine();
        tree.has_goals("5.14.0-570.12.1.el9_6.x86_64");
        lacks.into_iter().for_each(|name| tree.lacks_of_damon(name));
        let before = tree.settings();
        let (mut agent, _) = Agent::start(&tree, policy(), JOURNAL, false).unwrap();
        let mut rounds = || {
            let calls = tree.calls();
            let round = look(&mut agent);
            (round, tree.calls() - calls)
        };
        let first = rounds();
        let later: Vec<(Round, u64)> = (0..3).map(|_| rounds()).collect();
        let said = |round: &Round| round.alarms.iter().map(ToString::to_string).collect::<String>();
        if lacks.is_none() {
            assert!(later.iter().all(|(round, _)| said(round).is_empty()), "{:?}", later[0].0);
            assert_eq!(later[2].0.services[0].cause.what, "the kernel holds its share by goals of DAMON");
            continue;
        }
        for (round, calls) in &later {
            assert!(
                said(round).contains("5.14.0-570.12.1.el9_6.x86_64 has no goals of DAMON"),
                "{}",
                said(round)
            );
            assert!(
                round.settings.iter().all(|change| !change.path.starts_with(DAMON)),
                "{:?}",
                round.settings
            );
            assert!(calls + 10 < first.1, "{calls} calls after {}", first.1);
        }
        let settings = tree.settings();
        assert_eq!(settings[&format!("{DAMON}/nr_kdamonds")], "0\n");
        assert_eq!(settings["/sys/module/damon_stat/parameters/enabled"], "Y\n");
        agent.stop().unwrap();
        assert_eq!(tree.settings(), before);
    }
    // A dry run writes nothing that would show files, and believes those that are there.
    let dry = |prepare: &dyn Fn(&Tree)| {
        let tree = machine();
        tree.has_goals("5.14.0-570.12.1.el9_6.x86_64");
        prepare(&tree);
        let (mut agent, _) = Agent::start(&tree, policy(), JOURNAL, true).unwrap();
        look(&mut agent).services[0].cause.what.clone()
    };
    assert!(dry(&|_| {}).starts_with("it is over local_high"));
    let goal = format!("{DAMON}/0/contexts/0/schemes/0/quotas/goals/0/path");
    assert_eq!(dry(&|tree| tree.put(&goal, "\n")), "the kernel would hold its share by goals of DAMON");
}

/// A host whose CXL device has a page of cache on a poisoned place.
fn poisoned(policy: &str, prepare: &dyn Fn(&Tree)) -> (Tree, Policy, BTreeMap<String, String>) {
    let tree = machine();
    tree.add_cxl("mem0");
    tree.put_bytes("/cache", [100 * MIB, 100 * MIB]);
    tree.set_nodes("/cache", "0-1");
    tree.poison("mem0", 0x1000, 0x1_1000_1000);
    tree.put_page(0x1_1000_1000, "/cache");
    prepare(&tree);
    let before = tree.settings();
    (tree, Policy::parse(&format!("{policy}{TEXT}")).unwrap(), before)
}

fn named(round: &Round) -> Vec<(Option<&str>, bool)> {
    let named = round.alarms.iter().filter_map(|alarm| match alarm {
        Alarm::CxlMemory { service, is_guess, .. } => Some((service.as_deref(), *is_guess)),
        _ => None,
    });
    named.collect()
}

#[test]
fn poison_names_the_service_whose_page_lies_there_and_the_policy_answers() {
    for (policy, off, cache, web) in [
        ("", false, 100 * MIB, 100 * MIB),
        ("health.bad_memory = \"alarm\"\n", false, 100 * MIB, 100 * MIB),
        ("health.bad_memory = \"opt-out\"\n", true, 200 * MIB, 100 * MIB),
        ("health.bad_memory = \"drain\"\n", true, 200 * MIB, 100 * MIB),
    ] {
        let (tree, policy, before) = poisoned(policy, &|_| {});
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
        let round = look(&mut agent);
        assert_eq!(named(&round), [(Some("cache"), false)]);
        let alarms = round.alarms.iter().map(ToString::to_string).collect::<String>();
        assert!(alarms.contains("cache has pages on bad memory of mem0: poison (Injected) at 0x1000 on the device, 0x110001000"), "{alarms}");
        assert_eq!((tree.bytes("/cache")[0], tree.bytes("/web")[0]), (cache, web));
        assert_eq!(round.services[0].bad_memory, 1);
        assert_eq!((round.devices[0].device.as_str(), round.devices[0].bad_places), ("mem0", 1));
        assert_eq!(
            round.services[0].cause.what.contains("CXL memory is bad"),
            off,
            "{:?}",
            round.services[0].cause
        );
        assert_eq!(tree.settings()["/sys/fs/cgroup/cache/cpuset.mems"], if off { "0" } else { "0-1" });
        // It stays so from round to round, and over a change of the policy.
        agent.change(agent.policy().clone()).unwrap();
        let round = agent.round(2000).unwrap().0;
        assert_eq!((named(&round).len(), round.services[0].bad_memory), (1, 1));
        assert_eq!(tree.settings()["/sys/fs/cgroup/cache/cpuset.mems"], if off { "0" } else { "0-1" });
        // The next look at the list finds it cleared, and the service may use both tiers again.
        tree.clear_poison("mem0");
        assert_eq!(named(&agent.round(3000).unwrap().0).len(), 1, "the list is asked for once a minute");
        let round = agent.round(70_000).unwrap().0;
        assert_eq!((named(&round).len(), round.devices[0].bad_places), (0, 0));
        assert_eq!(tree.settings()["/sys/fs/cgroup/cache/cpuset.mems"], "0-1");
        agent.stop().unwrap();
        assert_eq!(tree.settings(), before);
    }
}

#[test]
fn bad_places_and_services_cost_by_their_sum_and_not_by_their_product() {
    // Calls of the kernel and alarms, in a round that finds so many bad places, which hit as many services.
    let cost = |count: u64| {
        let tree = machine();
        tree.add_cxl("mem0");
        let mut text = "health.bad_memory = \"opt-out\"\n".to_owned();
        for index in 0..count {
            tree.add_group(&format!("/s{index}"), [MIB, MIB]);
            text += &format!("[service.s{index}]\ncgroup = \"/s{index}\"\ntier = \"opt-in\"\n");
            // Of every second place it is known whose page lies there; of the others, nothing.
            let page = 0x1_1000_1000 + 4096 * index;
            if index.is_multiple_of(2) {
                tree.put_page(page, &format!("/s{index}"));
            }
            tree.poison("mem0", 4096 * index, if index.is_multiple_of(2) { page } else { u64::MAX });
        }
        let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
        let before = tree.calls();
        let round = agent.round(0).unwrap().0;
        let calls = tree.calls() - before;
        assert_eq!(round.devices[0].bad_places, count);
        let hit = round.services.iter().filter(|row| row.bad_memory > 0).count() as u64;
        assert_eq!(hit, count, "every service may be hit");
        let named = named(&round);
        assert_eq!(named.iter().filter(|(service, _)| service.is_some()).count() as u64, count / 2);
        let output = round.alarms.iter().map(ToString::to_string).collect::<String>();
        assert!(
            output.contains(&format!("it may hit any of {count} services with bytes on the slow tier")),
            "{output}"
        );
        (calls, round.alarms.len() as u64)
    };
    let (few, many) = (cost(20), cost(160));
    assert!(many.0 <= 10 * few.0 && many.1 <= 9 * few.1, "{few:?} {many:?}");
    assert!(few.0 > 20, "the control: {few:?}");
}

#[test]
fn a_drain_keeps_every_service_off_a_device_that_is_not_well() {
    let (tree, policy, _) = poisoned("health.bad_memory = \"drain\"\n", &|tree| tree.clear_poison("mem0"));
    let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
    assert_eq!(named(&look(&mut agent)), []);
    tree.put_bytes("/cache", [120 * MIB, 80 * MIB]);
    tree.trace("cxl_memory_module: memdev=mem0 log=Failure : health_status='REPLACEMENT_NEEDED' media_status='Normal'");
    tree.trace("cxl_poison: memdev=mem0 dpa=none");
    let round = look(&mut agent);
    assert_eq!(
        named(&round),
        [(Some("cache"), true)],
        "it has bytes on the slow tier, and no place is named"
    );
    assert!(
        round
            .alarms
            .iter()
            .any(|alarm| alarm.kind() == "host-setting" && alarm.to_string().contains("dpa=0x"))
    );
    assert_eq!((round.devices[0].events, tree.bytes("/cache")[1]), (1, 0));
    assert_eq!(round.services[0].cause.line, Some(1));
    agent.change(agent.policy().clone()).unwrap();
    assert_eq!(named(&look(&mut agent)), [], "a reload forgets what is on no list");
}

#[test]
fn what_of_health_cannot_be_had_is_said() {
    let said = |prepare: &dyn Fn(&Tree)| {
        let (tree, policy, before) = poisoned("health.bad_memory = \"opt-out\"\n", prepare);
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
        let round = look(&mut agent);
        let moved = tree.bytes("/cache")[1] == 0;
        agent.stop().unwrap();
        assert_eq!(tree.settings(), before);
        (round.alarms.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"), moved)
    };
    let (untraced, moved) = said(&|tree| tree.take("/sys/kernel/tracing/events/cxl/enable"));
    assert!(untraced.contains("it needs 6.3 or later, tracefs") && !moved, "{untraced}");
    assert!(untraced.contains("poison and faults of CXL devices (mem0) are not seen"), "{untraced}");
    let (old, moved) = said(&|tree| tree.put("/proc/sys/kernel/osrelease", "6.10.1\n"));
    assert!(old.contains("may stop when it moves a poisoned page") && !moved, "{old}");
    let (unlisted, moved) = said(&|tree| {
        tree.take("/sys/bus/cxl/devices/mem0/trigger_poison_list");
        tree.put("/sys/bus/cxl/devices/mem0/serial", "1\n");
    });
    assert!(unlisted.contains("mem0: no trigger_poison_list") && !moved, "{unlisted}");
    let (other, moved) = said(&|tree| tree.make_folder(polder_linux::CxlWatch::path()).unwrap());
    assert!(other.contains("this agent did not make it") && !moved, "{other}");
    let tree = machine();
    assert!(look(&mut start(&tree)).devices.is_empty(), "a host without CXL devices");
}

#[test]
fn each_service_says_why_it_is_as_it_is_since_when_and_by_which_line() {
    let tree = machine();
    let mut agent = start(&tree);
    let mut causes = Vec::new();
    for round in 0..5 {
        let (round, _) = agent.round(1000 * round).unwrap();
        causes.push((round.services[0].cause.since_ms, round.services[0].cause.line));
    }
    assert_eq!(causes, [(0, Some(6)), (0, Some(6)), (0, Some(6)), (3000, Some(6)), (3000, Some(6))]);
    let history = &agent.causes()["cache"];
    let said: Vec<&str> = history.iter().map(|cause| cause.what.as_str()).collect();
    assert_eq!(said, ["it is over local_high, and its coldest pages go down", "it is within its bounds"]);
    assert_eq!(agent.causes()["web"][0].what, "it is opted out, and nothing lies on the slow tier");
}

#[test]
fn a_unit_is_found_in_slices_of_the_system_and_never_in_those_of_users() {
    let tree = machine();
    let policy = "step = \"32MiB\"\n[service.db]\nunit = \"db.service\"\ntier = \"background\"\n";
    tree.add_group("/user.slice", [0, 0]);
    tree.add_group("/user.slice/db.service", [MIB, 0]);
    tree.add_group("/system.slice", [0, 0]);
    tree.add_group("/system.slice/web.service", [0, 0]);
    tree.add_group("/system.slice/web.service/db.service", [MIB, 0]);
    let (mut agent, _) = Agent::start(&tree, Policy::parse(policy).unwrap(), JOURNAL, false).unwrap();
    let none = Alarm::NoSuchCgroup { service: "db".to_owned(), cgroup: "db.service".to_owned() };
    assert_eq!(look(&mut agent).alarms, [none]);
    tree.add_group("/system.slice/db.slice", [0, 0]);
    tree.add_group("/system.slice/db.slice/db.service", [8 * MIB, 0]);
    assert_eq!(look(&mut agent).services[0].cgroup, "/system.slice/db.slice/db.service");
    assert_eq!(tree.bytes("/system.slice/db.slice/db.service"), [0, 8 * MIB]);
    tree.rename_group("/system.slice/db.slice/db.service", "/system.slice/db.service");
    assert_eq!(look(&mut agent).services[0].cgroup, "/system.slice/db.service");
}

#[test]
fn pods_with_a_label_are_services_as_they_come_and_go() {
    const ADDRESS: &str = "http://127.0.0.1:10255/pods";
    const PATH: &str = "/kubepods/burstable/pod";
    let text = "[kubernetes]\npods = \"http://127.0.0.1:10255/pods\"\n\
        [service.web]\nlabel = \"app=web\"\nnamespace = \"shop\"\ntier = \"opt-out\"\n";
    let pods = include_str!("../../tests/pods.json");
    let (first, second) = ("b2c1f8c0-1df0-4c1c-9c6f-7a3de1b0a6f1", "c9a0d1de-7b44-4f5e-8d2a-63b7a9f0c4e2");
    let tree = machine();
    for id in [first, second] {
        tree.add_group(&format!("{PATH}{id}"), [50 * MIB, 30 * MIB]);
    }
    let before = tree.settings();
    let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
    let said = |round: &Round| round.alarms.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    let round = look(&mut agent);
    assert!(
        said(&round).contains("kubernetes.pods: http://127.0.0.1:10255/pods: connection refused"),
        "{}",
        said(&round)
    );
    tree.answer(ADDRESS, Some(pods));
    let round = agent.round(10_000).unwrap().0;
    let names: Vec<&str> = round.services.iter().map(|row| row.service.as_str()).collect();
    assert_eq!(names, ["web/web-6d4cf56db6-7xk2p", "web/web-6d4cf56db6-qz9lm"]);
    assert_eq!(tree.bytes(&format!("{PATH}{first}")), [80 * MIB, 0]);
    // A kubelet that cannot be reached for a while: its pods go on.
    tree.answer(ADDRESS, None);
    let round = agent.round(20_000).unwrap().0;
    assert_eq!((round.services.len(), said(&round).contains("connection refused")), (2, true));
    tree.answer(ADDRESS, Some("Unauthorized"));
    let round = agent.round(30_000).unwrap().0;
    assert!(round.services.len() == 2 && said(&round).contains("it is no list of pods"), "{}", said(&round));
    // One pod ends: before the kubelet's next list its cgroup is missed, and then it is forgotten.
    tree.remove_group(&format!("{PATH}{second}"));
    let round = agent.round(31_000).unwrap().0;
    assert!(
        round.services.len() == 1 && said(&round).contains("web/web-6d4cf56db6-qz9lm has no cgroup"),
        "{}",
        said(&round)
    );
    tree.answer(ADDRESS, Some(&pods.replace("\"phase\": \"Running\"", "\"phase\": \"Failed\"")));
    tree.remove_group(&format!("{PATH}{first}"));
    let round = agent.round(40_000).unwrap().0;
    assert_eq!(round.services.len(), 0);
    assert_eq!(said(&round), "web has no pods: no pod of this node is in the namespace shop");
    assert!(agent.causes().is_empty(), "pods that are gone leave nothing behind");
    agent.stop().unwrap();
    let settings = tree.settings();
    assert!(settings.iter().all(|(path, value)| before.get(path) == Some(value)), "{settings:?}");
}

#[test]
fn a_pod_that_two_labels_select_is_of_one_service() {
    let text = "[kubernetes]\npods = \"/etc/polder/pods.json\"\n\
        [service.all]\nlabel = \"app=web\"\ntier = \"opt-out\"\n\
        [service.canary]\nlabel = \"track=canary\"\ntier = \"background\"\n";
    let tree = machine();
    tree.add_group("/kubepods/burstable/podc9a0d1de-7b44-4f5e-8d2a-63b7a9f0c4e2", [50 * MIB, 30 * MIB]);
    tree.append("/etc/polder/pods.json", include_str!("../../tests/pods.json")).unwrap();
    let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
    let round = look(&mut agent);
    assert_eq!(round.services.len(), 1);
    let alarms = round.alarms.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    assert!(
        alarms.contains("canary/web-6d4cf56db6-qz9lm: the pod is that of all/web-6d4cf56db6-qz9lm too"),
        "{alarms}"
    );
    agent.stop().unwrap();
}

#[test]
fn pods_of_one_name_in_two_namespaces_are_two_services() {
    let pod = |namespace: &str, id: &str| {
        format!(
            "{{\"metadata\": {{\"name\": \"web-0\", \"namespace\": \"{namespace}\", \"uid\": \"{id}\", \"labels\": {{\"app\": \"web\"}}}}}}"
        )
    };
    let tree = machine();
    for id in ["a", "b"] {
        tree.add_group(&format!("/kubepods/pod{id}"), [50 * MIB, 0]);
    }
    let text = "[kubernetes]\npods = \"/pods.json\"\n[service.web]\nlabel = \"app=web\"\ntier = \"opt-in\"\n";
    tree.append("/pods.json", &format!("{{\"items\": [{}, {}]}}", pod("shop", "a"), pod("bank", "b")))
        .unwrap();
    let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
    let names: Vec<_> = look(&mut agent).services.into_iter().map(|row| row.service).collect();
    assert_eq!(names, ["web/shop/web-0", "web/bank/web-0"]);
    assert_eq!(agent.causes().len(), 2);
}

#[test]
fn a_cgroup_that_goes_at_any_step_is_an_alarm_and_leaves_nothing_behind() {
    let mut steps = 0;
    for calls in 0.. {
        let tree = machine();
        let mut before = tree.settings();
        tree.remove_after(calls, "/web");
        let mut agent = start(&tree);
        let mut alarms = vec![];
        for _ in 0..3 {
            // Demotion breaks the opt-out in each round.
            drop(tree.write("/sys/fs/cgroup/web/memory.reclaim", &(20 * MIB).to_string()));
            alarms.extend(look(&mut agent).alarms);
        }
        agent.stop().unwrap();
        if tree.bytes("/web") != [0, 0] {
            break;
        }
        let is_known =
            |alarm: &Alarm| matches!(alarm, Alarm::NoSuchCgroup { .. } | Alarm::OptOutBroken { .. });
        assert!(alarms.iter().all(is_known), "removed at step {calls}: {alarms:?}");
        before.remove("/sys/fs/cgroup/web/cpuset.mems");
        assert_eq!(tree.settings(), before, "removed at step {calls}");
        assert!(tree.disk().is_empty(), "removed at step {calls}");
        steps += 1;
    }
    println!("removed at {steps} steps");
    assert!(steps >= 60, "the agent took {steps} steps only");
}

#[test]
fn a_cgroup_without_a_controller_is_there_and_the_alarm_names_the_controller() {
    for (file, controller) in [("memory.numa_stat", "memory"), ("cpuset.mems.effective", "cpuset")] {
        let tree = machine();
        tree.take(&format!("/sys/fs/cgroup/web/{file}"));
        let mut agent = start(&tree);
        let alarms = look(&mut agent).alarms;
        let said = alarms.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        let expected = format!(
            "no {controller} controller; enable it with: echo +{controller} > /sys/fs/cgroup/cgroup.subtree_control"
        );
        assert!(alarms.len() == 1 && said.contains(&expected), "{said}");
    }
}

#[test]
fn page_cache_goes_down_and_a_kernel_that_cannot_tell_it_is_an_alarm() {
    let policy =
        "step = \"32MiB\"\n[service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\npage_cache = \"slow\"\n";
    for (can_tell, left) in [(true, 170), (false, 200)] {
        let tree = machine();
        tree.set_cache("/cache", [30 * MIB, 0]);
        if !can_tell {
            tree.lacks_swappiness();
        }
        let (mut agent, _) = Agent::start(&tree, Policy::parse(policy).unwrap(), JOURNAL, false).unwrap();
        let round = look(&mut agent);
        assert_eq!(tree.bytes("/cache")[0], left * MIB);
        let is_refused =
            matches!(&round.alarms[..], [Alarm::Refused { error, .. }] if error.contains("before Linux 6.9"));
        assert_eq!(is_refused, !can_tell, "{:?}", round.alarms);
    }
}

#[test]
fn interleave_weights_are_set_and_what_the_kernel_lacks_is_an_alarm() {
    let auto = "[interleave]\nweights = \"auto\"\n";
    let tree = machine();
    let alarms = |tree: &Tree| {
        let (mut agent, _) = Agent::start(tree, Policy::parse(auto).unwrap(), JOURNAL, false).unwrap();
        let alarms = look(&mut agent).alarms;
        let weights = [0, 1].map(|node| tree.read(&format!("{INTERLEAVE}/node{node}")).unwrap_or_default());
        agent.stop().unwrap();
        (alarms.len(), weights.concat())
    };
    assert_eq!(alarms(&tree), (1, "1\n1\n".to_owned()), "HMAT is missing");
    for (node, rate) in [(0, 60_000), (1, 20_000)] {
        let path = format!("/sys/devices/system/node/node{node}/access0/initiators/read_bandwidth");
        tree.put(&path, &rate.to_string());
    }
    let before = tree.settings();
    assert_eq!(alarms(&tree), (0, "3\n1\n".to_owned()));
    assert_eq!(tree.settings(), before);
    tree.take(&format!("{INTERLEAVE}/node0"));
    tree.take(&format!("{INTERLEAVE}/node1"));
    assert_eq!(alarms(&tree).0, 2, "each weight is named");
}

#[test]
fn weights_that_the_kernel_derived_are_derived_again_after_a_stop() {
    let tree = machine();
    tree.derives_weights();
    let before = tree.settings();
    let policy = Policy::parse("[interleave]\nweights = { 0 = 3, 1 = 1 }\n").unwrap();
    let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
    assert_eq!(tree.settings()[INTERLEAVE_AUTO], "false\n");
    agent.change(Policy::parse("").unwrap()).unwrap();
    assert_eq!(tree.settings(), before);
}

#[test]
fn a_service_that_suffers_or_loses_processes_is_seen() {
    let tree = machine();
    let mut agent = start(&tree);
    look(&mut agent);
    tree.suffer("/cache", 25.0, 0, 2);
    let round = look(&mut agent);
    assert_eq!(round.services[0].demoted, 0);
    assert!(round.services[0].cause.what.contains("pressure_limit"));
    assert_eq!(round.alarms, [Alarm::OomKill { service: "cache".to_owned(), kills: 2 }]);
    tree.suffer("/cache", 0.0, 1_000_000, 0);
    assert!(look(&mut agent).services[0].cause.what.contains("refault_limit"));
}

#[test]
fn an_opt_out_keeps_the_nodes_that_an_operator_left_out() {
    let tree = machine();
    tree.set_parent_nodes("/web", "1");
    let mut agent = start(&tree);
    let alarms = look(&mut agent).alarms;
    let is_named = |alarm: &Alarm| matches!(alarm, Alarm::Refused { error, .. } if error.contains("give the parent a fast node"));
    assert!(alarms.iter().any(is_named), "{alarms:?}");
    agent.stop().unwrap();
}

#[test]
fn a_record_of_a_run_replays_to_the_same_decisions() {
    for text in [TEXT, &TEXT.replace("step = \"32MiB\"\n", "period = \"700ms\"\n")] {
        let tree = machine();
        tree.moves_at(1e9 / 3.0);
        let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
        let mut record = Vec::new();
        for round in 0..12 {
            if round == 4 {
                tree.suffer("/cache", 25.0, 0, 0);
            }
            if round == 5 {
                tree.suffer("/cache", 0.37, 0, 0);
                tree.put_bytes("/cache", [400 * MIB, 0]);
            }
            let line = serde_json::to_string(&agent.round(0).unwrap().1).unwrap();
            record.push(serde_json::from_str(&line).unwrap());
        }
        let (moves, otherwise) = pages::replay(&record);
        assert_eq!(otherwise, None, "{text}");
        assert!(moves >= 8, "{moves} moves: {text}");
    }
}

/// A policy of up to four services, with keys of the host, drawn.
fn any_policy() -> impl Strategy<Value = Policy> {
    let service = (0..4usize, 0..3usize, 0.0..1.0f64, 0.0..1.0f64, any::<bool>(), any::<bool>());
    let answers = proptest::sample::select(vec!["", "alarm", "opt-out", "drain"]);
    let host = (0..4usize, proptest::option::of(1..1000u64), any::<bool>(), any::<bool>(), answers);
    (proptest::collection::vec(service, 0..4), host).prop_map(
        |(drawn, (weights, rate, fills, by_kernel, answer))| {
            let mut text = String::new();
            if by_kernel {
                text += "fair_share = \"kernel\"\n";
            }
            if !answer.is_empty() {
                text += &format!("health.bad_memory = \"{answer}\"\n");
            }
            if let Some(rate) = rate {
                text += &format!("promotion_limit = \"{rate}MB/s\"\n");
            }
            if fills {
                text += "free_low = 0.4\nfree_high = 0.5\n";
            }
            text += [
                "",
                "[interleave]\nweights = \"auto\"\n",
                "[interleave]\nweights = { 0 = 5, 1 = 2 }\n",
                "[interleave]\nweights = { 0 = 5, 9 = 2 }\n",
            ][weights];
            let mut taken = BTreeSet::new();
            for (group, rule, a, b, by_unit, slow_cache) in drawn {
                if !taken.insert(group) {
                    continue;
                }
                let tier = ["opt-in", "opt-out", "background"][rule];
                let place = match by_unit {
                    true => format!("unit = \"g{group}.service\""),
                    false => format!("cgroup = \"/system.slice/g{group}.service\""),
                };
                text += &format!("[service.s{group}]\n{place}\ntier = \"{tier}\"\n");
                if rule == 0 {
                    text += &format!("local_low = {:?}\nlocal_high = {:?}\n", a.min(b), a.max(b));
                }
                if slow_cache && rule != 1 {
                    text += "page_cache = \"slow\"\n";
                }
            }
            Policy::parse(&text).expect(&text)
        },
    )
}

/// What happens to a host beside the agent, before one of its changes.
#[derive(Clone, Debug)]
enum Event {
    Killed,
    Busy(u64),
    Gone(usize),
    Renamed(usize),
    Recreated(usize),
    LosesFile(usize, usize),
    Suffers(usize),
    Grows(usize),
    Poisoned(usize),
    Cleared,
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::Killed),
        (0..6u64).prop_map(Event::Busy),
        (0..4usize).prop_map(Event::Gone),
        (0..4usize).prop_map(Event::Renamed),
        (0..4usize).prop_map(Event::Recreated),
        (0..4usize, 0..4usize).prop_map(|(group, file)| Event::LosesFile(group, file)),
        (0..4usize).prop_map(Event::Suffers),
        (0..4usize).prop_map(Event::Grows),
        (0..4usize).prop_map(Event::Poisoned),
        Just(Event::Cleared),
    ]
}

const FILES: [&str; 4] = ["memory.pressure", "memory.reclaim", "memory.stat", "cpuset.mems"];

fn happen(tree: &Tree, event: &Event, before: &mut BTreeMap<String, String>) {
    let path = |group: &usize| format!("/system.slice/g{group}.service");
    let mems = |group: &usize| format!("/sys/fs/cgroup{}/cpuset.mems", path(group));
    match event {
        Event::Killed => {}
        Event::Busy(writes) => tree.busy_after(*writes),
        Event::Gone(group) => {
            tree.remove_group(&path(group));
            before.remove(&mems(group));
        }
        Event::Renamed(group) => {
            let to = format!("/system.slice/renamed.slice/g{group}.service");
            if before.remove(&mems(group)).is_some() {
                tree.rename_group(&path(group), &to);
                before.insert(format!("/sys/fs/cgroup{to}/cpuset.mems"), "0-1".to_owned());
            }
        }
        Event::Recreated(group) => {
            tree.add_group(&path(group), [70 * MIB, 10 * MIB]);
            before.insert(mems(group), "0-1".to_owned());
        }
        Event::LosesFile(group, 3) => {
            // A controller that is turned off takes the setting with it.
            if before.contains_key(&mems(group)) && tree.settings()[&mems(group)] == before[&mems(group)] {
                tree.take(&mems(group));
            }
        }
        Event::LosesFile(group, file) => {
            tree.take(&format!("/sys/fs/cgroup{}/{}", path(group), FILES[*file]))
        }
        Event::Suffers(group) => tree.suffer(&path(group), 30.0, 5000, 1),
        Event::Grows(group) => tree.put_bytes(&path(group), [90 * MIB, 30 * MIB]),
        Event::Poisoned(group) => {
            let at = *group as u64 * 4096;
            tree.poison("mem0", at, 0x1_0000_0000 + at);
            tree.put_page(0x1_0000_0000 + at, &path(group));
        }
        Event::Cleared => tree.clear_poison("mem0"),
    }
}

#[test]
fn ten_thousand_random_policy_changes_leave_every_setting_as_found() {
    const RUNS: u32 = 500;
    const CHANGES: usize = 20;
    let made = std::cell::Cell::new([0_u64; 3]);
    let strategy = (
        proptest::collection::vec((any_policy(), proptest::option::of(any_event())), CHANGES),
        proptest::option::of(1..200u64),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    );
    let config = ProptestConfig { cases: RUNS, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let outcome = runner.run(&strategy, |(changes, kill, derives, goals, cxl)| {
        let tree = Tree::new(512 * MIB);
        if cxl {
            tree.add_cxl("mem0");
        }
        if goals {
            tree.has_goals("6.19.0-fake");
        }
        if derives {
            tree.derives_weights();
        }
        tree.add_group("/system.slice", [0, 0]);
        for group in 0..4 {
            let path = format!("/system.slice/g{group}.service");
            tree.add_group(&path, [60 * MIB, 30 * MIB]);
            tree.set_cache(&path, [20 * MIB, 0]);
            tree.set_nodes(&path, ["", "0", "0-1", "1"][group]);
            tree.set_parent_nodes(&path, ["", "", "0", ""][group]);
        }
        let mut before = tree.settings();
        tree.kill_after(kill.unwrap_or(u64::MAX));
        let [mut count, mut kills, mut moved] = made.get();
        let mut agent = Agent::start(&tree, Policy::parse("").unwrap(), JOURNAL, false).ok();
        for (policy, event) in changes {
            if let Some(event) = &event {
                happen(&tree, event, &mut before);
                if matches!(event, Event::Killed) {
                    agent = None;
                }
            }
            if agent.is_none() || tree.is_dead() {
                // It was killed, and a service manager starts it anew.
                kills += 1;
                tree.revive();
                agent =
                    Agent::start(&tree, policy, JOURNAL, false).ok().map(|(agent, _)| (agent, Vec::new()));
            } else if let Some((agent, _)) = &mut agent {
                // What fails is an alarm of the next round.
                drop(agent.change(policy));
            }
            if let Some((agent, _)) = &mut agent {
                moved += agent.round(0).map_or(0, |(_, recorded)| recorded.decision.moves.len() as u64);
            }
            count += 1;
        }
        made.set([count, kills, moved]);
        if let Some((mut agent, _)) = agent {
            drop(agent.stop());
        }
        if tree.is_dead() || !tree.disk().is_empty() {
            tree.revive();
            Settings::start(&tree, JOURNAL).unwrap();
        }
        prop_assert_eq!(tree.settings(), before);
        prop_assert!(tree.disk().is_empty());
        Ok(())
    });
    let [count, kills, moved] = made.get();
    println!("{count} changes, {kills} kills, {moved} moves");
    if let Err(error) = outcome {
        panic!("{error}");
    }
    assert!(
        count >= 10_000 && kills >= 500 && moved >= 5_000,
        "{count} changes, {kills} kills, {moved} moves"
    );
}

#[test]
fn a_service_with_another_inside_is_left_alone_and_the_other_is_not() {
    let tree = Tree::new(512 * MIB);
    tree.add_group("/db.slice", [200 * MIB, 0]);
    tree.add_group("/db.slice/pg.service", [80 * MIB, 20 * MIB]);
    let text = "[service.parent]\ncgroup = \"/db.slice\"\ntier = \"opt-in\"\nlocal_high = 0.5\n\
        [service.child]\ncgroup = \"/db.slice/pg.service\"\ntier = \"opt-out\"\n";
    let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
    let round = look(&mut agent);
    let refused = round.alarms.iter().find_map(|alarm| match alarm {
        Alarm::Refused { service, error } if service == "parent" => Some(error.as_str()),
        _ => None,
    });
    assert!(
        refused.unwrap().contains("the service child is inside it (/db.slice/pg.service)"),
        "{refused:?}"
    );
    let names: Vec<&str> = round.services.iter().map(|row| row.service.as_str()).collect();
    assert_eq!(names, ["child"]);
    assert_eq!(tree.bytes("/db.slice"), [200 * MIB, 0]);
    assert!(agent.causes()["parent"][0].what.starts_with("it is left alone: /db.slice: the service child"));
}

#[test]
fn a_cgroup_that_two_services_name_is_left_alone_and_both_say_why() {
    let tree = Tree::new(512 * MIB);
    tree.add_group("/system.slice", [0, 0]);
    tree.add_group("/system.slice/web.service", [80 * MIB, 20 * MIB]);
    let text = "[service.path]\ncgroup = \"/system.slice/web.service\"\ntier = \"opt-out\"\n\
        [service.unit]\nunit = \"web.service\"\ntier = \"opt-in\"\nlocal_high = 0.5\n";
    let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
    let round = look(&mut agent);
    let errors: Vec<String> = round.alarms.iter().map(ToString::to_string).collect();
    assert_eq!(
        errors,
        [
            "path: /system.slice/web.service is the cgroup of the service unit too; name it once",
            "unit: /system.slice/web.service is the cgroup of the service path too; name it once",
        ]
    );
    assert_eq!((round.services.len(), tree.bytes("/system.slice/web.service")), (0, [80 * MIB, 20 * MIB]));
}

/// The text with another number in the place of each.
fn with_numbers(text: &str, number: &str) -> String {
    let word = |(index, word): (usize, &str)| match word.rsplit_once('=') {
        Some((name, _)) => format!("{name}={number}"),
        None if index > 0 && word.parse::<f64>().is_ok() => number.to_owned(),
        None => word.to_owned(),
    };
    let line = |line: &str| line.split(' ').enumerate().map(word).collect::<Vec<_>>().join(" ") + "\n";
    text.lines().map(line).collect()
}

#[test]
fn a_file_that_says_what_no_kernel_says_is_an_alarm_and_never_taken_for_nothing() {
    let seen = |damaged: Option<(&str, &str)>| {
        let tree = machine();
        tree.suffer("/cache", 0.0, 0, 3);
        if let Some((path, text)) = damaged {
            tree.take(path);
            tree.put(path, text);
        }
        let mut agent = start(&tree);
        let round = look(&mut agent);
        let row = round.services.into_iter().find(|row| row.service == "cache");
        let row = row.map(|it| (it.fast, it.slow, it.pressure, it.refaults, it.demoted, it.oom_kills));
        let service =
            damaged.map_or("cache", |(path, _)| if path.contains("/web/") { "web" } else { "cache" });
        (row, round.alarms.iter().any(|alarm| alarm.service() == Some(service)))
    };
    let (sound, mut alarms) = (seen(None), 0);
    assert!(sound.0.is_some() && !sound.1, "the control");
    for file in
        ["memory.numa_stat", "memory.stat", "memory.events", "memory.pressure", "cpuset.mems.effective"]
    {
        let path = format!("/sys/fs/cgroup/cache/{file}");
        let text = machine().read(&path).unwrap();
        let numbers = ["max", "nan", "inf", "-1", "1e300", "18446744073709551615", "1152921504606846976"];
        let whole = ["", "\n", "max\n", "nothing of it\n", "\u{fffd}\n"].map(str::to_owned);
        for damaged in numbers.map(|number| with_numbers(&text, number)).into_iter().chain(whole) {
            let now = seen(Some((&path, &damaged)));
            assert!(now == sound || now.1, "{path}: {damaged:?} was taken for {:?}", now.0);
            alarms += u32::from(now.1);
        }
    }
    assert!(alarms >= 40, "{alarms} alarms");
    // An empty list would be within the fast tier.
    assert!(seen(Some(("/sys/fs/cgroup/web/cpuset.mems.effective", "\n"))).1, "an opted-out service");
}

#[test]
fn memory_that_comes_on_line_or_goes_is_seen_in_the_next_round() {
    const NODES: &str = "/sys/devices/system/node";
    const WEB: &str = "/sys/fs/cgroup/web/memory.numa_stat";
    let online = |tree: &Tree, nodes: &str, slow: &str| {
        tree.put(&format!("{NODES}/has_memory"), nodes);
        tree.put("/sys/devices/virtual/memory_tiering/memory_tier90/nodelist", slow);
    };
    let tree = machine();
    let before = tree.settings();
    let mut agent = start(&tree);
    let slow = look(&mut agent).slow.bytes;
    assert!(look(&mut agent).alarms.is_empty());
    // A second slow node, and pages of an opted-out service on it.
    online(&tree, "0-2", "1-2");
    let text = format!("Node 2 MemTotal: {} kB\nNode 2 MemFree: {} kB\n", 1 << 20, 1 << 19);
    tree.put(&format!("{NODES}/node2/meminfo"), &text);
    tree.take(WEB);
    tree.put(WEB, &format!("anon N0={} N1=0 N2={}\nfile N0=0 N1=0 N2=0\n", 80 * MIB, 20 * MIB));
    let round = look(&mut agent);
    assert_eq!(round.slow.bytes, slow + 1024 * MIB);
    let broken = |alarm: &Alarm| matches!(alarm, Alarm::OptOutBroken { service, found, .. } if service == "web" && *found == 20 * MIB);
    assert!(round.alarms.iter().any(broken), "{:?}", round.alarms);
    assert_eq!(polder_linux::show_nodes(&agent.tiers().slow), "1-2");
    // It goes again, and then the other.
    online(&tree, "0-1", "1");
    assert_eq!(look(&mut agent).slow.bytes, slow);
    tree.put(&format!("{NODES}/has_memory"), "0");
    let error = agent.round(0).unwrap_err().to_string();
    assert!(error.starts_with("this machine has one tier of memory (nodes 0)"), "{error}");
    agent.stop().unwrap();
    tree.put(&format!("{NODES}/has_memory"), "0-1\n");
    let is_setting = |path: &&String| !path.starts_with(NODES) && !path.contains("nodelist") && *path != WEB;
    for (path, value) in before.iter().filter(|(path, _)| is_setting(path)) {
        assert_eq!(tree.settings().get(path), Some(value), "{path}");
    }
}

#[test]
fn a_default_alone_has_the_kernel_demote_and_hold_shares() {
    let unit = "/system.slice/cron.service";
    let rest = "default = \"rest\"\n[profile.rest]\ntier = \"opt-in\"\nlocal_high = 0.5\n";
    let run = |text: &str, prepare: &dyn Fn(&Tree)| {
        let tree = Tree::new(512 * MIB);
        tree.add_group(unit, [200 * MIB, 0]);
        prepare(&tree);
        let before = tree.settings();
        let policy = Policy::parse(&format!("step = \"1GiB\"\n{text}{rest}")).unwrap();
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
        assert_eq!(tree.settings()[DEMOTION], "true\n", "else reclaim evicts");
        let round = look(&mut agent);
        let bytes = tree.bytes(unit);
        agent.stop().unwrap();
        assert_eq!(tree.settings()[DEMOTION], before[DEMOTION]);
        (bytes, round.services[0].cause.what.clone())
    };
    assert_eq!(run("", &|_| {}).0, [100 * MIB, 100 * MIB]);
    let (_, why) = run("fair_share = \"kernel\"\n", &|tree| tree.has_goals("6.19.0"));
    assert_eq!(why, "the kernel holds its share by goals of DAMON");
}

#[test]
fn what_another_program_changes_is_set_again_before_anything_goes_down() {
    let tree = machine();
    let before = tree.settings();
    let mut agent = start(&tree);
    look(&mut agent);
    let resets = |tree: &Tree| {
        tree.put(DEMOTION, "false\n");
        tree.put(polder_linux::BALANCING, "0\n");
    };
    let told = |round: &Round, what: &str| {
        let is_told =
            |alarm: &&Alarm| matches!(alarm, Alarm::HostSetting { error, .. } if error.contains(what));
        round.alarms.iter().filter(is_told).count()
    };
    resets(&tree);
    let round = look(&mut agent);
    assert_eq!((told(&round, "another program changed"), round.services[0].demoted), (2, 32 * MIB));
    let again: Vec<String> = round.settings.iter().map(ToString::to_string).collect();
    assert!(again.contains(&format!("{DEMOTION}: false -> true")), "{again:?}");
    assert_eq!(look(&mut agent).alarms, []);
    // Where that is refused nothing goes down: the kernel would evict.
    tree.put_bytes("/cache", [200 * MIB, 0]);
    resets(&tree);
    tree.busy_after(0);
    let (round, recorded) = agent.round(0).unwrap();
    assert_eq!((told(&round, DEMOTION), recorded.limits.step, recorded.decision.moves), (1, 0, vec![]));
    assert_eq!(look(&mut agent).services[0].demoted, 32 * MIB, "the next round tries again");
    agent.stop().unwrap();
    assert_eq!(tree.settings()[DEMOTION], before[DEMOTION]);
    assert_eq!(tree.settings()[polder_linux::BALANCING], before[polder_linux::BALANCING]);
}

#[test]
fn a_setting_that_was_refused_at_the_start_is_tried_again_and_its_alarm_goes() {
    let tree = machine();
    // After demotion and balancing.
    tree.busy_after(2);
    let policy = Policy::parse(&format!("promotion_limit = \"16MiB/s\"\n{TEXT}")).unwrap();
    let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
    assert_eq!(tree.settings()[PROMOTION_LIMIT], "65536\n", "the control");
    assert_eq!(look(&mut agent).alarms, []);
    assert_eq!(tree.settings()[PROMOTION_LIMIT], "16\n");
}

#[test]
fn a_limit_of_promotion_is_of_all_fast_nodes_and_in_the_kernel_s_mib() {
    let mib = [(machine(), "200MiB/s", "200\n"), (machine(), "200MB/s", "190\n")];
    let of_two = [(two_sockets(0), "200MiB/s", "100\n"), (two_sockets(0), "1MB/s", "1\n")];
    for (tree, limit, set) in mib.into_iter().chain(of_two) {
        let text = format!("promotion_limit = {limit:?}\n[service.a]\ncgroup = \"/a\"\ntier = \"opt-in\"\n");
        let (_agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
        assert_eq!(tree.settings()[PROMOTION_LIMIT], set, "{limit}");
    }
    // What the agent lets the kernel promote is of all nodes too.
    let tree = two_sockets(0);
    tree.add_group("/cache", [400 * MIB, 0]);
    tree.set_parent_nodes("/cache", "0-3");
    let (mut agent, _) =
        Agent::start(&tree, Policy::parse(&TEXT.replace("/web", "/w")).unwrap(), JOURNAL, false).unwrap();
    let (.., round) = under_promotion(&tree, &mut agent, 24 * MIB, 8);
    let set: u64 = tree.settings()[PROMOTION_LIMIT].trim().parse().unwrap();
    assert_eq!(round.kernel_promotes, Some(2 * set * MIB), "{:?}", round.alarms);
}

/// The host has pages of 64 KiB, as its counts of managed pages say.
fn has_large_pages(tree: &Tree, fast: u64) {
    let text = format!("Node 0, zone   Normal\n  pages free     9\n        managed  {}\n", fast >> 16);
    tree.put("/proc/zoneinfo", &text);
}

#[test]
fn on_a_host_of_large_pages_no_round_moves_more_than_its_step() {
    const LARGE: u64 = 64 << 10;
    let mut text = "step = \"256KiB\"\n".to_owned();
    let tree = Tree::new(8192 * MIB);
    has_large_pages(&tree, 8192 * MIB);
    for index in 0..32 {
        tree.add_group(&format!("/s{index}"), [100 * MIB, 0]);
        text += &format!("[service.s{index}]\ncgroup = \"/s{index}\"\ntier = \"opt-in\"\nlocal_high = 0.5\n");
    }
    let moved = || (0..32).map(|index| tree.bytes(&format!("/s{index}"))[1]).sum::<u64>();
    for (step, most) in [("256KiB", 4 * LARGE), ("4KiB", LARGE)] {
        let policy = Policy::parse(&text.replace("256KiB", step)).unwrap();
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, false).unwrap();
        for _ in 0..12 {
            let before = moved();
            let (_, recorded) = agent.round(0).unwrap();
            assert_eq!(recorded.limits.page, LARGE);
            assert!(moved() - before <= most, "{step}: {}", moved() - before);
            let text = serde_json::to_string(&recorded).unwrap();
            assert_eq!(serde_json::from_str::<RecordedRound>(&text).unwrap(), recorded);
        }
        assert!(moved() >= 4 * most, "{step}");
        agent.stop().unwrap();
    }
}

#[test]
fn a_service_has_small_pages_where_the_kernel_counts_no_huge_one_and_makes_none_between() {
    const SIZES: &str = "/sys/kernel/mm/transparent_hugepage";
    let is_small = |huge: &str, middle: Option<&str>| {
        let tree = machine();
        tree.put(&format!("{SIZES}/hpage_pmd_size"), "2097152\n");
        tree.put(&format!("{SIZES}/hugepages-2048kB/enabled"), "[inherit] never\n");
        if let Some(enabled) = middle {
            tree.put(&format!("{SIZES}/hugepages-64kB/enabled"), enabled);
        }
        let stat = "/sys/fs/cgroup/cache/memory.stat";
        let text = tree.read(stat).unwrap() + huge;
        tree.take(stat);
        tree.put(stat, &text);
        start(&tree).round(0).unwrap().1.services[0].seen.has_small_pages
    };
    let none = "anon_thp 0\nfile_thp 0\nshmem_thp 0\n";
    assert!(is_small(none, None) && is_small(none, Some("always inherit madvise [never]\n")));
    assert!(!is_small("", None), "where it is not counted, it is not known");
    assert!(
        !is_small("anon_thp 2097152\nfile_thp 0\n", None) && !is_small("anon_thp 0\nfile_thp 4096\n", None)
    );
    assert!(!is_small(none, Some("always [inherit] madvise never\n")));
}

/// One service of 200 MiB that is to give half, on a machine that `change` has changed: the first round, what it has then, and its causes
/// after another if there was an alarm.
fn gives(change: &dyn Fn(&Tree), dry_run: bool) -> (Round, [u64; 2], BTreeMap<String, Vec<Cause>>) {
    let tree = Tree::new(512 * MIB);
    tree.add_group("/web", [200 * MIB, 0]);
    change(&tree);
    let text = "step = \"1GiB\"\n[service.web]\ncgroup = \"/web\"\ntier = \"opt-in\"\nlocal_high = 0.5\n";
    let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, dry_run).unwrap();
    let round = look(&mut agent);
    let bytes = tree.bytes("/web");
    if !round.alarms.is_empty() {
        look(&mut agent);
    }
    (round, bytes, agent.causes())
}

#[test]
fn a_service_whose_pages_cannot_go_down_is_not_asked_and_says_why() {
    let pinned: &dyn Fn(&Tree) = &|tree| tree.set_nodes("/web", "0");
    let old: &dyn Fn(&Tree) = &|tree| tree.take("/sys/fs/cgroup/web/memory.reclaim");
    for dry_run in [false, true] {
        for (change, why) in [
            (pinned, "its cpuset.mems (0) leaves out the slow nodes 1"),
            (old, "the kernel has no memory.reclaim before Linux 5.19"),
        ] {
            let (round, bytes, causes) = gives(change, dry_run);
            assert_eq!(bytes, [200 * MIB, 0], "{why}");
            let [Alarm::Refused { error, .. }] = &round.alarms[..] else { panic!("{:?}", round.alarms) };
            assert!(error.contains(why), "{error}");
            let row = &round.services[0];
            assert_eq!(row.demoted, 0);
            assert!(row.cause.what.contains(why), "{}", row.cause.what);
            assert_eq!(causes["web"].len(), 1, "{causes:?}");
            assert_eq!((&causes["web"][0].what, causes["web"][0].since_round), (&row.cause.what, 1));
        }
    }
    // The control: nothing is in the way.
    let (round, bytes, _) = gives(&|_| {}, false);
    assert_eq!((round.alarms.len(), bytes), (0, [100 * MIB, 100 * MIB]));
}

#[test]
fn a_kernel_that_evicts_unless_told_to_demote_is_told() {
    let (round, bytes, _) = gives(&|tree| tree.wants_demote(), false);
    assert_eq!((round.alarms.len(), bytes), (0, [100 * MIB, 100 * MIB]));
}

#[test]
fn reserved_huge_pages_are_part_of_what_a_service_has() {
    let tree = machine();
    tree.put("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "8\n");
    tree.put("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n");
    tree.put("/sys/fs/cgroup/web/hugetlb.2MB.numa_stat", "total=16777216 N0=0 N1=16777216\n");
    let mut agent = start(&tree);
    let round = look(&mut agent);
    let row = round.services.iter().find(|row| row.service == "web").unwrap();
    // The 20 MiB that demotion had put there came back when its nodes were narrowed.
    assert_eq!(row.slow, 16 * MIB);
    assert_eq!(row.cause.what, "it is opted out, and what demotion put on the slow tier is brought back");
}

#[test]
fn units_that_no_line_names_have_the_default_and_the_agent_itself_has_not() {
    let tree = Tree::new(4096 * MIB);
    let named = ["/system.slice/web.service", "/system.slice/db.slice/pg.service", "/app.slice"];
    let inside = ["/app.slice/x.scope", "/system.slice/polder-agent.service", "/user.slice/user@1.service"];
    let unnamed =
        ["/system.slice/cron.service", "/system.slice/docker-1.scope", "/app.slice-2.slice/y.service"];
    for path in named.iter().chain(&inside).chain(&unnamed) {
        tree.add_group(path, [100 * MIB, 0]);
    }
    tree.put("/proc/self/cgroup", "0::/system.slice/polder-agent.service\n");
    let keep = "tier = \"opt-in\"\n";
    let text = format!(
        "step = \"1GiB\"\ndefault = \"batch\"\n[profile.batch]\ntier = \"background\"\n\
         [service.web]\nunit = \"web.service\"\n{keep}[service.pg]\ncgroup = \"{}\"\n{keep}\
         [service.app]\ncgroup = \"/app.slice\"\n{keep}",
        named[1]
    );
    let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
    let round = look(&mut agent);
    assert_eq!(round.alarms, []);
    for (paths, bytes) in [(&named, [100 * MIB, 0]), (&inside, [100 * MIB, 0]), (&unnamed, [0, 100 * MIB])] {
        for path in paths {
            assert_eq!(tree.bytes(path), bytes, "{path}");
        }
    }
    let rows: Vec<&str> = round.services.iter().map(|row| row.service.as_str()).collect();
    assert_eq!(
        rows[3..],
        ["app.slice-2.slice/y.service", "system.slice/cron.service", "system.slice/docker-1.scope"]
    );
    assert_eq!(round.services[4].cause.line, Some(4));
    // One that ends is no alarm, and the next round has it no more.
    tree.remove_group(unnamed[0]);
    let round = look(&mut agent);
    assert_eq!((round.alarms.len(), round.services.len()), (0, 5));
}

/// Rounds in which the kernel promotes as much of `/cache` as it is told to, up to `wants` bytes: what came up, and what went down.
fn under_promotion(tree: &Tree, agent: &mut Agent<&Tree>, wants: u64, rounds: usize) -> (u64, u64, Round) {
    let (mut up, mut down, mut last, mut told) = (0, 0, Round::default(), vec![]);
    for _ in 0..rounds {
        let limit = tree.read(PROMOTION_LIMIT).unwrap().trim().parse::<u64>().unwrap() * 2 * MIB;
        let before = tree.bytes("/cache")[0];
        tree.promotes_of("/cache", wants.min(limit));
        up += tree.bytes("/cache")[0] - before;
        let before = last.kernel_promotes;
        last = look(agent);
        told.extend(
            last.settings.iter().filter(|_| before.is_some() && last.kernel_promotes.is_some()).cloned(),
        );
        down += last.services[0].demoted;
    }
    assert_eq!(told, [], "each step of the limit is no line of the log");
    (up, down, last)
}

#[test]
fn a_kernel_that_brings_a_service_over_its_bound_is_held_back_until_it_does_no_more() {
    let tree = machine();
    let mut agent = start(&tree);
    let found = tree.settings()[PROMOTION_LIMIT].clone();
    under_promotion(&tree, &mut agent, 0, 5);
    let (up, down, round) = under_promotion(&tree, &mut agent, 24 * MIB, 20);
    // Without the limit it would have been 480 MiB each way.
    assert!(up < 200 * MIB && down.abs_diff(up) <= 32 * MIB, "{up} up and {down} down");
    let row = &round.services[0];
    assert!(row.returned > 8 * MIB && row.returned <= up, "{row:?}");
    assert_eq!(agent.causes()["cache"].iter().filter(|it| it.what.contains("they come back")).count(), 1);
    assert!(round.kernel_promotes.is_some_and(|rate| rate <= 8 * MIB), "{round:?}");
    let metrics = crate::Metrics::new();
    metrics.observe(&round);
    for line in [
        format!("polder_service_returned_bytes_total{{service=\"cache\"}} {}", row.returned),
        format!("polder_promotion_throttle_bytes_per_second {}", round.kernel_promotes.unwrap()),
    ] {
        assert!(metrics.text().lines().any(|found| found == line), "{line}\n{}", metrics.text());
    }
    let (.., round) = under_promotion(&tree, &mut agent, 0, 12);
    assert_eq!((round.kernel_promotes, &tree.settings()[PROMOTION_LIMIT]), (None, &found));
}

#[test]
fn a_kernel_is_held_back_below_the_limit_of_the_policy_and_a_stop_gives_back_what_was_found() {
    let tree = machine();
    let text = format!("promotion_limit = \"16MiB/s\"\n{TEXT}");
    let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
    under_promotion(&tree, &mut agent, 0, 5);
    tree.busy_after(0);
    let (.., round) = under_promotion(&tree, &mut agent, 24 * MIB, 1);
    assert!(
        matches!(&round.alarms[..], [Alarm::HostSetting { key, .. }] if key == "local_high"),
        "{round:?}"
    );
    let (.., round) = under_promotion(&tree, &mut agent, 24 * MIB, 10);
    assert!(round.kernel_promotes.is_some() && round.alarms.is_empty(), "it is tried again");
    agent.change(Policy::parse(&text).unwrap()).unwrap();
    assert_eq!(tree.settings()[PROMOTION_LIMIT], "16\n", "the policy's own");
    let (.., round) = under_promotion(&tree, &mut agent, 24 * MIB, 2);
    let told = round.kernel_promotes.map(|rate| format!("{}\n", rate / MIB));
    assert_eq!(
        told.as_ref(),
        tree.settings().get(PROMOTION_LIMIT),
        "and less again, as its promotions go on"
    );
    under_promotion(&tree, &mut agent, 0, 12);
    assert_eq!(tree.settings()[PROMOTION_LIMIT], "16\n");
    under_promotion(&tree, &mut agent, 24 * MIB, 10);
    agent.stop().unwrap();
    assert_eq!(tree.settings()[PROMOTION_LIMIT], "65536\n");
    // One that the operator has set lower stays.
    tree.put(PROMOTION_LIMIT, "1\n");
    let mut agent = start(&tree);
    under_promotion(&tree, &mut agent, 0, 5);
    let (.., round) = under_promotion(&tree, &mut agent, 24 * MIB, 10);
    assert_eq!((round.kernel_promotes, tree.settings()[PROMOTION_LIMIT].as_str()), (None, "1\n"));
}

#[test]
fn while_a_thousand_services_move_a_round_opens_a_few_files_of_two_hundred_of_them_and_moves_these() {
    for services in [150, 500, 1000] {
        let (tree, text) = server(services, 650);
        let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
        look(&mut agent);
        let turns = services.div_ceil(200);
        let mut moved = vec![0; services as usize];
        for _ in 0..turns {
            let before = tree.calls();
            let round = look(&mut agent);
            let calls = tree.calls() - before;
            // Memory, counts, kills and pressure; its nodes and what moves it; reserved huge pages.
            assert!(calls <= 8 * services.div_ceil(turns) + 100, "{services} services: {calls} calls");
            assert!(round.alarms.is_empty(), "{:?}", round.alarms);
            let why =
                |row: &ServiceRound| row.cause.what == "it is over local_high, and its coldest pages go down";
            assert!(round.services.iter().all(why), "those that wait say why they move");
            moved
                .iter_mut()
                .zip(&round.services)
                .for_each(|(count, row)| *count += u64::from(row.demoted > 0));
        }
        assert_eq!(moved, vec![1; services as usize], "each is moved in its turn");
    }
}

#[test]
fn many_services_of_which_none_can_move_alarm_in_each_round_and_each_is_asked_in_its_turn() {
    let (tree, text) = server(450, 650);
    for index in 0..450 {
        tree.set_nodes(&format!("/s{index}"), "0");
    }
    let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
    let rounds: Vec<Round> = (0..6).map(|_| look(&mut agent)).collect();
    assert!(rounds.iter().all(|round| round.alarms.len() == 450), "an alarm does not come and go");
    let causes = rounds.iter().flat_map(|round| &round.services).map(|row| &row.cause);
    assert!(causes.clone().all(|cause| cause.what.contains("none can go down") && cause.since_round == 1));
    // What is repaired is seen within three rounds.
    tree.set_nodes("/s7", "");
    let rounds: Vec<Round> = (0..3).map(|_| look(&mut agent)).collect();
    assert_eq!(rounds[2].alarms.len(), 449);
    let is_asked = |row: &ServiceRound| row.service == "s7" && row.demoted > 0;
    assert!(rounds.iter().any(|round| round.services.iter().any(is_asked)));
}

/// A machine of two sockets, each with a fast and a slow node: 0 and 1, 2 and 3. The second has so many free bytes of 1 GiB.
fn two_sockets(free: u64) -> Tree {
    let tree = Tree::new(4096 * MIB);
    const NODES: &str = "/sys/devices/system/node";
    const TIERS: &str = "/sys/devices/virtual/memory_tiering";
    for (path, text) in [
        (format!("{NODES}/online"), "0-3\n"),
        (format!("{NODES}/has_memory"), "0-3\n"),
        (format!("{NODES}/has_cpu"), "0,2\n"),
        (format!("{NODES}/node0/cpulist"), "0-3\n"),
        (format!("{NODES}/node2/cpulist"), "4-7\n"),
        (format!("{TIERS}/memory_tier4/nodelist"), "0,2\n"),
        (format!("{TIERS}/memory_tier90/nodelist"), "1,3\n"),
    ] {
        tree.put(&path, text);
    }
    for (node, free) in [(2, free), (3, 1024 * MIB)] {
        let text = format!("Node {node} MemTotal: {} kB\nNode {node} MemFree: {} kB\n", 1 << 20, free >> 10);
        tree.put(&format!("{NODES}/node{node}/meminfo"), &text);
    }
    tree
}

#[test]
fn what_comes_up_goes_to_the_socket_of_most_threads_and_to_another_where_that_is_full() {
    // Threads of two processes, by CPU. The first socket has more free memory in each case.
    for (cpus, free, to) in [
        ([1, 5, 6], 512 * MIB, 2),
        ([1, 2, 6], 512 * MIB, 0),
        ([5, 5, 6], 8 * MIB, 0),
        ([9, 9, 9], 512 * MIB, 0),
    ] {
        let tree = two_sockets(free);
        tree.add_group("/cache", [10 * MIB, 90 * MIB]);
        tree.set_parent_nodes("/cache", "0-3");
        tree.put("/sys/fs/cgroup/cache/cgroup.procs", "7\n8\n");
        for (thread, cpu) in ["7/task/7", "7/task/9", "8/task/8"].iter().zip(cpus) {
            let fields = ["0"; 35].join(" ");
            tree.put(&format!("/proc/{thread}/stat"), &format!("7 (a (b) c) S {fields} {cpu} 0 0\n"));
        }
        let text = "[service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\nlocal_low = 0.5\n";
        let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
        (0..3).for_each(|_| drop(look(&mut agent)));
        assert!(tree.targets().len() >= 2 && tree.targets().iter().all(|node| *node == to), "{cpus:?}");
    }
}

#[test]
fn on_two_sockets_the_kernel_goes_on_to_bring_pages_near_their_threads_if_it_did() {
    let text = "[service.cache]\ncgroup = \"/cache\"\ntier = \"opt-in\"\n";
    for (tree, found, set) in [
        (two_sockets(0), "1", "3"),
        (two_sockets(0), "0", "2"),
        (two_sockets(0), "2", "2"),
        (machine(), "1", "2"),
    ] {
        tree.put(polder_linux::BALANCING, &format!("{found}\n"));
        let (mut agent, _) = Agent::start(&tree, Policy::parse(text).unwrap(), JOURNAL, false).unwrap();
        look(&mut agent);
        let now = || tree.settings()[polder_linux::BALANCING].trim().to_owned();
        assert_eq!(now(), set, "found {found}");
        agent.change(Policy::parse(text).unwrap()).unwrap();
        assert_eq!(now(), set, "after a change of the policy");
        agent.stop().unwrap();
        assert_eq!(now(), found);
    }
}

#[test]
fn many_services_of_which_nothing_moves_are_looked_at_in_turn_and_each_within_five_rounds() {
    let calls = |services: u64| {
        let (tree, text) = server(services, 650);
        for index in 0..services {
            tree.put_bytes(&format!("/s{index}"), [GB / 4, GB / 4]);
        }
        let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
        look(&mut agent);
        let before = tree.calls();
        let round = look(&mut agent);
        assert_eq!(round.services.len() as u64, services, "each has its row");
        let calls = tree.calls() - before;
        // What comes over its bound is seen in its turn, whichever that is, and moves then.
        tree.put_bytes("/s7", [GB / 2, 0]);
        tree.suffer("/s8", 0.0, 5 * agent.policy().refaults_a_round(), 0);
        tree.remove_group("/s9");
        let rounds: Vec<Round> = (0..7).map(|_| look(&mut agent)).collect();
        let of = |round: &Round, name: &str| round.services.iter().position(|row| row.service == name);
        let demoted = |round: &Round| round.services[of(round, "s7").unwrap()].demoted > 0;
        assert!(rounds[..5].iter().any(demoted), "{services}");
        assert!(rounds[4..].iter().all(|round| of(round, "s9").is_none() && round.alarms.len() == 1));
        let most = rounds.iter().map(|round| round.services[of(round, "s8").unwrap()].refaults).max();
        assert!(most.unwrap() <= 5 * agent.policy().refaults_a_round() / services.div_ceil(200).min(5));
        calls
    };
    let (few, many) = (calls(200), calls(1000));
    println!("200 services: {few} calls, 1,000: {many}");
    assert!(many < few + 100 && few > 3 * 200, "{few} {many}");
}

#[test]
fn a_node_whose_memory_goes_in_the_middle_of_a_look_does_not_end_the_agent() {
    const NODES: &str = "/sys/devices/system/node";
    let mut steps = 0;
    for calls in 0.. {
        let tree = machine();
        tree.put(&format!("{NODES}/has_memory"), "0-2\n");
        tree.put("/sys/devices/virtual/memory_tiering/memory_tier90/nodelist", "1-2\n");
        let text = format!("Node 2 MemTotal: {} kB\nNode 2 MemFree: {} kB\n", 1 << 20, 1 << 19);
        tree.put(&format!("{NODES}/node2/meminfo"), &text);
        let mut agent = start(&tree);
        let began = tree.calls();
        tree.unplug_after(calls, 2);
        let (round, _) = agent.round(0).unwrap_or_else(|error| panic!("unplugged at call {calls}: {error}"));
        if tree.calls() - began <= calls {
            assert_eq!(polder_linux::show_nodes(&agent.tiers().slow), "1-2", "the control");
            break;
        }
        assert!(round.services.len() == 2, "unplugged at call {calls}: {:?}", round.alarms);
        look(&mut agent);
        assert_eq!(polder_linux::show_nodes(&agent.tiers().slow), "1", "unplugged at call {calls}");
        agent.stop().unwrap();
        steps += 1;
    }
    assert!(steps >= 30, "a round took {steps} calls only");
}

#[test]
fn a_clock_that_is_set_back_keeps_no_pods_and_no_poison_from_being_looked_at() {
    const ADDRESS: &str = "http://127.0.0.1:10255/pods";
    const DAY: u64 = 86_400_000;
    let text = format!(
        "[kubernetes]\npods = \"{ADDRESS}\"\n[service.web]\nlabel = \"app=web\"\ntier = \"opt-in\"\n"
    );
    let pods = include_str!("../../tests/pods.json");
    let tree = machine();
    tree.add_cxl("mem0");
    let (mut agent, _) = Agent::start(&tree, Policy::parse(&text).unwrap(), JOURNAL, false).unwrap();
    let alarms = |agent: &mut Agent<&Tree>, now: u64| agent.round(now).unwrap().0.alarms;
    let is_refused = |alarm: &Alarm| alarm.to_string().contains("connection refused");
    let is_poison = |alarm: &Alarm| matches!(alarm, Alarm::CxlMemory { .. });
    assert!(alarms(&mut agent, 3 * DAY).iter().any(is_refused));
    tree.answer(ADDRESS, Some(pods));
    tree.poison("mem0", 0x1000, 0x1000);
    let waits = alarms(&mut agent, 3 * DAY + 5_000);
    assert!(waits.iter().any(is_refused) && !waits.iter().any(is_poison), "the control: {waits:?}");
    let looked = alarms(&mut agent, 2 * DAY);
    assert!(!looked.iter().any(is_refused) && looked.iter().any(is_poison), "{looked:?}");
}

#[test]
fn a_signal_that_ends_a_reclaim_early_counts_what_moved_and_asks_for_it_once() {
    let tree = machine();
    let mut agent = start(&tree);
    look(&mut agent);
    let before = tree.bytes("/cache")[0];
    tree.interrupt_reclaim(8 * MIB);
    let round = look(&mut agent);
    assert!(round.alarms.is_empty(), "{:?}", round.alarms);
    assert_eq!(before - tree.bytes("/cache")[0], 8 * MIB);
    assert_eq!(round.services[0].cause.what, "it is over local_high, and its coldest pages go down");
    look(&mut agent);
    assert_eq!(before - tree.bytes("/cache")[0], 40 * MIB, "the next round goes on as usual");
}

#[test]
fn goals_that_cannot_all_hold_are_named_with_figures() {
    let told = |text: &str, fast: u64, prepare: &dyn Fn(&Tree)| -> Vec<String> {
        let tree = Tree::new(fast * MIB);
        tree.add_group("/cache", [200 * MIB, 0]);
        tree.add_group("/web", [80 * MIB, 20 * MIB]);
        prepare(&tree);
        let policy = Policy::parse(text).unwrap();
        let (mut agent, _) = Agent::start(&tree, policy, "", true).unwrap();
        let round = look(&mut agent);
        contradictions(agent.policy(), &round)
    };
    // cache is to have 90 MiB and web 100; the kernel keeps 1/64 free.
    assert_eq!(told(TEXT, 194, &|_| {}), Vec::<String>::new());
    assert_eq!(
        told(TEXT, 192, &|_| {}),
        [
            "not all goals can hold: the services are to have 190.0 MiB on the fast tier, which has 189.0 MiB for them (192.0 MiB less \
          3.0 MiB that stay free): web 100.0 MiB (opt-out), cache 90.0 MiB (local_low 0.45 of 200.0 MiB); lower local_low, or opt \
          fewer services out"
        ]
    );
    let free = told(&format!("free_low = 0.1\n{TEXT}"), 200, &|_| {});
    assert!(
        free.len() == 1 && free[0].contains("180.0 MiB for them (200.0 MiB less 20.0 MiB that stay free)"),
        "{free:?}"
    );
    // 90 MiB of cache and all of web belong on a slow tier of 128.
    let down = TEXT.replace("opt-out", "background");
    let slow = told(&down, 512, &|tree| tree.set_slow(128 * MIB));
    assert!(
        slow.len() == 1 && slow[0].contains("190.0 MiB on the slow tier, which has 126.0 MiB for them"),
        "{slow:?}"
    );
    assert!(
        slow[0].contains(
            "web 100.0 MiB (background), cache 90.0 MiB (what exceeds local_high 0.55 of 200.0 MiB)"
        ),
        "{slow:?}"
    );
    assert!(told(&down, 512, &|tree| tree.set_slow(256 * MIB)).is_empty());
    // Of many the largest are named, those of a default too.
    let many = "default = \"rest\"\n[profile.rest]\ntier = \"opt-out\"\n";
    let many = told(many, 100, &|tree| {
        for index in 0..12 {
            tree.add_group(&format!("/s{index:02}.service"), [(10 + index) * MIB, 0]);
        }
    });
    assert!(many.len() == 1 && many[0].contains("s11.service 21.0 MiB (opt-out), "), "{many:?}");
    assert!(many[0].contains("s04.service 14.0 MiB (opt-out), 4 others 46.0 MiB; "), "{many:?}");
}

#[test]
fn a_goal_that_no_node_of_a_service_can_serve_is_refused_by_name_also_in_a_dry_run() {
    const KEPT: &str =
        "/cache: its cpuset.mems (1) leaves out the fast nodes 0, so none of its pages can come up";
    const PARENT: &str =
        "/shop/web: its parent's cpuset.mems leaves it nodes 1 alone, so it cannot be opted out";
    for dry_run in [true, false] {
        let tree = Tree::new(512 * MIB);
        tree.add_group("/cache", [0, 200 * MIB]);
        tree.add_group("/shop", [0, 100 * MIB]);
        tree.add_group("/shop/web", [0, 100 * MIB]);
        tree.set_nodes("/cache", "1");
        tree.set_nodes("/shop", "1");
        tree.set_parent_nodes("/shop/web", "1");
        let policy = Policy::parse(&TEXT.replace("/web", "/shop/web")).unwrap();
        let (mut agent, _) = Agent::start(&tree, policy, JOURNAL, dry_run).unwrap();
        let said: Vec<String> =
            (0..2).flat_map(|_| look(&mut agent).alarms).map(|alarm| alarm.to_string()).collect();
        for what in [KEPT, PARENT] {
            assert!(said.iter().any(|alarm| alarm.contains(what)), "dry run {dry_run}: {what}: {said:?}");
        }
    }
}
