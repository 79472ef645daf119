//! The other end of a ring writes its headers, cells and credits as it likes, as producer and as consumer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::ring::hostile::drive(bytes));
