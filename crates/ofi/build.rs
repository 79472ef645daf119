//! Keeps the provider loaded until the process ends: libfabric unloads it while its heartbeat thread may still run.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
