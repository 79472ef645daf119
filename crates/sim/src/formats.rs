//! Files that describe models and layouts: Polder's own, and those of others.

mod calculon;
mod hugging_face;
mod json;

use polder_platform::{DataError, Folder, read, text};

pub use self::calculon::Execution;
use crate::step::model::Model;

impl Model {
    /// Reads a model: one that Polder brings along by its name, any other by the path of its file, or of a `.json`:
    /// a Hugging Face `config.json` or a model of Calculon.
    ///
    /// # Errors
    /// When there is none, or its file says what cannot be.
    pub fn load(name: &str) -> Result<Self, DataError> {
        Self::load_with(name, None)
    }

    /// As [`Model::load`], with so many tokens of a sequence in place of its own, which its file need not have then.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load_with(name: &str, sequence: Option<u32>) -> Result<Self, DataError> {
        let mut model: Self = match name.ends_with(".json") {
            true => json::model(name, &text(Folder::Models, name)?, sequence)?,
            false => read(Folder::Models, name)?,
        };
        model.sequence = sequence.unwrap_or(model.sequence);
        model.check().map_err(|(key, problem)| DataError::new(name, key, problem))?;
        Ok(model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of a model's own file.
    #[test]
    fn a_number_of_a_model_that_none_can_be_is_refused_at_its_key() {
        let path = std::env::temp_dir().join(format!("polder-models-{}.toml", std::process::id()));
        let load = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Model::load(path.to_str().unwrap()).map(drop).map_err(|error| error.to_string())
        };
        let keys = [
            "hidden",
            "layers",
            "heads",
            "kv_heads",
            "head_width",
            "feed_forward",
            "vocabulary",
            "positions",
            "sequence",
        ];
        let numbers = |wrong: &str, value: &str| {
            let number = |key: &&str| format!("{key} = {}\n", if *key == wrong { value } else { "128" });
            keys.iter().map(number).collect::<String>()
        };
        let experts = |wrong: &str, value: &str| {
            let number = |key: &str| format!("{key} = {}", if key == wrong { value } else { "2" });
            format!("experts = {{ {} }}\n", ["count", "active", "shared"].map(number).join(", "))
        };
        let file = |wrong: &str, value: &str| {
            let title =
                format!("title = \"a\"\nsource = \"b\"\n{}{}", numbers(wrong, value), experts(wrong, value));
            load(&title)
        };
        assert_eq!(file("", ""), Ok(()));
        for key in keys.iter().chain(&["count", "active", "shared"]) {
            // Nothing of these is a model without them.
            let may_be_none = ["vocabulary", "positions", "shared"].contains(key);
            let zero: &[&str] = if may_be_none { &[] } else { &["0"] };
            for value in zero.iter().chain(&[
                "-1",
                "1.5",
                "67108865",
                "99999999999",
                "nan",
                "inf",
                "1e99",
                "\"1\"",
                "true",
            ]) {
                let refusal = file(key, value).expect_err(&format!("{key} = {value}"));
                assert!(refusal.contains(key), "{key} = {value}: {refusal}");
            }
            let refusal = file(key, &format!("\"{}\"", "9".repeat(1 << 20))).unwrap_err();
            assert!(refusal.len() < 2000, "{key}: {}", refusal.len());
        }
        // What no block reads.
        let recurrent =
            "recurrent = { into = 8, width = 8, state = 8, convolved = 8, kernel = 4, inside = 0 }\n";
        let latent = "latent = { queries = 0, keys = 64, rotated = 1, values = 1 }\n";
        let other = "[[others]]\nblocks = 4\nmixer = \"recurrent\"\n";
        let with = |more: &str| load(&format!("title = \"a\"\nsource = \"b\"\n{}{more}", numbers("", "")));
        for (more, said) in [
            (recurrent.to_owned(), "recurrent: no block is recurrent; give mixer = \"recurrent\" or "),
            (
                format!("{recurrent}mixer = \"recurrent\"\nattention_gate = true\n"),
                "attention_gate: no block attends",
            ),
            ("mixer = \"none\"\nwindow = { tokens = 8 }\n".into(), "window: no block attends; leave it out"),
            (latent.to_owned(), "kv_heads: expected nothing beside latent, which all heads share, found 128"),
        ] {
            let refusal = with(&more).expect_err(&more);
            assert!(refusal.contains(said), "{more}: {refusal}");
        }
        assert_eq!(with(&format!("{recurrent}{other}")), Ok(()));
        std::fs::remove_file(&path).unwrap();
    }
}
