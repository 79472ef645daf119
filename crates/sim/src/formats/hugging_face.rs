//! A model from the `config.json` of a Hugging Face repository.

use polder_platform::{DataError, printable};
use serde_json::{Map, Value};

use crate::step::model::{Experts, Model};

/// Kinds of model whose feed-forward part has no gate.
const UNGATED: [&str; 23] = [
    "apertus",
    "arcee",
    "biogpt",
    "bloom",
    "codegen",
    "ctrl",
    "falcon",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gpt_neox_japanese",
    "gptj",
    "mpt",
    "nemotron",
    "openai-gpt",
    "opt",
    "persimmon",
    "phi",
    "RefinedWeb",
    "RefinedWebModel",
    "starcoder2",
    "xglm",
];

/// Kinds of model whose head is the embedding where nothing is said of it, as their classes in transformers have it.
const TIED: [&str; 21] = [
    "biogpt",
    "bloom",
    "cohere",
    "cohere2",
    "ctrl",
    "ernie4_5",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox_japanese",
    "jetmoe",
    "mpt",
    "openai-gpt",
    "opt",
    "smollm3",
    "starcoder2",
    "xglm",
];

/// What a model may have that ours have not, and what would be passed over in silence.
const UNKNOWN: [(&str, &str); 15] = [
    ("kv_lora_rank", "multi-head latent attention"),
    ("first_k_dense_replace", "dense blocks before experts"),
    ("mlp_only_layers", "dense blocks among those of experts"),
    ("parallel_attn_mlp_res", "a dense part beside the experts"),
    ("shared_expert_intermediate_size", "a shared expert of a width of its own"),
    ("shared_intermediate_size", "a shared expert of a width of its own"),
    ("moe_num_experts", "experts after dense blocks"),
    ("use_cla", "keys and values shared among blocks"),
    ("attention_chunk_size", "attention in chunks"),
    ("state_size", "state-space layers"),
    ("ssm_cfg", "state-space layers"),
    ("mamba_d_state", "state-space layers"),
    ("mamba_num_heads", "state-space layers"),
    ("lru_width", "recurrent layers"),
    ("attention_hidden_size", "recurrent layers"),
];

/// What a list may say of every block, and of none anything else.
const ALIKE: [(&str, &[&str], &str); 3] = [
    ("layer_types", &["full_attention", "sliding_attention"], "\"full_attention\""),
    ("attention_layers", &["global"], "\"global\""),
    ("attn_type_list", &["1"], "1, softmax attention,"),
];

/// Objects that say nothing of what is computed.
const ASIDE: [&str; 10] = [
    "auto_map",
    "compression_config",
    "generation_config",
    "id2label",
    "init_config",
    "label2id",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "task_specific_params",
];

/// Tokens of a sequence.
const SEQUENCE: [&str; 4] = ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length"];

struct Config<'a> {
    file: &'a str,
    keys: Map<String, Value>,
    /// Tokens of a sequence, in place of its own.
    sequence: Option<u32>,
}

