//! A model from the `config.json` of a Hugging Face repository.

use polder_platform::DataError;
use serde_json::{Map, Value};

use crate::model::{Experts, Model};

/// Kinds of model whose feed-forward part has no gate.
const UNGATED: [&str; 12] = [
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "gpt_bigcode",
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "phi",
    "starcoder2",
    "nemotron",
];

struct Config<'a> {
    file: &'a str,
    keys: Map<String, Value>,
}

impl Config<'_> {
    /// The first of these keys that is there.
    fn maybe(&self, keys: &[&str]) -> Result<Option<u32>, DataError> {
        let Some((key, value)) = keys.iter().find_map(|key| Some((*key, self.keys.get(*key)?))) else {
            return Ok(None);
        };
        match value {
            Value::Null => Ok(None),
            value => {
                value.as_u64().and_then(|number| u32::try_from(number).ok()).map(Some).ok_or_else(|| {
                    DataError::new(self.file, key, format!("expected a whole number, found {value}"))
                })
            }
        }
    }

    fn must(&self, keys: &[&str]) -> Result<u32, DataError> {
        let missing = || DataError::new(self.file, keys[0], "expected a whole number, found nothing");
        self.maybe(keys)?.ok_or_else(missing)
    }

    fn says(&self, key: &str) -> Option<bool> {
        self.keys.get(key)?.as_bool()
    }

    /// A mixture, when there is one, with the width of an expert.
    fn experts(&self) -> Result<Option<(Experts, Option<u32>)>, DataError> {
        let Some(count) =
            self.maybe(&["num_local_experts", "num_experts", "n_routed_experts"])?.filter(|count| *count > 1)
        else {
            return Ok(None);
        };
        let active = self.must(&["num_experts_per_tok", "moe_topk"])?;
        let shared = self.maybe(&["n_shared_experts"])?.unwrap_or(0);
        Ok(Some((Experts { count, active, shared }, self.maybe(&["moe_intermediate_size"])?)))
    }
}

/// Reads a model from the keys of a `config.json`.
///
/// # Errors
/// When it lacks what a transformer has.
pub(crate) fn model(file: &str, keys: Map<String, Value>) -> Result<Model, DataError> {
    let config = Config { file, keys };
    for (key, what) in [
        ("kv_lora_rank", "multi-head latent attention"),
        ("first_k_dense_replace", "dense blocks before experts"),
    ] {
        if config.keys.get(key).is_some_and(|value| !value.is_null() && *value != 0) {
            return Err(DataError::new(
                file,
                key,
                format!("a model with {what} cannot be described; see `polder plan list` for near ones"),
            ));
        }
    }
    let kind = config.keys.get("model_type").and_then(Value::as_str).unwrap_or("llama").to_owned();
    let experts = config.experts()?;
    let width = experts.as_ref().and_then(|(_, width)| *width);
    Ok(Model {
        title: format!("{kind} of {file}"),
        source: file.into(),
        hidden: config.must(&["hidden_size", "n_embd", "d_model"])?,
        layers: config.must(&["num_hidden_layers", "n_layer", "n_layers"])?,
        heads: config.must(&["num_attention_heads", "n_head", "n_heads"])?,
        kv_heads: match config.says("multi_query") {
            Some(true) => Some(1),
            _ => config.maybe(&["num_key_value_heads", "num_kv_heads"])?,
        },
        head_width: config.maybe(&["head_dim"])?,
        feed_forward: match width {
            Some(width) => Some(width),
            None => config.maybe(&["intermediate_size", "ffn_dim", "n_inner"])?,
        },
        gated: !UNGATED.contains(&kind.as_str()),
        dropout: false,
        vocabulary: config.must(&["vocab_size"])?,
        // What transformers takes where the key is missing.
        tied: config.says("tie_word_embeddings").unwrap_or(true),
        sequence: config.must(&["max_position_embeddings", "n_positions", "max_seq_len"])?,
        experts: experts.map(|(experts, _)| experts),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::model;

    #[test]
    fn a_config_gives_the_model_that_it_describes() {
        let llama = r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
            "tie_word_embeddings": false, "rope_theta": 500000.0}"#;
        let model = model("config.json", llama).unwrap();
        let ours = Model::load("llama3-8b").unwrap();
        assert_eq!(model.parameters(), ours.parameters());
        assert_eq!(model.flops(8), ours.flops(8));
    }

    #[test]
    fn mixtures_and_models_without_a_gate_are_told() {
        let mixtral = r#"{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
            "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": false}"#;
        let billions = model("config.json", mixtral).unwrap().parameters() / 1e9;
        assert!((billions - 46.7).abs() < 0.1, "{billions}");
        let gpt2 = r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": null,
            "n_positions": 1024, "vocab_size": 50257}"#;
        let millions = model("config.json", gpt2).unwrap().parameters() / 1e6;
        assert!((millions - 124.0).abs() < 1.0, "{millions}");
    }

    #[test]
    fn what_is_no_config_gets_one_line() {
        for (text, said) in [
            ("{", "config.json: line 1: EOF while parsing an object at line 1 column 1"),
            ("{}", "config.json: hidden_size: expected a whole number, found nothing"),
            (r#"{"hidden_size": -1}"#, "config.json: hidden_size: expected a whole number, found -1"),
        ] {
            assert_eq!(model("config.json", text).unwrap_err().to_string(), said);
        }
    }
}
