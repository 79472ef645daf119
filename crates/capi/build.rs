//! Gives the library the name that programs look for when they start.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpolder.so");
    println!("cargo::rerun-if-changed=build.rs");
}