impl Config<'_> {
    /// The first of these keys that is there.
    fn maybe(&self, keys: &[&str]) -> Result<Option<u32>, DataError> {
        let mut there = keys.iter().filter_map(|key| Some((*key, self.keys.get(*key)?)));
        let Some((key, value)) = there.find(|(_, value)| !value.is_null()) else { return Ok(None) };
        value
            .as_u64()
            .and_then(|number| u32::try_from(number).ok())
            .map(Some)
            .ok_or_else(|| DataError::new(self.file, key, format!("expected a whole number, found {value}")))
    }

    fn must(&self, keys: &[&str]) -> Result<u32, DataError> {
        let missing = || DataError::new(self.file, keys[0], "expected a whole number, found nothing");
        self.maybe(keys)?.ok_or_else(missing)
    }

    /// Tokens of a sequence: what is given, or else its own.
    fn sequence(&self) -> Result<Option<u32>, DataError> {
        self.sequence.map_or_else(|| self.maybe(&SEQUENCE), |it| Ok(Some(it)))
    }

    fn says(&self, key: &str) -> Option<bool> {
        self.keys.get(key)?.as_bool()
    }

    /// Whether it says that it is a decoder of text; one that says nothing of it is taken for one.
    fn expect_decoder(&self) -> Result<(), DataError> {
        let wrong = |key, problem: String| Err(DataError::new(self.file, key, problem));
        let named = self.keys.get("architectures").and_then(|it| it.get(0)).and_then(Value::as_str);
        if let Some(name) = named.filter(|name| !name.contains("CausalLM") && !name.contains("LMHead")) {
            return wrong(
                "architectures",
                format!("expected a decoder such as LlamaForCausalLM, found {name}"),
            );
        }
        if self.says("is_encoder_decoder") == Some(true) {
            return wrong(
                "is_encoder_decoder",
                "expected a decoder alone, found an encoder beside it".into(),
            );
        }
        match ["text_config", "vision_config"].into_iter().find(|key| self.keys.contains_key(*key)) {
            Some(key) => {
                let remedy = "give what text_config has as a file of its own";
                wrong(key, format!("expected a decoder of text alone; {remedy}"))
            }
            None => Ok(()),
        }
    }

    /// Whether all that it has can be described: what would be passed over in silence is refused.
    fn expect_known(&self) -> Result<(), DataError> {
        let has = |key: &str| self.keys.get(key).filter(|it| !it.is_null() && **it != 0 && **it != false);
        let near = "cannot be described; see `polder plan list` for near ones";
        for (key, what) in UNKNOWN {
            if has(key).is_some_and(|it| it.as_array().is_none_or(|list| !list.is_empty())) {
                return Err(DataError::new(self.file, key, format!("a model with {what} {near}")));
            }
        }
        if let Some(step) = has("decoder_sparse_step").filter(|step| **step != 1) {
            let problem = format!("expected 1, experts in every block, found {step}");
            return Err(DataError::new(self.file, "decoder_sparse_step", problem));
        }
        for (key, known, expected) in ALIKE {
            let layers = has(key).and_then(Value::as_array).into_iter().flatten();
            let is_known = |it: &&Value| known.contains(&it.to_string().trim_matches('"'));
            if let Some(other) = layers.into_iter().find(|it| !is_known(it)) {
                let problem = format!("expected {expected} of every block, found {other}");
                return Err(DataError::new(self.file, key, problem));
            }
        }
        let is_object = |it: &Value| it.as_object().is_some_and(|keys| !keys.is_empty());
        let mut inner = self.keys.iter().filter(|(key, it)| {
            let is_inner = is_object(it) || it.as_array().is_some_and(|all| all.iter().any(is_object));
            // Of MPT it says how attention is computed, not what.
            let is_aside = ASIDE.contains(&key.as_str())
                || *key == "attn_config" && it["attn_type"] == "multihead_attention";
            is_inner && !is_aside
        });
        if let Some((key, _)) = inner.next() {
            let problem = "what is described inside it cannot be read; give it as keys of the file, such as num_local_experts, and leave this out";
            return Err(DataError::new(self.file, key, problem));
        }
        // Qwen writes a window down also where it is not used.
        let window = has("sliding_window").and_then(Value::as_u64);
        let window = window.filter(|_| self.says("use_sliding_window") != Some(false));
        let sequence = self.sequence()?.map_or(u64::MAX, u64::from);
        match window.filter(|window| *window < sequence) {
            Some(window) => Err(DataError::new(
                self.file,
                "sliding_window",
                format!(
                    "attention within {window} of {sequence} tokens cannot be described; set it to null to have it predicted over all of them"
                ),
            )),
            None => Ok(()),
        }
    }

    /// A mixture, when there is one, with the width of an expert.
    fn experts(&self) -> Result<Option<(Experts, Option<u32>)>, DataError> {
        let Some(count) =
            self.maybe(&["num_local_experts", "num_experts", "n_routed_experts"])?.filter(|count| *count > 1)
        else {
            return Ok(None);
        };
        let active = self.must(&["num_experts_per_tok", "moe_topk"])?;
        let shared =
            self.maybe(&["n_shared_experts", "num_shared_experts", "num_shared_expert"])?.unwrap_or(0);
        Ok(Some((Experts { count, active, shared }, self.maybe(&["moe_intermediate_size"])?)))
    }
}

