//! `polder rehearse`, with litmus tests in C that know nothing of it: right ones pass, and ones that leave a flush out fail.
#![cfg(target_arch = "x86_64")]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use polder_mem::testing::Scratch;

const SEEDS: u64 = 4;
const LITMUS: [&str; 7] = [
    "write_back_payload",
    "invalidate_payload",
    "non_temporal",
    "non_temporal_wide",
    "whole_line",
    "announce",
    "hand_over",
];

/// A folder with the command and its library, as they are installed, the litmus tests, and a file to share.
struct Stage {
    scratch: Scratch,
    polder: PathBuf,
}

impl Stage {
    fn new() -> Self {
        let scratch = Scratch::new();
        let built = PathBuf::from(env!("CARGO_BIN_EXE_polder"));
        let polder = match std::env::var_os("POLDER") {
            Some(installed) => installed.into(),
            None => {
                let at = |name: &str| scratch.path().join(name);
                for folder in ["bin", "lib/polder"] {
                    fs::create_dir_all(at(folder)).unwrap();
                }
                let library = built.parent().unwrap().join("deps/libpolder_rehearse.so");
                fs::copy(library, at("lib/polder/libpolder-rehearse.so")).unwrap();
                fs::copy(built, at("bin/polder")).unwrap();
                at("bin/polder")
            }
        };
        let stage = Self { scratch, polder };
        stage.compile(&[], "litmus", "litmus");
        stage
    }

    fn path(&self, name: &str) -> String {
        self.scratch.path().join(name).display().to_string()
    }

    fn compile(&self, options: &[&str], source: &str, name: &str) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/rehearse/{source}.c"));
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-mclflushopt", "-mclwb", "-o", &self.path(name)]).args(options).arg(source);
        let done = compiler.output().expect("a C compiler is installed");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    /// A rehearsal of two hosts with a new file of zeros.
    fn command(&self, options: &[&str]) -> Command {
        fs::write(self.path("shared"), vec![0; 1 << 16]).unwrap();
        let mut command = Command::new(&self.polder);
        command.args(["rehearse", "--file", &self.path("shared")]).args(options);
        command
    }

    fn litmus(&self, options: &[&str], name: &str, kind: &str) -> Output {
        let (program, file) = (self.path("litmus"), self.path("shared"));
        self.command(options).args(["--", &program, name, kind, "{host}", &file]).output().unwrap()
    }

    /// The one line that a rehearsal is refused with.
    fn refusal(&self, file: &str, program: &str) -> String {
        let mut command = Command::new(&self.polder);
        let done = command.args(["rehearse", "--file", file, "--", program]).output().unwrap();
        assert_eq!(done.status.code(), Some(1), "{done:?}");
        let text = String::from_utf8(done.stderr).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    }
}

#[test]
fn each_litmus_test_passes_with_its_flush_and_fails_without() {
    let stage = Stage::new();
    for name in LITMUS {
        let failures = |kind| {
            let runs = (0..SEEDS).map(|seed| stage.litmus(&["--seed", &seed.to_string()], name, kind));
            runs.filter(|done| match done.status.code() {
                Some(0) => false,
                // The program's own code.
                Some(1) => true,
                _ => panic!("{name}, {kind}: {done:?}"),
            })
            .count()
        };
        let (right, wrong) = (failures("right"), failures("wrong"));
        println!("{name}: {SEEDS} seeds; with its flush {right} failed, without it {wrong}");
        assert_eq!(right, 0, "{name}");
        assert!(
            wrong > 0,
            "{name}: it fails with no seed without its flush, so that a missing one is not found"
        );
    }
}

#[test]
fn a_rehearsal_of_nothing_is_no_success() {
    let stage = Stage::new();
    let done = stage.command(&[]).args(["--", "true"]).output().unwrap();
    assert_eq!(done.status.code(), Some(2), "{done:?}");
    assert!(String::from_utf8(done.stderr).unwrap().contains("no line was moved between hosts"));
}

/// The code of a rehearsal of `others.c`, and what it says but for the count of flushes.
fn rehearsed(stage: &Stage, words: &[&str]) -> (Option<i32>, String) {
    let done = stage.command(&[]).arg("--").args(words).output().unwrap();
    let text = String::from_utf8(done.stderr).unwrap();
    let said = text.lines().filter(|line| !line.contains("non-temporal stores at"));
    (done.status.code(), said.collect::<Vec<_>>().join("\n"))
}

