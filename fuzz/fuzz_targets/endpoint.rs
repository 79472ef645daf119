//! A peer says on its ring to an endpoint whatever it likes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::endpoint::hostile::drive(bytes));
