//! Holds `polder.h` equal to the functions that the library exports, argument by argument, and to its status numbers.

use std::collections::BTreeSet;
use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The declarations of the header, each in one line.
fn declared() -> BTreeSet<String> {
    let header = read("include/polder.h");
    let code: String =
        header.split("/*").map(|part| part.split_once("*/").map_or(part, |(_, code)| code)).collect();
    let lines: Vec<&str> = code.lines().filter(|line| !line.starts_with('#')).collect();
    lines.join(" ").split(';').map(words).filter(|line| line.contains('(')).collect()
}

/// A type of Rust as C has it.
fn c_type(rust: &str) -> &str {
    match rust {
        "c_int" => "int",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "*mut usize" => "size_t *",
        "*mut u64" => "uint64_t *",
        "*const c_char" => "const char *",
        "*mut c_void" => "void *",
        "*const c_void" => "const void *",
        "*const *const c_void" => "const void *const *",
        "*const *mut c_void" => "void *const *",
        "*mut Pool" => "polder_pool *",
        "*mut *mut Pool" => "polder_pool **",
        "*mut Object" => "polder_object *",
        "*const Object" => "const polder_object *",
        "*mut *mut Object" => "polder_object **",
        "*mut Sender" => "polder_sender *",
        "*mut *mut Sender" => "polder_sender **",
        "*mut Receiver" => "polder_receiver *",
        "*mut *mut Receiver" => "polder_receiver **",
        "*mut Kv" => "polder_kv *",
        "*mut *mut Kv" => "polder_kv **",
        "*mut Window" => "polder_window *",
        "*mut *mut Window" => "polder_window **",
        other => panic!("{other} has no name in C: add it here"),
    }
}

fn declaration(kind: &str, name: &str) -> String {
    if kind.ends_with('*') { format!("{kind}{name}") } else { format!("{kind} {name}") }
}

/// What the sources export, as the header would declare it.
fn exported() -> BTreeSet<String> {
    let sources =
        ["lib", "pool", "object", "ring", "window", "kv"].map(|name| read(&format!("src/{name}.rs")));
    let functions = sources.iter().flat_map(|source| source.split("extern \"C\" fn ").skip(1));
    functions
        .map(|function| {
            let (name, rest) = function.split_once('(').expect("arguments");
            let (arguments, rest) = rest.split_once(") -> ").expect("a result");
            let (result, _) = rest.split_once(" {").expect("a body");
            let arguments = arguments.split(',').map(words).filter(|argument| !argument.is_empty());
            let mut arguments: Vec<String> = arguments
                .map(|argument| {
                    let (name, kind) = argument.split_once(": ").expect("a type");
                    declaration(c_type(kind), name)
                })
                .collect();
            if arguments.is_empty() {
                arguments.push("void".to_owned());
            }
            format!("{}({})", declaration(c_type(result), name), arguments.join(", "))
        })
        .collect()
}

#[test]
fn the_header_declares_what_the_library_exports() {
    let (declared, exported) = (declared(), exported());
    assert!(exported.len() > 10, "{exported:?}");
    assert_eq!(declared, exported);
}

#[test]
fn the_header_numbers_the_statuses_as_the_library_does() {
    let source = read("src/failure.rs");
    let (_, variants) = source.split_once("enum Status {").expect("the enum");
    let (variants, _) = variants.split_once('}').expect("its end");
    for variant in variants.split(',').map(words).filter(|variant| !variant.is_empty()) {
        let (name, number) = variant.split_once(" = ").expect("a number");
        let mut constant = "POLDER".to_owned();
        for letter in name.chars() {
            constant.extend(letter.is_uppercase().then_some('_'));
            constant.extend(letter.to_uppercase());
        }
        let line = format!("{constant} = {number}");
        assert!(read("include/polder.h").contains(&line), "polder.h does not say {line}");
    }
}