#[test]
fn a_host_or_a_part_of_the_file_that_was_not_rehearsed_is_named() {
    let stage = Stage::new();
    stage.compile(&[], "others", "others");
    stage.compile(&["-static"], "others", "fixed");
    fs::write(stage.path("elsewhere"), vec![0; 1 << 16]).unwrap();
    let (program, shared, elsewhere) = (stage.path("others"), stage.path("shared"), stage.path("elsewhere"));
    let nothing =
        format!("polder: no line was moved between hosts: does the program flush what it maps of {shared}?");
    // Flushes that reach no line of the file.
    assert_eq!(rehearsed(&stage, &[&program, "heap", "{host}", &shared]), (Some(2), nothing.clone()));
    assert_eq!(rehearsed(&stage, &[&program, "meets", "{host}", &elsewhere]), (Some(2), nothing));
    let idle = format!(
        "polder: host 1 moved no line: does its program flush what it maps of {shared}, and is it linked dynamically and started with LD_PRELOAD?"
    );
    assert_eq!(rehearsed(&stage, &[&program, "alone", "{host}", &shared]), (Some(2), idle.clone()));
    let script = format!(
        "test {{host}} = 0 || exec {} alone 0 {shared}; exec {program} alone 0 {shared}",
        stage.path("fixed")
    );
    assert_eq!(rehearsed(&stage, &["sh", "-c", &script]), (Some(2), idle));
    let (code, said) = rehearsed(&stage, &[&program, "grows", "{host}", &shared]);
    for host in ["0", "1"] {
        let size = format!("polder: host {host} changed the size of {shared} from 65536 to 131072 bytes");
        assert!(code == Some(2) && said.contains(&size), "{code:?}: {said}");
    }
}

#[test]
fn a_program_that_blocks_all_signals_is_rehearsed_and_one_that_ignores_traps_is_told() {
    let stage = Stage::new();
    stage.compile(&[], "others", "others");
    let (program, shared) = (stage.path("others"), stage.path("shared"));
    assert_eq!(rehearsed(&stage, &[&program, "blocks", "{host}", &shared]), (Some(0), String::new()));
    let (code, said) = rehearsed(&stage, &[&program, "ignores", "{host}", &shared]);
    let why = "(SIGTRAP); a program that handles, ignores or blocks SIGTRAP cannot be rehearsed";
    assert!(code == Some(128 + 5) && said.contains(why), "{code:?}: {said}");
}

#[test]
fn children_and_memory_where_the_file_lay_are_right() {
    let stage = Stage::new();
    stage.compile(&["-pthread"], "others", "others");
    let (program, shared) = (stage.path("others"), stage.path("shared"));
    for name in ["moves", "forks"] {
        assert_eq!(
            rehearsed(&stage, &[&program, name, "{host}", &shared]),
            (Some(0), String::new()),
            "{name}"
        );
    }
}

#[test]
fn a_library_that_is_loaded_again_has_its_traps_again() {
    let stage = Stage::new();
    stage.compile(&["-pthread"], "others", "others");
    stage.compile(&["-pthread", "-shared", "-fPIC"], "others", "libothers.so");
    let words = [
        "--",
        &stage.path("others"),
        "reloads",
        "{host}",
        &stage.path("shared"),
        &stage.path("libothers.so"),
    ];
    let done = stage.command(&["--sites"]).args(words).output().unwrap();
    let text = String::from_utf8(done.stdout).unwrap();
    // Of both hosts together.
    let is_found = text.lines().any(|line| line.trim().starts_with("20 flush libothers.so+0x"));
    assert!(done.status.success() && is_found, "{text}");
}

#[test]
fn sites_are_listed_and_a_program_fails_with_a_needed_one_left_out() {
    let stage = Stage::new();
    let done = stage.litmus(&["--sites"], "write_back_payload", "right");
    assert!(done.status.success(), "{done:?}");
    let text = String::from_utf8(done.stdout).unwrap();
    // Of both hosts together: the payload is written back once a round.
    let site = text.lines().find_map(|line| line.trim().strip_prefix("100 write-back "));
    let site = site.unwrap_or_else(|| panic!("{text}"));
    assert!(site.starts_with("litmus+0x"), "{text}");
    let done = stage.litmus(&["--skip-site", site], "write_back_payload", "right");
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    let text = String::from_utf8(done.stderr).unwrap();
    assert!(text.contains("polder: host 1 failed: exit status: 1\n"), "{text}");
    for site in ["litmus", "litmus+0xffff", ""] {
        let done = stage.litmus(&["--skip-site", site], "write_back_payload", "right");
        let text = String::from_utf8(done.stderr).unwrap();
        assert!(!done.status.success() && text.contains("no host has loaded a site"), "{site}: {text}");
    }
}

#[test]
fn the_file_holds_what_reached_memory() {
    let stage = Stage::new();
    let done = stage.litmus(&[], "write_back_payload", "right");
    assert!(done.status.success(), "{done:?}");
    assert_eq!(fs::read(stage.path("shared")).unwrap()[8 * 64], 100);
}

