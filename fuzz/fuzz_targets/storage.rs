//! Another writer of a store says in its versions, their manifests and the marks whatever it likes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::storage::hostile::drive(bytes));
