//! Quantities with their units: `"900 GB/s"` is one, `900` is none.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserializer};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::quoted;

/// What a quantity measures, and how people write it.
pub trait Unit {
    /// What it is, with its article: "a bandwidth".
    const WHAT: &'static str;
    /// How one is written.
    const EXAMPLE: &'static str;
    /// Whether nothing at all makes sense.
    const MAY_BE_ZERO: bool;
    /// The names of its units, each with what one is in the base unit; the smallest first.
    const SCALES: &'static [(&'static str, f64)];
}

/// A quantity that is finite and not negative, in its base unit.
pub struct Quantity<U>(f64, PhantomData<U>);

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident, $tag:ident, $what:literal, $example:literal, $zero:literal, $scales:expr) => {
        $(#[$doc])*
        pub type $name = Quantity<$tag>;
        #[doc = concat!("The unit of [`", stringify!($name), "`].")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $tag {}
        impl Unit for $tag {
            const WHAT: &'static str = $what;
            const EXAMPLE: &'static str = $example;
            const MAY_BE_ZERO: bool = $zero;
            const SCALES: &'static [(&'static str, f64)] = &$scales;
        }
    };
}

unit!(
    /// Bytes.
    Bytes, ByteUnit, "a size", "80 GB", false,
    [("B", 1.0), ("kB", 1e3), ("KiB", 1024.0), ("MB", 1e6), ("MiB", 1048576.0), ("GB", 1e9), ("GiB", 1073741824.0),
     ("TB", 1e12), ("TiB", 1099511627776.0), ("PB", 1e15)]
);
unit!(
    /// Bytes a second.
    Bandwidth, BandwidthUnit, "a bandwidth", "900 GB/s", false,
    [("B/s", 1.0), ("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9), ("TB/s", 1e12)]
);
unit!(
    /// Seconds.
    Time, TimeUnit, "a time", "500 ns", true,
    [("ps", 1e-12), ("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)]
);
unit!(
    /// Floating-point operations a second.
    FlopRate, FlopUnit, "a compute rate", "312 TFLOP/s", false,
    [("MFLOP/s", 1e6), ("GFLOP/s", 1e9), ("TFLOP/s", 1e12), ("PFLOP/s", 1e15)]
);
unit!(
    /// Floating-point operations.
    Operations, OperationUnit, "a number of operations", "16 GFLOP", false,
    [("FLOP", 1.0), ("kFLOP", 1e3), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12), ("PFLOP", 1e15)]
);
unit!(
    /// Bits a second of one lane.
    TransferRate, TransferUnit, "a rate of a lane", "64 GT/s", false,
    [("MT/s", 1e6), ("GT/s", 1e9), ("Mb/s", 1e6), ("Gb/s", 1e9)]
);

unit!(
    /// Watts.
    Power, PowerUnit, "a power", "700 W", true,
    [("W", 1.0), ("kW", 1e3), ("MW", 1e6)]
);
unit!(
    /// US dollars.
    Money, MoneyUnit, "an amount of money", "30000 USD", true,
    [("USD", 1.0)]
);
unit!(
    /// US dollars a second.
    Rent, RentUnit, "a rent", "2.5 USD/h", true,
    [("USD/h", 1.0 / HOUR)]
);
unit!(
    /// US dollars a joule.
    EnergyPrice, EnergyPriceUnit, "a price of energy", "0.12 USD/kWh", true,
    [("USD/kWh", 1e-3 / HOUR)]
);
unit!(
    /// Grams of carbon dioxide a joule.
    CarbonIntensity, CarbonUnit, "a carbon intensity", "350 gCO2/kWh", true,
    [("gCO2/kWh", 1e-3 / HOUR)]
);
unit!(
    /// Seconds for which something is used that was bought.
    Lifetime, LifetimeUnit, "a lifetime", "4 years", false,
    [("months", MONTH), ("years", 12.0 * MONTH)]
);

const HOUR: f64 = 3600.0;
/// A twelfth of a year of 365.25 days.
const MONTH: f64 = 730.5 * HOUR;

impl<U: Unit> Quantity<U> {
    /// This much of the base unit.
    ///
    /// # Panics
    /// When it is negative or no number.
    #[must_use]
    pub const fn new(value: f64) -> Self {
        assert!(value.is_finite() && value >= 0.0, "a quantity is a number from 0 on");
        Self(value, PhantomData)
    }

    /// How much it is in the base unit, which is that of its type: bytes, bytes a second, seconds, and so on.
    #[must_use]
    #[inline]
    pub const fn value(self) -> f64 {
        self.0
    }

    /// Reads a number and a unit, with a space between them or without.
    ///
    /// # Errors
    /// A sentence that says what was expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = quoted(text);
        let wrong =
            |why: &str| format!("expected {} such as {:?}, found \"{found}\"{why}", U::WHAT, U::EXAMPLE);
        let (number, unit) = number_and_unit(text.trim()).ok_or_else(|| wrong(": its unit is missing"))?;
        let number: f64 = number.parse().map_err(|_| wrong(""))?;
        let known = || U::SCALES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let (_, scale) = U::SCALES
            .iter()
            .find(|(name, _)| *name == unit.trim())
            .ok_or_else(|| wrong(&format!(": its units are {}", known())))?;
        match number * scale {
            value if !value.is_finite() || value > 1e30 => Err(wrong(": no such number")),
            value if value > 0.0 && value < 1e-30 => Err(wrong(": no such number")),
            value if value < 0.0 => Err(wrong(": it is negative")),
            0.0 if !U::MAY_BE_ZERO => Err(wrong(": it is 0")),
            value => Ok(Self::new(value)),
        }
    }
}

/// A number and its unit, where there is one.
fn number_and_unit(text: &str) -> Option<(&str, &str)> {
    if let Some(parts) = text.split_once(' ') {
        return Some(parts);
    }
    let bytes = text.as_bytes();
    let is_exponent = |at: usize| {
        matches!(bytes[at], b'e' | b'E')
            && at > 0
            && bytes.get(at + 1).is_some_and(|next| next.is_ascii_digit() || matches!(next, b'+' | b'-'))
    };
    let unit = (0..bytes.len()).find(|at| bytes[*at].is_ascii_alphabetic() && !is_exponent(*at))?;
    (unit > 0).then(|| text.split_at(unit))
}

impl<U> Clone for Quantity<U> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<U> Copy for Quantity<U> {}

impl<U> PartialEq for Quantity<U> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<U> PartialOrd for Quantity<U> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        self.0.partial_cmp(&other.0)
    }
}