#[test]
fn what_cannot_be_rehearsed_is_refused_in_one_line() {
    let stage = Stage::new();
    fs::write(stage.path("empty"), "").unwrap();
    fs::write(stage.path("shared"), vec![0; 4096]).unwrap();
    let shared = stage.path("shared");
    for (file, program, why) in [
        ("/dev/null", "true", "/dev/null: it is no regular file"),
        (&*stage.path("empty"), "true", "it is empty"),
        (&*stage.path("absent"), "true", "No such file"),
        (&*shared, "no-such-program", "no-such-program: there is no such program"),
    ] {
        let text = stage.refusal(file, program);
        assert!(text.contains(why), "{text}");
    }
    stage.compile(&["-static"], "litmus", "fixed");
    let text = stage.refusal(&shared, &stage.path("fixed"));
    assert!(text.contains("fixed: it is linked statically"), "{text}");
    let mut bytes = fs::read(stage.path("litmus")).unwrap();
    bytes[18] = 183;
    fs::write(stage.path("foreign"), bytes).unwrap();
    fs::set_permissions(stage.path("foreign"), fs::Permissions::from_mode(0o755)).unwrap();
    let text = stage.refusal(&shared, &stage.path("foreign"));
    assert!(text.contains("foreign: it is no program for x86-64"), "{text}");
}

/// The lines of an output without their numbers, each once.
fn shapes<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let word = |word: &str| match word.trim_start_matches(|letter: char| letter.is_ascii_digit()) {
        site if site.starts_with("litmus+") => "litmus+#".to_owned(),
        rest if rest.len() < word.len() => format!("#{rest}"),
        whole => whole.to_owned(),
    };
    lines.map(|line| line.split_whitespace().map(word).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn the_page_shows_every_line_that_a_rehearsal_prints() {
    let stage = Stage::new();
    let page = include_str!("../../../docs/rehearse.md");
    let said = |done: &Output| {
        [&done.stdout, &done.stderr].map(|bytes| String::from_utf8(bytes.clone()).unwrap()).concat()
    };
    let listed = said(&stage.litmus(&["--sites"], "write_back_payload", "right"));
    let site = listed.lines().rfind(|line| line.contains("write-back")).unwrap();
    let site = site.split_whitespace().last().unwrap();
    for (option, done) in [
        ("--hosts 2", said(&stage.litmus(&["--hosts", "2"], "write_back_payload", "wrong"))),
        ("--sites", listed.clone()),
        ("--skip-site", said(&stage.litmus(&["--skip-site", site], "write_back_payload", "right"))),
    ] {
        let is_command = |line: &&str| line.starts_with("$ polder rehearse") && line.contains(option);
        let mut lines = page.lines().skip_while(|line| !is_command(line)).skip(1);
        let shown = lines.by_ref().take_while(|line| !line.starts_with(['$', '`']));
        assert_eq!(shapes(shown), shapes(done.lines()), "{option}");
    }
}

#[test]
fn a_file_that_the_user_may_not_read_or_write_is_named() {
    const NOBODY: u32 = 65534;
    let stage = Stage::new();
    fs::set_permissions(stage.scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (shared, polder) = (stage.path("shared"), stage.path("copy/bin/polder"));
    // A place that every user may read, wherever the program was built.
    let installed = stage.polder.ancestors().nth(2).unwrap();
    for file in ["bin/polder", "lib/polder/libpolder-rehearse.so"] {
        let to = stage.scratch.path().join("copy").join(file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        assert!(Command::new("cp").arg(installed.join(file)).arg(to).status().unwrap().success());
    }
    for mode in [0o000, 0o444] {
        fs::write(&shared, vec![0; 4096]).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(mode)).unwrap();
        let mut command = Command::new(&polder);
        command.args(["rehearse", "--file", &shared, "true"]).current_dir("/");
        if fs::metadata(&shared).unwrap().uid() == 0 {
            // No mode keeps root out.
            command.uid(NOBODY).gid(NOBODY);
        }
        let done = command.output().unwrap();
        let text = String::from_utf8(done.stderr).unwrap();
        assert_eq!(text, format!("polder: {shared}: Permission denied (os error 13)\n"));
        fs::remove_file(&shared).unwrap();
    }
}

#[test]
fn a_user_without_namespaces_is_told_once_what_to_allow() {
    let stage = Stage::new();
    fs::write(stage.path("shared"), vec![0; 4096]).unwrap();
    let script = "echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin \"$@\"";
    let (polder, shared) = (stage.polder.display().to_string(), stage.path("shared"));
    let done = Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "sh",
            "-c",
            script,
            "sh",
            &polder,
            "rehearse",
            "--file",
            &shared,
            "true",
        ])
        .output()
        .unwrap();
    let text = String::from_utf8(done.stderr).unwrap();
    assert!(text.starts_with("polder: this user may not mount a file for one process alone"), "{text}");
    assert_eq!((text.lines().count(), done.status.code()), (1, Some(1)), "{text}");
}

#[test]
fn what_a_killed_rehearsal_left_goes_with_the_next() {
    let stage = Stage::new();
    let mut ended = Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let left = PathBuf::from(format!("/dev/shm/polder-rehearse-{}", ended.id()));
    fs::create_dir(&left).unwrap();
    // Nothing was rehearsed in it.
    assert_eq!(stage.command(&["true"]).output().unwrap().status.code(), Some(2));
    assert!(!left.exists());
}
