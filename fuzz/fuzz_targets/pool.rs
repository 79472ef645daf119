//! Other hosts write anywhere in the pool while this one attaches, creates, opens, lists, destroys and leaves.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::hostile::drive(bytes));
