//! A rank of a window says in its segment whatever it likes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::window::hostile::drive(bytes));
