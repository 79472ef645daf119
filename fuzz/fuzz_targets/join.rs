//! Another rank writes as it likes in the extent in which ranks find each other.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::group::hostile::meet(bytes));
