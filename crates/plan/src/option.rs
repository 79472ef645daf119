//! Options that are text until a command reads them, so that a wrong one gets one line that names it.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use polder_platform::{Quantity, Unit, quoted};
use polder_sim::GivenError;
use polder_sim::memory::MemoryError;
use serde::de::DeserializeOwned;
use serde::de::value::{Error, StringDeserializer};

use crate::Failure;

/// A machine that has racks.
#[derive(Args)]
pub(super) struct Machine {
    /// The machine: a name (`polder plan show`), or the path of a file.
    #[arg(long, value_name = "PLATFORM")]
    pub(super) platform: String,
    /// Kind of rack, if the platform has several [default: the first by name].
    #[arg(long, value_name = "NAME")]
    pub(super) rack: Option<String>,
}

/// A choice among these words, which are also those of its JSON.
pub(super) fn choice<T>(words: impl IntoIterator<Item = &'static str>) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words)
        .map(|word| T::deserialize(StringDeserializer::<Error>::new(word)).expect("a word that was listed"))
}

/// Refuses a list of names with a comma too many.
pub(super) fn expect_names(option: &str, names: &[String]) -> Result<(), Failure> {
    match names.len() > 1 && names.iter().any(String::is_empty) {
        true => Err(Failure(format!("{option}: a name is empty; write one comma between two names"))),
        false => Ok(()),
    }
}

/// The quantity that an option gives.
pub(super) fn quantity<U: Unit>(option: &str, text: &str) -> Result<Quantity<U>, Failure> {
    Quantity::parse(text).map_err(|problem| Failure(format!("{option}: {problem}")))
}

/// That of an option which may be left out.
pub(super) fn given<U: Unit>(option: &str, text: Option<&str>) -> Result<Option<Quantity<U>>, Failure> {
    text.map(|text| quantity(option, text)).transpose()
}

/// What is wrong with an option's value.
pub(super) fn wrong(GivenError { key, problem }: &GivenError) -> Failure {
    Failure(format!("--{key}: {problem}"))
}

/// The same, or what else is wrong with a question about memory.
pub(super) fn of_memory(error: MemoryError) -> Failure {
    match error {
        MemoryError::Given(error) => wrong(&error),
        other => other.into(),
    }
}

/// A count of accelerators. It is text until here, so that a wrong one gets one line as any other wrong input does.
pub(super) fn accelerator_count(text: &str) -> Result<u32, Failure> {
    text.parse().map_err(|_| {
        Failure(format!("--gpus: expected a whole number of accelerators, found \"{}\"", quoted(text)))
    })
}

/// Links as `--failed` has them: two switches each, as `3-520`.
pub(super) fn failed_links(texts: &[String]) -> Result<Vec<(u32, u32)>, Failure> {
    let link = |text: &String| {
        let ends =
            text.split_once('-').and_then(|(one, other)| Some((one.parse().ok()?, other.parse().ok()?)));
        ends.ok_or_else(|| {
            Failure(format!("--failed: expected two switches such as 3-520, found \"{}\"", quoted(text)))
        })
    };
    texts.iter().map(link).collect()
}
