//! Any bytes where a pool begins: attaching and inspecting find a pool or an error.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::hostile::read(bytes));