/// Reads a model from the keys of a `config.json`, with so many tokens of a sequence in place of its own.
///
/// # Errors
/// When it lacks what a transformer has.
pub(crate) fn model(file: &str, keys: Map<String, Value>, sequence: Option<u32>) -> Result<Model, DataError> {
    let config = Config { file, keys, sequence };
    config.expect_decoder()?;
    config.expect_known()?;
    let kind = config.keys.get("model_type").and_then(Value::as_str).unwrap_or("llama").to_owned();
    let experts = config.experts()?;
    let width = experts.as_ref().and_then(|(_, width)| *width);
    let missing = || {
        let problem = "expected a whole number, found nothing; give the tokens of a sequence";
        DataError::new(file, SEQUENCE[0], problem)
    };
    Ok(Model {
        title: printable(&format!("{kind} of {file}")).into_owned(),
        source: file.into(),
        hidden: config.must(&["hidden_size", "n_embd", "n_embed", "d_model"])?,
        layers: config.must(&["num_hidden_layers", "n_layer", "n_layers"])?,
        heads: config.must(&["num_attention_heads", "n_head", "n_heads"])?,
        // Falcon's newer models have it written down too, where it does not count.
        kv_heads: match ["multi_query", "new_decoder_architecture"].map(|key| config.says(key)) {
            [Some(true), None | Some(false)] => Some(1),
            _ => config.maybe(&["num_key_value_heads", "num_kv_heads"])?,
        },
        head_width: config.maybe(&["head_dim"])?,
        feed_forward: match width {
            Some(width) => Some(width),
            None => config.maybe(&["intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"])?,
        },
        gated: !UNGATED.contains(&kind.as_str()),
        dropout: false,
        vocabulary: config.must(&["vocab_size"])?,
        tied: config.says("tie_word_embeddings").unwrap_or(TIED.contains(&kind.as_str())),
        sequence: config.sequence()?.ok_or_else(missing)?,
        experts: experts.map(|(experts, _)| experts),
    })
}

#[cfg(test)]
mod tests {
    use super::super::json;
    use super::*;

