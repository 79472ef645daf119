//! SHA-256, as FIPS 180-4 has it.

/// Section 4.2.2.
const ROUNDS: [u32; 64] = fractions_of_roots(3);
/// Section 5.3.3.
const START: [u32; 8] = fractions_of_roots(2);
const CHUNK: usize = 64;
const LENGTH: usize = size_of::<u64>();

/// The hash of these bytes.
pub(super) fn sha256(bytes: &[u8]) -> [u8; 32] {
    // Section 5.1.1: a one bit, zeros, and the number of bits.
    let mut padded = bytes.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + LENGTH).next_multiple_of(CHUNK) - LENGTH, 0);
    padded.extend((8 * bytes.len() as u64).to_be_bytes());
    let hash = padded.as_chunks::<CHUNK>().0.iter().fold(START, step);
    let mut digest = [0; 32];
    for (place, word) in digest.as_chunks_mut::<4>().0.iter_mut().zip(hash) {
        *place = word.to_be_bytes();
    }
    digest
}

/// Section 6.2.2: the hash after one more chunk.
fn step(hash: [u32; 8], chunk: &[u8; CHUNK]) -> [u32; 8] {
    let mut schedule = [0_u32; 64];
    for (word, bytes) in schedule.iter_mut().zip(chunk.as_chunks::<4>().0) {
        *word = u32::from_be_bytes(*bytes);
    }
    for t in 16..schedule.len() {
        let (early, late) = (schedule[t - 15], schedule[t - 2]);
        schedule[t] = schedule[t - 16]
            .wrapping_add(early.rotate_right(7) ^ early.rotate_right(18) ^ (early >> 3))
            .wrapping_add(schedule[t - 7])
            .wrapping_add(late.rotate_right(17) ^ late.rotate_right(19) ^ (late >> 10));
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = hash;
    for (round, word) in ROUNDS.into_iter().zip(schedule) {
        let first = h
            .wrapping_add(e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25))
            .wrapping_add((e & f) ^ (!e & g))
            .wrapping_add(round)
            .wrapping_add(word);
        let second = (a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22))
            .wrapping_add((a & b) ^ (a & c) ^ (b & c));
        (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(first), c, b, a, first.wrapping_add(second));
    }
    let mut next = hash;
    for (word, added) in next.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(added);
    }
    next
}

/// The first 32 bits of the fractional parts of the square (2) or cube roots (3) of the first primes.
const fn fractions_of_roots<const N: usize>(degree: u32) -> [u32; N] {
    let mut found = [0; N];
    let (mut prime, mut at) = (2, 0);
    while at < N {
        if is_prime(prime) {
            let (power, mut root, mut bit) = (prime << (32 * degree), 0_u128, 1 << 36);
            while bit > 0 {
                if (root | bit).pow(degree) <= power {
                    root |= bit;
                }
                bit >>= 1;
            }
            found[at] = (root & 0xffff_ffff) as u32;
            at += 1;
        }
        prime += 1;
    }
    found
}

const fn is_prime(number: u128) -> bool {
    let mut divisor = 2;
    while divisor * divisor <= number && !number.is_multiple_of(divisor) {
        divisor += 1;
    }
    divisor * divisor > number
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of NIST for FIPS 180-4, and lengths around the end of a chunk, by `sha256sum`.
    #[test]
    fn hashes_are_those_of_the_standard() {
        let of = |bytes: &[u8]| sha256(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        for (bytes, expected) in [
            (&b""[..], "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
            (&[b'a'; 55], "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"),
            (&[b'a'; 56], "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"),
            (&[b'a'; 64], "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"),
        ] {
            assert_eq!(of(bytes), expected, "{} bytes", bytes.len());
        }
    }
}
