//! The other ranks of a group write their progress lines and staging as they like.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::group::hostile::drive(bytes));
