//! Whether the arrays of a step lie apart, which callers of other languages cannot promise by a type.

use crate::error::StepError;

/// An array of a step: where it begins, its bytes, whether the step writes it, the number of its tensor, and what it is.
pub type Array = (usize, usize, bool, usize, &'static str);

/// That a step writes nowhere where it reads or writes something else.
///
/// # Errors
/// [`StepError::Shared`], which names two arrays.
pub fn expect_apart(arrays: impl Iterator<Item = Array>) -> Result<(), StepError> {
    let mut arrays: Vec<Array> = arrays.filter(|(at, bytes, ..)| *at != 0 && *bytes > 0).collect();
    arrays.sort_unstable();
    // The array that reaches furthest so far, and that of those that are written.
    let mut furthest: [Option<Array>; 2] = [None; 2];
    let end = |(at, bytes, ..): Array| at.saturating_add(bytes);
    for array in arrays {
        let (at, _, is_written, tensor, what) = array;
        if let Some(other @ (.., before, whose)) = furthest[usize::from(!is_written)]
            && at < end(other)
        {
            return Err(StepError::Shared { what, tensor, other: whose, before });
        }
        for kept in &mut furthest[..1 + usize::from(is_written)] {
            if kept.is_none_or(|kept| end(kept) < end(array)) {
                *kept = Some(array);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_that_are_read_may_share_memory_and_those_that_are_written_may_not() {
        let said = |arrays: &[Array]| expect_apart(arrays.iter().copied()).map_err(|error| error.to_string());
        assert_eq!(
            said(&[(64, 64, true, 0, "a"), (128, 64, true, 1, "b"), (0, 64, true, 2, "none")]),
            Ok(())
        );
        assert_eq!(said(&[(64, 64, false, 0, "a"), (96, 64, false, 1, "b")]), Ok(()));
        let shared = "b of tensor 1 of the step shares memory with a of tensor 0; give each memory of its own, and tie \
                      parameters by using one Parameter twice";
        for (first, second) in [(true, true), (true, false), (false, true)] {
            let arrays = [(96, 64, second, 1, "b"), (64, 64, first, 0, "a"), (200, 8, true, 2, "c")];
            assert_eq!(said(&arrays), Err(shared.to_owned()), "{first} {second}");
        }
        // The one that begins last lies in one that began long before.
        let long = [(64, 1000, true, 0, "a"), (80, 8, false, 1, "b")];
        assert!(said(&long).is_err() && said(&[long[0], (2000, 8, true, 1, "b")]).is_ok());
    }
}