    fn model(file: &str, text: &str) -> Result<Model, DataError> {
        json::model(file, text, None)
    }

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
        let falcon = |newer: bool| {
            let config = format!(
                r#"{{"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "vocab_size": 65024,
                "max_position_embeddings": 2048, "num_kv_heads": 8, "multi_query": true, "new_decoder_architecture": {newer}}}"#
            );
            model("config.json", &config).unwrap().kv_heads
        };
        assert_eq!([true, false].map(falcon), [Some(8), Some(1)]);
        let hunyuan = mixtral.replace("\"tie", "\"num_shared_expert\": 1, \"tie");
        assert_eq!(model("config.json", &hunyuan).unwrap().experts.unwrap().shared, 1);
        let codegen = r#"{"model_type": "codegen", "n_embd": 6144, "n_layer": 34, "n_head": 24, "n_inner": null,
            "n_positions": 2048, "vocab_size": 51200, "tie_word_embeddings": false}"#;
        let persimmon = r#"{"model_type": "persimmon", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 36,
            "num_attention_heads": 64, "vocab_size": 262144, "max_position_embeddings": 16384, "tie_word_embeddings": false}"#;
        for (config, expected) in [(codegen, 16.0), (persimmon, 9.4)] {
            let billions = model("config.json", config).unwrap().parameters() / 1e9;
            assert!((billions - expected).abs() < 0.1, "{billions}");
        }
        let gpt2 = r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": null,
            "n_positions": 1024, "vocab_size": 50257}"#;
        let millions = model("config.json", gpt2).unwrap().parameters() / 1e6;
        assert!((millions - 124.0).abs() < 1.0, "{millions}");
    }

    #[test]
    fn a_sequence_that_is_given_stands_in_for_one_that_is_not_there() {
        let falcon = r#"{"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
            "multi_query": true, "new_decoder_architecture": false, "vocab_size": 65024}"#;
        let refused = model("config.json", falcon).unwrap_err().to_string();
        let expected = "config.json: max_position_embeddings: expected a whole number, found nothing; give the tokens of a sequence";
        assert_eq!(refused, expected);
        let given = json::model("config.json", falcon, Some(2048)).unwrap();
        assert_eq!(given.sequence, 2048);
        assert!((given.parameters() / 1e9 - 6.92).abs() < 0.01, "{}", given.parameters());
        let bloom = r#"{"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "seq_length": 2048,
            "vocab_size": 250880}"#;
        let bloom = model("config.json", bloom).unwrap();
        assert_eq!((bloom.sequence, bloom.tied), (2048, true));
        assert!((bloom.parameters() / 1e9 - 176.2).abs() < 0.1, "{}", bloom.parameters());
        // A window counts against the sequence that is trained.
        let mistral = r#"{"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 8192, "sliding_window": 8192}"#;
        assert!(!model("config.json", mistral).unwrap().tied);
        let longer = json::model("config.json", mistral, Some(16384)).unwrap_err().to_string();
        assert!(
            longer.starts_with("config.json: sliding_window: attention within 8192 of 16384 tokens"),
            "{longer}"
        );
    }

    #[test]
    fn what_is_no_decoder_or_would_be_passed_over_in_silence_is_refused() {
        let whole = r#""model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 32768"#;
        for (more, said) in [
            (
                r#""sliding_window": 4096"#,
                "sliding_window: attention within 4096 of 32768 tokens cannot be described; set it to null to ",
            ),
            (
                r#""architectures": ["BertForMaskedLM"]"#,
                "architectures: expected a decoder such as LlamaForCausalLM, found BertForMaskedLM",
            ),
            (
                r#""is_encoder_decoder": true"#,
                "is_encoder_decoder: expected a decoder alone, found an encoder beside it",
            ),
            (
                r#""text_config": {}"#,
                "text_config: expected a decoder of text alone; give what text_config has as ",
            ),
            (r#""state_size": 16"#, "state_size: a model with state-space layers cannot be described; see "),
            (r#""kv_lora_rank": 512"#, "kv_lora_rank: a model with multi-head latent attention cannot be "),
            (
                r#""parallel_attn_mlp_res": true"#,
                "parallel_attn_mlp_res: a model with a dense part beside the experts cannot be ",
            ),
            (
                r#""mlp_only_layers": [0, 1]"#,
                "mlp_only_layers: a model with dense blocks among those of experts",
            ),
            (
                r#""decoder_sparse_step": 2"#,
                "decoder_sparse_step: expected 1, experts in every block, found 2",
            ),
            (
                r#""layer_types": ["full_attention", "linear_attention"]"#,
                "layer_types: expected \"full_attention\" of every block, found \"linear_attention\"",
            ),
            (
                r#""attention_layers": ["global", "local"]"#,
                "attention_layers: expected \"global\" of every block, found \"local\"",
            ),
            (
                r#""attn_type_list": [1, 0]"#,
                "attn_type_list: expected 1, softmax attention, of every block, found 0",
            ),
            (
                r#""ffn_config": {"moe_num_experts": 16}"#,
                "ffn_config: what is described inside it cannot be read; ",
            ),
            (
                r#""attn_config": {"kv_n_heads": 8}"#,
                "attn_config: what is described inside it cannot be read; ",
            ),
            (
                r#""block_configs": [{"attention": {"n_heads_in_group": 8}}]"#,
                "block_configs: what is described inside it cannot be read; ",
            ),
            (r#""use_cla": true"#, "use_cla: a model with keys and values shared among blocks cannot be "),
            (
                r#""shared_intermediate_size": 1024"#,
                "shared_intermediate_size: a model with a shared expert of a width of its own cannot be ",
            ),
            (
                r#""moe_num_experts": 64"#,
                "moe_num_experts: a model with experts after dense blocks cannot be ",
            ),
        ] {
            let refused = model("config.json", &format!("{{{whole}, {more}}}")).unwrap_err().to_string();
            assert!(refused.starts_with(&format!("config.json: {said}")), "{refused}");
            assert_eq!(refused.lines().count(), 1);
        }
        for more in [
            r#""sliding_window": null"#,
            r#""sliding_window": 32768"#,
            r#""parallel_attn_mlp_res": false"#,
            r#""sliding_window": 4096, "use_sliding_window": false"#,
            r#""rope_scaling": {"factor": 8.0}, "auto_map": {"AutoConfig": "a.B"}, "attn_type_list": [1, 1], "shared_intermediate_size": 0"#,
            r#""attn_config": {"attn_type": "multihead_attention"}, "use_cla": false, "task_specific_params": {"a": {"max_length": 50}}"#,
            r#""architectures": ["MistralForCausalLM"], "is_encoder_decoder": false, "mlp_only_layers": [], "decoder_sparse_step": 1"#,
        ] {
            assert_eq!(model("config.json", &format!("{{{whole}, {more}}}")).unwrap().layers, 32, "{more}");
        }
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
