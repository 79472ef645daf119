//! The pages of docs show what commands print.

use std::process::Command;

use crate::{front, scratch};

/// Every console block of docs/plan*.md whose commands need no other program, to the character; `...` stands for lines that are left out.
#[test]
fn pages_show_what_commands_print() {
    let scratch = scratch();
    let home = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().unwrap();
    std::os::unix::fs::symlink(home.join("crates"), scratch.path().join("crates")).unwrap();
    let programs = scratch.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    // By another process: a test that forks meanwhile would keep it open, and nobody may run it then.
    let words = front();
    let words: Vec<_> = [words.get_program()]
        .into_iter()
        .chain(words.get_args())
        .map(|word| word.to_str().unwrap())
        .collect();
    let script = format!("shift; exec {} \"$@\"", words.join(" "));
    let mut made = Command::new("sh");
    made.args(["-c", "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$0\" && chmod 755 \"$0\""]);
    assert!(made.arg(programs.join("polder")).arg(script).status().unwrap().success());
    let search = format!("{}:/usr/bin:/bin", programs.display());
    let mut pages: Vec<_> =
        std::fs::read_dir(home.join("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|path| {
        path.extension().is_some_and(|extension| extension == "md")
            && path.file_name().unwrap().to_str().unwrap().starts_with("plan")
    });
    pages.sort();
    let mut checked = 0;
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        let name = page.file_name().unwrap().to_string_lossy();
        let mut words = "";
        for (at, part) in text.split("```").enumerate() {
            let (kind, body) = part.split_once('\n').unwrap_or((part, ""));
            match (at % 2, kind) {
                (0, _) => words = part,
                // "Save this as `NAME`:" stands before a file.
                (_, "toml") => {
                    let saved = words
                        .trim_end()
                        .strip_suffix("`:")
                        .and_then(|text| text.rsplit_once("Save this as `"));
                    if let Some((_, file)) = saved {
                        std::fs::write(scratch.path().join(file), body).unwrap();
                    }
                }
                (_, "console") => {
                    let commands: Vec<_> = body
                        .split("$ polder ")
                        .map(|command| command.split_once('\n').unwrap_or((command, "")))
                        .collect();
                    let is_ours = commands[0].0.is_empty() && !body.contains("$(");
                    if !is_ours
                        || body
                            .lines()
                            .any(|line| line.starts_with("$ ") && !line.starts_with("$ polder plan "))
                    {
                        println!("{name}: {:?} needs another program", body.lines().next());
                        continue;
                    }
                    for (command, shown) in &commands[1..] {
                        let command = format!("polder {command}");
                        let mut shell = Command::new("sh");
                        shell.args(["-c", &format!("{command} 2>&1")]).current_dir(scratch.path());
                        shell.env("PATH", &search).env("POLDER_CONFIG", "/dev/null").env_remove("COLUMNS");
                        let output = String::from_utf8(shell.output().unwrap().stdout).unwrap();
                        assert!(
                            is_shown(shown, &output),
                            "{name}: {command}\nshows\n{shown}\nand prints\n{output}"
                        );
                        checked += 1;
                    }
                }
                _ => {}
            }
        }
    }
    assert!(checked >= 11, "{checked} commands");
}

/// Whether all lines of `shown` are in `stdout_of`, one after the other, and where no `...` stands between none is missing.
fn is_shown(shown: &str, output: &str) -> bool {
    let output: Vec<_> = output.lines().collect();
    let shown: Vec<_> = shown.lines().collect();
    let parts: Vec<_> = shown.split(|line| *line == "...").collect();
    let mut from = 0;
    for (at, part) in parts.iter().enumerate() {
        let (is_first, is_last) = (at == 0, at + 1 == parts.len());
        let mut places =
            (from..=output.len().saturating_sub(part.len())).filter(|at| output[*at..].starts_with(part));
        let found = if is_last && !is_first { places.next_back() } else { places.next() };
        match found {
            Some(place) if is_first && place != 0 => return false,
            Some(place) => from = place + part.len(),
            None => return false,
        }
    }
    parts.last().is_none_or(|it| it.is_empty() && parts.len() > 1) || from == output.len()
}

#[test]
fn a_page_that_leaves_lines_out_says_so() {
    let output = "one\ntwo\nthree\n";
    for shown in ["one\ntwo\nthree\n", "one\n...\n", "...\nthree\n", "one\n...\nthree\n", "...\ntwo\n...\n"] {
        assert!(is_shown(shown, output), "{shown}");
    }
    for shown in [
        "one\ntwo\n",
        "one\nthree\n",
        "two\nthree\n",
        "one\n...\ntwo\n",
        "three\n...\none\n...\n",
        "on\n...\n",
    ] {
        assert!(!is_shown(shown, output), "{shown}");
    }
}