impl<U: Unit> fmt::Display for Quantity<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The decimal units alone: those of a power of two are for reading.
        let mut decimal =
            U::SCALES.iter().filter(|(name, _)| !name.contains('i') && !name.contains('b')).rev();
        let fits = |(_, scale): &&(&str, f64)| self.0 >= *scale;
        let (name, scale) = decimal.find(fits).unwrap_or(&U::SCALES[0]);
        // To nine digits, so that what was written comes back as it was.
        let value: f64 = format!("{:.9e}", self.0 / scale).parse().map_err(|_| fmt::Error)?;
        write!(f, "{value} {name}")
    }
}

impl<U: Unit> fmt::Debug for Quantity<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl<'de, U: Unit> Deserialize<'de> for Quantity<U> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<U>(PhantomData<U>);
        impl<U: Unit> de::Visitor<'_> for Visitor<U> {
            type Value = Quantity<U>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} with its unit, such as {:?}", U::WHAT, U::EXAMPLE)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Quantity<U>, E> {
                Quantity::parse(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor(PhantomData))
    }
}

impl<U: Unit> Serialize for Quantity<U> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        for text in ["80 GB", "1.5 TB", "0.5 kB", "2039 GB"] {
            let size = Bytes::parse(text).unwrap();
            let again = Bytes::parse(&size.to_string()).unwrap();
            assert!((again.value() / size.value() - 1.0).abs() < 1e-9, "{text}: {again}");
        }
        assert_eq!(Bytes::parse("2039 GB").unwrap().to_string(), "2.039 TB");
        assert_eq!(Time::parse("0 ns").unwrap().to_string(), "0 ps");
        assert_eq!(Bytes::parse("1 GiB").unwrap().value(), 1073741824.0);
        for text in ["64MiB", "64 MiB", "0.064e3MiB", "6.4E+1MiB"] {
            assert_eq!(Bytes::parse(text).unwrap().value(), 67108864.0, "{text}");
        }
        assert_eq!(EnergyPrice::parse("0.12 USD/kWh").unwrap().to_string(), "0.12 USD/kWh");
        assert_eq!(Rent::parse("2.5 USD/h").unwrap().to_string(), "2.5 USD/h");
        assert_eq!(CarbonIntensity::parse("350 gCO2/kWh").unwrap().to_string(), "350 gCO2/kWh");
        assert_eq!(Lifetime::parse("4 years").unwrap().to_string(), "4 years");
    }

    #[test]
    fn what_is_no_quantity_says_what_was_expected() {
        let cases = [
            ("900", "its unit is missing"),
            ("900 GB", "its units are B/s, kB/s"),
            ("-1 GB/s", "it is negative"),
            ("0 GB/s", "it is 0"),
            ("much GB/s", "expected a bandwidth such as \"900 GB/s\""),
            ("GB/s", "its unit is missing"),
            ("9e", "its units are B/s, kB/s"),
            ("inf GB/s", "no such number"),
            ("NaN GB/s", "no such number"),
        ];
        for (text, why) in cases {
            let refusal = Bandwidth::parse(text).unwrap_err();
            assert!(refusal.contains(why), "{text}: {refusal}");
        }
    }
}
