//! Another host says in the lines of a cache of blocks whatever it likes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::kv::hostile::drive(bytes));
