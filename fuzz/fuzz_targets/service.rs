//! The other processes of a parameter service write their queues, marks, orders and gradients as they like.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| polder_pool::service::hostile::drive(bytes));
