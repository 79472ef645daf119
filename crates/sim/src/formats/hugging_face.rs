//! A model from the `config.json` of a Hugging Face repository.

use std::collections::BTreeMap;

use polder_platform::{DataError, printable, quoted};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::step::model::{Experts, MOST, Model};

/// What the class of a `model_type` reads, as transformers 5.23 or the code that comes with a model has it.
#[derive(Deserialize)]
struct Family {
    /// The names of its class.
    class: Vec<String>,
    /// The keys of sizes that it reads, with what it takes where a file leaves one out; `"must"` where it takes nothing.
    keys: Map<String, Value>,
    /// Keys of parts that it has anyway, or that count for less than a thousandth.
    #[serde(default)]
    aside: Vec<String>,
    /// Keys that it does not read, each with the one that says the same.
    #[serde(default)]
    same: BTreeMap<String, String>,
    /// Whether its feed-forward part has a gate.
    #[serde(default = "gated")]
    gated: bool,
    /// How many times as wide as the residual stream its feed-forward part is, where no key gives a width.
    times: Option<u32>,
    /// Rows of its table of learned positions besides one for each token; nothing where positions are computed.
    positions: Option<u32>,
}

const fn gated() -> bool {
    true
}

fn families() -> BTreeMap<String, Family> {
    serde_json::from_str(include_str!("families.json")).expect("families.json has families")
}

/// What a model may have that ours have not, and what would be passed over in silence.
const UNKNOWN: [(&str, &str); 24] = [
    ("kv_lora_rank", "multi-head latent attention"),
    ("q_lora_rank", "multi-head latent attention"),
    ("first_k_dense_replace", "dense blocks before experts"),
    ("num_dense_layers", "dense blocks before experts"),
    ("mlp_only_layers", "dense blocks among those of experts"),
    ("parallel_attn_mlp_res", "a dense part beside the experts"),
    ("shared_expert_intermediate_size", "a shared expert of a width of its own"),
    ("shared_intermediate_size", "a shared expert of a width of its own"),
    ("moe_num_experts", "experts after dense blocks"),
    ("use_cla", "keys and values shared among blocks"),
    ("attention_chunk_size", "attention in chunks"),
    ("conv_L_cache", "convolutions in place of attention"),
    ("state_size", "state-space layers"),
    ("ssm_cfg", "state-space layers"),
    ("mamba_d_state", "state-space layers"),
    ("mamba_num_heads", "state-space layers"),
    ("lru_width", "recurrent layers"),
    ("attention_hidden_size", "recurrent layers"),
    ("qk_dim_factor", "recurrent layers"),
    ("img_processor", "a vision part"),
    ("mm_vision_tower", "a vision part"),
    ("visual", "a vision part"),
    ("audio_config", "an audio part"),
    ("audio_processor", "an audio part"),
];

/// What a list may say of every block, and of none anything else.
const ALIKE: [(&str, &[&str], &str); 4] = [
    ("layer_types", &["full_attention", "sliding_attention"], "\"full_attention\""),
    ("attention_layers", &["global"], "\"global\""),
    ("attention_types", &["global"], "\"global\""),
    ("attn_type_list", &["1"], "1, softmax attention,"),
];

/// How many tokens a token looks at.
const WINDOWS: [&str; 3] = ["sliding_window", "sliding_window_size", "keep_window_size"];

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

/// Words of a key that may give a size, or say that there is another part.
const SIZES: &str = "adapter audio bias block chunk compress compressed conv cross decoder dense depth dim embed embedding encoder \
    expert factor ff ffn gate group head hidden image index inner intermediate kv latent layer lora mamba mlp mm moe mtp multiplier \
    nextn projector qk query rank ratio recurrent shared size sparse ssm state tie vision width window";
/// Last words of keys that give none all the same.
const NO_SIZES: &str = "act activation affine bound cap coef dropout dtype eps epsilon fp32 freq func function fusion id idx impl \
    implementation init loss method name norm path pdrop prob range scale scaling softcapping std theta type";
/// Other keys that give none.
const NO_SIZE: &str = "_sliding_window_pattern attention_multiplier dim_model_base do_layer_norm_before embedding_multiplier \
    encoder_no_repeat_ngram_size initializer_cutoff_factor is_decoder max_window_layers n_group no_repeat_ngram_size \
    no_rope_layer_interval no_rope_layers num_beam_groups original_max_position_embeddings output_hidden_states \
    partial_rotary_factor qk_layernorm query_pre_attn_scalar residual_multiplier rope_scaling_factor rotary_dim \
    routed_scaling_factor scale_embedding sliding_window_pattern topk_group";

// What one size is called: a family reads some of these.
const HIDDEN: &[&str] = &["hidden_size", "n_embd", "n_embed", "d_model"];
const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const HEADS: &[&str] = &["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"];
const KV_HEADS: &[&str] = &["num_key_value_heads", "num_kv_heads", "n_head_kv"];
const FEED_FORWARD: &[&str] =
    &["intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "dff", "ff_intermediate_size"];
const TIMES: &[&str] = &["expansion_ratio", "intermediate_multiple_size"];
const EXPERTS: &[&str] = &["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"];
const ACTIVE: &[&str] = &["num_experts_per_tok", "moe_topk", "moe_top_k"];
const SHARED: &[&str] =
    &["n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"];
/// Tokens of a sequence.
const SEQUENCE: &[&str] = &["max_position_embeddings", "n_positions", "max_seq_len", "seq_length"];

/// Where a model that cannot be read is described.
const BY_HAND: &str = "describe it in a model file (docs/plan-platforms.md, models)";

struct Config<'a> {
    file: &'a str,
    keys: Map<String, Value>,
    /// Tokens of a sequence, in place of its own.
    sequence: Option<u32>,
    kind: String,
    family: Family,
}

/// What a value says that is there, and neither nothing nor off.
fn said<'a>(keys: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    keys.get(key).filter(|it| match it {
        Value::Null | Value::Bool(false) => false,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(all) => !all.is_empty(),
        Value::Object(keys) => !keys.is_empty(),
        Value::Bool(true) => true,
    })
}

/// What a list of equal values says of each block, or a value of all.
fn each(value: &Value) -> &Value {
    match value {
        Value::Array(all) if all.windows(2).all(|pair| pair[0] == pair[1]) => all.first().unwrap_or(value),
        one => one,
    }
}

fn shown(value: &Value) -> String {
    quoted(&value.to_string())
}

/// Whether it says that it is a decoder of text; one that says nothing of it is taken for one.
fn expect_decoder(file: &str, keys: &Map<String, Value>) -> Result<(), DataError> {
    let wrong = |key: &str, problem: &str| Err(DataError::new(file, key, problem));
    if let Some(key) = ["text_config", "vision_config"].into_iter().find(|key| keys.contains_key(*key)) {
        let remedy = "expected a decoder of text alone; give what text_config has, and tie_word_embeddings, as a file of its own";
        return wrong(key, remedy);
    }
    let named = keys.get("architectures").and_then(|it| it.get(0)).and_then(Value::as_str);
    if let Some(name) = named.filter(|name| !name.contains("CausalLM") && !name.contains("LMHead")) {
        let quoted_name = quoted(name);
        return wrong(
            "architectures",
            &format!("expected a decoder such as LlamaForCausalLM, found {quoted_name}"),
        );
    }
    match keys.get("is_encoder_decoder") {
        Some(Value::Bool(true)) => {
            wrong("is_encoder_decoder", "expected a decoder alone, found an encoder beside it")
        }
        _ => Ok(()),
    }
}

/// The family of a config and its `model_type`: what would be passed over in silence is refused, and so is what no family here has.
fn family(file: &str, keys: &Map<String, Value>) -> Result<(String, Family), DataError> {
    let wrong = |key: &str, problem: String| Err(DataError::new(file, key, problem));
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let kind = keys.get("model_type").filter(|it| !it.is_null());
    let class = keys.get("architectures").and_then(|it| it.get(0)).and_then(text);
    let plain = |name: &str| name.replace('_', "").to_lowercase();
    let has = |family: &Family, class: &str| family.class.iter().any(|own| plain(own) == plain(class));
    let mut families = families();
    let known = families.keys().cloned().collect::<Vec<_>>().join(", ");
    let kind = match (kind, &class) {
        (Some(kind), _) => text(kind),
        // Some read files of others, too: those name their own class first.
        (None, Some(class)) => {
            let own = |family: &Family| family.class.first().is_some_and(|own| plain(own) == plain(class));
            families.iter().find(|(_, family)| own(family)).map(|(kind, _)| kind.clone())
        }
        (None, None) => None,
    };
    let found = kind.as_ref().and_then(|kind| families.remove(kind));
    for (key, what) in UNKNOWN {
        if said(keys, key).is_some() && !found.as_ref().is_some_and(|it| it.keys.contains_key(key)) {
            let near = "cannot be described; see `polder plan show` for near ones";
            return wrong(key, format!("a model with {what} {near}"));
        }
    }
    let Some((kind, family)) = kind.zip(found) else {
        let found = match (keys.get("model_type"), &class) {
            (Some(kind), _) => shown(kind),
            (None, Some(class)) => format!("nothing, and the class {}", quoted(class)),
            (None, None) => "nothing".into(),
        };
        return wrong(
            "model_type",
            format!("expected a known one, found {found}; {BY_HAND}. Known are {known}"),
        );
    };
    match class.filter(|class| !has(&family, class)) {
        Some(class) => {
            let own = family.class.first().map_or("no class", |own| own);
            let class = quoted(&class);
            wrong("architectures", format!("expected {own} of a {kind}, found {class}; {BY_HAND}"))
        }
        None => Ok((kind, family)),
    }
}

impl Config<'_> {
    fn wrong<T>(&self, key: &str, problem: impl Into<String>) -> Result<T, DataError> {
        Err(DataError::new(self.file, key, problem))
    }

    /// The key among these that its family reads and the file has, or the class where the file has none, with what that says.
    fn read(&self, names: &[&'static str]) -> Result<(&'static str, &Value), DataError> {
        let read: Vec<_> =
            names.iter().copied().filter(|name| self.family.keys.contains_key(*name)).collect();
        let own = read.iter().filter_map(|name| Some((*name, self.keys.get(*name)?)));
        let class = read.iter().map(|name| (*name, &self.family.keys[*name]));
        let is_said = |(_, value): &(&str, &Value)| !value.is_null();
        let mut all = own.clone().filter(is_said);
        let Some((name, value)) = all.next() else {
            let nothing = own.chain(class.clone().filter(is_said)).next();
            return Ok(nothing.or_else(|| class.clone().next()).unwrap_or((names[0], &Value::Null)));
        };
        match all.find(|(_, other)| *other != value) {
            Some((other, found)) => self
                .wrong(other, format!("expected {}, as {name} says, found {}", shown(value), shown(found))),
            None => Ok((name, value)),
        }
    }

    /// A whole number, where there is one.
    fn maybe(&self, names: &[&'static str]) -> Result<Option<u32>, DataError> {
        match self.read(names)? {
            (_, Value::Null) => Ok(None),
            (name, value) => self.whole(name, value).map(Some),
        }
    }

    fn must(&self, names: &[&'static str]) -> Result<u32, DataError> {
        let (name, value) = self.read(names)?;
        match self.whole(name, value)? {
            0 => self.wrong(name, "expected a whole number from 1 on, found 0"),
            number => Ok(number),
        }
    }

    /// What a value says at a key.
    fn whole(&self, name: &str, value: &Value) -> Result<u32, DataError> {
        match each(value)
            .as_u64()
            .and_then(|number| u32::try_from(number).ok())
            .filter(|number| *number <= MOST)
        {
            Some(number) => Ok(number),
            None if value.is_null() || value == "must" => {
                self.wrong(name, "expected a whole number, found nothing")
            }
            None => {
                self.wrong(name, format!("expected a whole number, {MOST} at most, found {}", shown(value)))
            }
        }
    }

    fn flag(&self, name: &'static str) -> Result<bool, DataError> {
        match self.read(&[name])?.1 {
            Value::Null => Ok(false),
            Value::Bool(is_so) => Ok(*is_so),
            value if value == "must" => self.wrong(name, "expected true or false, found nothing"),
            value => self.wrong(name, format!("expected true or false, found {}", shown(value))),
        }
    }

    /// Tokens of a sequence: what is given, or else its own.
    fn sequence(&self) -> Result<Option<u32>, DataError> {
        let own =
            || SEQUENCE.iter().find_map(|key| Some((*key, self.keys.get(*key).filter(|it| !it.is_null())?)));
        match self.sequence {
            Some(given) => Ok(Some(given)),
            None => own().map(|(key, value)| self.whole(key, value)).transpose(),
        }
    }

    /// Whether all that it has can be described: what would be passed over in silence is refused.
    fn expect_known(&self) -> Result<(), DataError> {
        if let Some(step) = said(&self.keys, "decoder_sparse_step").filter(|step| **step != 1) {
            let problem = format!("expected 1, experts in every block, found {}", shown(step));
            return self.wrong("decoder_sparse_step", problem);
        }
        for (key, known, expected) in ALIKE {
            let value = self.keys.get(key).or_else(|| self.family.keys.get(key));
            let is_known = |it: &&Value| known.contains(&it.to_string().trim_matches('"'));
            // Beside words, numbers say of how many blocks.
            let counts = |it: &&Value| key == "attention_types" && it.is_number();
            if let Some(other) = leaves(value.unwrap_or(&Value::Null)).find(|it| !is_known(it) && !counts(it))
            {
                return self
                    .wrong(key, format!("expected {expected} of every block, found {}", shown(other)));
            }
        }
        let is_object = |it: &Value| it.as_object().is_some_and(|keys| !keys.is_empty());
        let mut inner = self.keys.iter().filter(|(key, it)| {
            let is_inner = is_object(it) || it.as_array().is_some_and(|all| all.iter().any(is_object));
            // Of MPT it says how attention is computed, not what.
            let is_aside = ASIDE.contains(&key.as_str())
                || *key == "attn_config"
                    && it["attn_type"] == "multihead_attention"
                    && it["kv_n_heads"].is_null();
            is_inner && !is_aside
        });
        if let Some((key, _)) = inner.next() {
            let problem = "what is described inside it cannot be read; give it as keys of the file, such as num_local_experts, and leave this out";
            return self.wrong(key, problem);
        }
        if said(&self.keys, "blocksparse_block_size").is_some() {
            let problem = "attention to some blocks of tokens alone cannot be described; set it to null to have it predicted over all of them";
            return self.wrong("blocksparse_block_size", problem);
        }
        for (key, other) in &self.family.same {
            let same =
                self.keys.get(other).or_else(|| self.family.keys.get(other)).filter(|it| !it.is_null());
            if let Some((found, same)) =
                said(&self.keys, key).zip(same).filter(|(it, same)| each(it) != each(same))
            {
                return self.wrong(
                    key,
                    format!("expected {}, as {other} says, found {}", shown(same), shown(found)),
                );
            }
        }
        let unknown = self.keys.keys().find(|key| self.is_unknown_size(key));
        match unknown.map(|key| (key, shown(&self.keys[key]))) {
            Some((key, found)) => self.wrong(
                key,
                format!(
                    "expected nothing, because no {} here has such a size, found {found}; leave it out where it changes nothing, or {BY_HAND}",
                    self.kind
                ),
            ),
            None => self.expect_no_window(),
        }
    }

    /// Whether a key may give a size that the family does not read.
    fn is_unknown_size(&self, key: &str) -> bool {
        let is_in = |words: &str, word: &str| words.split_ascii_whitespace().any(|it| it == word);
        let lower = key.to_lowercase();
        let mut words = lower.split('_').filter(|word| !word.is_empty());
        let is_size =
            words.clone().any(|word| is_in(SIZES, word) || is_in(SIZES, word.trim_end_matches('s')));
        let last = words.next_back().unwrap_or_default();
        let is_known = self.family.keys.contains_key(key)
            || self.family.aside.iter().any(|it| it == key)
            || self.family.same.contains_key(key)
            || [
                SEQUENCE,
                &WINDOWS,
                &ASIDE,
                &ALIKE.map(|it| it.0),
                &["use_sliding_window", "decoder_sparse_step", "blocksparse_block_size"],
            ]
            .iter()
            .any(|known| known.contains(&key));
        is_size
            && !is_known
            && !self.is_meant(key)
            && !is_in(NO_SIZES, last)
            && !is_in(NO_SIZE, key)
            && said(&self.keys, key).is_some()
    }

    /// That each token looks at all before it.
    fn expect_no_window(&self) -> Result<(), DataError> {
        // Qwen writes a window down also where it is not used.
        let switch =
            self.keys.get("use_sliding_window").or_else(|| self.family.keys.get("use_sliding_window"));
        let sequence = self.sequence()?.map_or(u64::MAX, u64::from);
        for key in WINDOWS {
            let value = self.keys.get(key).or_else(|| self.family.keys.get(key));
            let is_off = key.starts_with("sliding_window") && switch == Some(&Value::Bool(false));
            let Some(value) = value.filter(|it| !is_off && !it.is_null() && **it != false) else { continue };
            let window = u64::from(self.whole(key, value)?);
            if window < sequence && window > 0 {
                let whose = if self.keys.contains_key(key) { "" } else { " (left out: the class has it)" };
                return self.wrong(
                    key,
                    format!(
                        "attention within {window} of {sequence} tokens{whose} cannot be described; set it to null to have it predicted over all of them"
                    ),
                );
            }
        }
        Ok(())
    }

    /// Heads of keys and values, where they are fewer than those of queries.
    fn kv_heads(&self) -> Result<Option<u32>, DataError> {
        // Falcon's newer models have it written down too, where it does not count.
        match self.flag("multi_query")? && !self.flag("new_decoder_architecture")? {
            true => Ok(Some(1)),
            false => self.maybe(KV_HEADS),
        }
    }

    /// Whether a key says of the heads of keys and values what its family means without it.
    fn is_meant(&self, key: &str) -> bool {
        let meant = || self.kv_heads().ok()?.or_else(|| self.must(HEADS).ok());
        KV_HEADS.contains(&key)
            && meant().is_some_and(|meant| each(&self.keys[key]).as_u64() == Some(meant.into()))
    }

    /// A mixture, when there is one, with the width of an expert.
    fn experts(&self) -> Result<Option<(Experts, Option<u32>)>, DataError> {
        let Some(count) = self.maybe(EXPERTS)?.filter(|count| *count > 1) else { return Ok(None) };
        let active = self.must(ACTIVE)?;
        let shared = self.maybe(SHARED)?.unwrap_or(0);
        Ok(Some((Experts { count, active, shared }, self.maybe(&["moe_intermediate_size"])?)))
    }

    /// The width of a feed-forward part.
    fn feed_forward(&self, hidden: u32) -> Result<u32, DataError> {
        match (self.maybe(FEED_FORWARD)?, self.maybe(TIMES)?.or(self.family.times)) {
            (None, Some(times)) => Ok(hidden.saturating_mul(times)),
            _ => self.must(FEED_FORWARD),
        }
    }
}

/// All values inside a list that are none.
fn leaves(value: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match value {
        Value::Array(all) => Box::new(all.iter().flat_map(leaves)),
        Value::Null | Value::Bool(false) => Box::new(std::iter::empty()),
        leaf => Box::new(std::iter::once(leaf)),
    }
}

/// Reads a model from the keys of a `config.json`, with so many tokens of a sequence in place of its own.
///
/// # Errors
/// When it lacks what a transformer has, or has what no known one of its kind has.
pub(crate) fn model(file: &str, keys: Map<String, Value>, sequence: Option<u32>) -> Result<Model, DataError> {
    expect_decoder(file, &keys)?;
    let (kind, family) = family(file, &keys)?;
    let config = Config { file, keys, sequence, kind, family };
    config.expect_known()?;
    let hidden = config.must(HIDDEN)?;
    let experts = config.experts()?;
    let width = experts.as_ref().and_then(|(_, width)| *width);
    let missing = || {
        let problem = "expected a whole number, found nothing; give the tokens of a sequence";
        DataError::new(file, SEQUENCE[0], problem)
    };
    Ok(Model {
        title: printable(&format!("{} of {file}", config.kind)).into_owned(),
        source: file.into(),
        hidden,
        layers: config.must(LAYERS)?,
        heads: config.must(HEADS)?,
        kv_heads: config.kv_heads()?,
        head_width: config.maybe(&["head_dim"])?,
        feed_forward: Some(width.map_or_else(|| config.feed_forward(hidden), Ok)?),
        gated: config.family.gated,
        dropout: false,
        vocabulary: config.must(&["vocab_size"])?,
        tied: config.flag("tie_word_embeddings")?,
        positions: match config.family.positions {
            Some(more) => config.must(SEQUENCE)? + more,
            None => 0,
        },
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
            "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": null"#;
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
                "text_config: expected a decoder of text alone; give what text_config has, and tie_word_embeddings, as ",
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
            (
                r#"{"model_type": "llama", "hidden_size": -1}"#,
                "config.json: hidden_size: expected a whole number, 67108864 at most, found -1",
            ),
            (
                r#"{"model_type": "Yi", "hidden_size": 4096}"#,
                "config.json: num_hidden_layers: expected a whole number, found nothing",
            ),
        ] {
            assert_eq!(model("config.json", text).unwrap_err().to_string(), said);
        }
        let nothing = model("config.json", "{}").unwrap_err().to_string();
        assert!(
            nothing.starts_with("config.json: model_type: expected a known one, found nothing; "),
            "{nothing}"
        );
    }

    /// A model in billions, or what is said of it.
    fn billions(text: &str) -> Result<f64, String> {
        let model = json::model("config.json", text, Some(128)).map_err(|error| error.to_string())?;
        Ok(model.parameters() / 1e9)
    }

    /// `tests/families.jsonl` is made by scripts/families.py: counts of transformers 5.23.0, of each family two.
    #[test]
    fn every_family_has_as_many_parameters_as_transformers_counts() {
        let lines = include_str!("../../tests/families.jsonl").lines();
        let mut counted = std::collections::BTreeSet::new();
        let mut wrong = vec![];
        for line in lines {
            let line: Value = serde_json::from_str(line).unwrap();
            counted.insert(line["config"]["model_type"].as_str().unwrap().to_owned());
            match billions(&line["config"].to_string()) {
                Ok(found) => {
                    let off = found * 1e9 / line["parameters"].as_f64().unwrap() - 1.0;
                    wrong.extend((off.abs() >= 1e-3).then(|| format!("{off:+.5}: {line}")));
                }
                Err(error) => wrong.push(format!("{error}: {line}")),
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(
            counted.iter().all(|kind| families().contains_key(kind)) && counted.len() > 70,
            "{counted:?}"
        );
    }

    /// Published sizes of models whose classes are no part of transformers, or whose files differ from what their classes write.
    #[test]
    fn files_as_they_are_published_give_the_published_sizes() {
        let llama = r#""hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32"#;
        for (config, expected) in [
            // Heads of keys and values under another name: huggingface/transformers#24523.
            (r#""model_type": "RefinedWeb", "architectures": ["RWForCausalLM"], "hidden_size": 8192, "n_head": 128, "n_head_kv": 8,
                "n_layer": 60, "parallel_attn": true, "vocab_size": 65024"#.to_owned(), 41.303),
            (r#""model_type": "RefinedWebModel", "hidden_size": 4544, "n_head": 71, "n_layer": 32, "multi_query": true,
                "vocab_size": 65024"#.into(), 6.922),
            (format!(r#""model_type": "phi3small", {llama}, "ff_intermediate_size": 14336, "num_key_value_heads": 8,
                "dense_attention_every_n_layers": 2, "vocab_size": 100352"#), 7.392),
            (r#""model_type": "minicpm", "hidden_size": 2304, "intermediate_size": 5760, "num_hidden_layers": 40, "scale_depth": 1.4,
                "num_attention_heads": 36, "num_key_value_heads": 36, "vocab_size": 122753"#.into(), 2.725),
            (r#""model_type": "exaone", "hidden_size": 4096, "num_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 102400, "tie_word_embeddings": false"#.into(), 7.818),
            (format!(r#""model_type": "baichuan", {llama}, "intermediate_size": 11008, "vocab_size": 125696"#), 7.506),
            (format!(r#""model_type": "internlm2", {llama}, "num_key_value_heads": 8, "intermediate_size": 14336,
                "vocab_size": 92544"#), 7.738),
            (format!(r#""model_type": "Yi", {llama}, "intermediate_size": 11008, "vocab_size": 64000"#), 6.061),
            (r#""model_type": "bailing_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
                "num_experts": 64, "num_shared_experts": 2, "num_experts_per_tok": 6, "num_attention_heads": 16,
                "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 126464"#.into(), 16.8),
            (r#""model_type": "xverse", "hidden_size": 2560, "intermediate_size": 1728, "num_hidden_layers": 28, "num_experts": 64,
                "moe_top_k": 6, "num_shared_experts": 2, "num_attention_heads": 32, "vocab_size": 100278"#.into(), 25.777),
            // Lists of equal numbers, one for each block.
            (format!(r#""model_type": "hunyuan_v1_moe", {llama}, "num_key_value_heads": 8, "head_dim": 128, "attention_head_dim": 128,
                "intermediate_size": 3072, "moe_intermediate_size": [3072, 3072], "num_experts": 64, "moe_topk": [8, 8],
                "num_shared_expert": [1, 1], "tie_word_embeddings": true, "vocab_size": 128167"#), 80.393),
            // Experts that are off, and a window as long as a sequence.
            (r#""model_type": "doge", "num_key_value_heads": 4, "is_moe": false, "num_experts": 16384, "num_experts_per_tok": 64,
                "tie_word_embeddings": true"#.into(), 0.3358),
            // A window under two names, longer than the sequence.
            (r#""model_type": "gemma2", "head_dim": 256, "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
                "num_hidden_layers": 42, "num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_size": 4096,
                "vocab_size": 256000"#.into(), 9.242),
            // What Python writes for infinity: huggingface/transformers#42959.
            (format!(r#""model_type": "llama", {llama}, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
                "time_step_limit": [0.0, Infinity, -Infinity, NaN], "_name_or_path": "a \"NaN\" \\""#), 8.030),
        ] {
            let found = billions(&format!("{{{config}}}")).unwrap_or_else(|error| panic!("{config}: {error}"));
            assert!((found / expected - 1.0).abs() < 1e-3, "{found} in place of {expected}: {config}");
        }
    }

    #[test]
    fn what_no_family_has_is_refused_by_name_and_never_guessed() {
        let llama = |more: &str| format!(r#"{{"model_type": "llama", {more}}}"#);
        let kind = |kind: &str, more: &str| format!(r#"{{"model_type": "{kind}", {more}}}"#);
        for (config, said) in [
            (
                kind("afmoe", r#""hidden_size": 2048"#),
                "model_type: expected a known one, found \"afmoe\"; describe it in a model file",
            ),
            (
                kind("lfm2", r#""conv_L_cache": 3"#),
                "conv_L_cache: a model with convolutions in place of attention",
            ),
            (
                kind("afmoe", r#""num_dense_layers": 2"#),
                "num_dense_layers: a model with dense blocks before experts",
            ),
            (
                kind("deepseek_v4", r#""q_lora_rank": 1024, "sliding_window": null"#),
                "q_lora_rank: a model with multi-head latent",
            ),
            (
                kind("xlstm", r#""num_blocks": 32, "qk_dim_factor": 0.5"#),
                "qk_dim_factor: a model with recurrent layers",
            ),
            (kind("llava", r#""mm_vision_tower": "clip""#), "mm_vision_tower: a model with a vision part"),
            (
                kind("phi3_v", r#""img_processor": {"name": "clip"}"#),
                "img_processor: a model with a vision part",
            ),
            (
                kind("opt", r#""hidden_size": 1024, "word_embed_proj_dim": 512"#),
                "word_embed_proj_dim: expected 1024, as hidden_size says, found 512",
            ),
            (
                kind("phi3small", r#""blocksparse_block_size": 64"#),
                "blocksparse_block_size: attention to some blocks of tokens alone",
            ),
            (
                kind("mistral", r#""sliding_window": 64"#),
                "sliding_window: attention within 64 of 128 tokens cannot",
            ),
            (
                kind("gpt_bigcode", r#""num_key_value_heads": 4"#),
                "num_key_value_heads: expected nothing, because no gpt_bigcode here has such a size, found 4",
            ),
            (
                kind("gpt_bigcode", r#""multi_query": false, "num_key_value_heads": 1"#),
                "num_key_value_heads: expected nothing, because no gpt_bigcode here has such a size, found 1",
            ),
            (
                kind("gpt_oss", r#""hidden_size": 2880, "sliding_window": 127"#),
                "sliding_window: attention within 127 of 128 tokens cannot",
            ),
            (
                kind("gpt_neo", r#""num_layers": 24"#),
                "attention_types: expected \"global\" of every block, found \"local\"",
            ),
            (
                kind("qwen3_vl_text", r#""hidden_size": 2560"#),
                "tie_word_embeddings: expected true or false, found nothing",
            ),
            (
                llama(r#""architectures": ["LlavaLlamaForCausalLM"]"#),
                "architectures: expected LlamaForCausalLM of a llama, found LlavaLlama",
            ),
            (
                llama(r#""num_experts": 8"#),
                "num_experts: expected nothing, because no llama here has such a size, found 8; leave it out",
            ),
            (llama(r#""ffn_dim_multiplier": 1.3"#), "ffn_dim_multiplier: expected nothing, because no llama"),
            (
                llama(r#""num_nextn_predict_layers": 1"#),
                "num_nextn_predict_layers: expected nothing, because no llama",
            ),
            (
                kind("qwen2", r#""attention_bias": true"#),
                "attention_bias: expected nothing, because no qwen2",
            ),
            (kind("stablelm", r#""head_dim": 160"#), "head_dim: expected nothing, because no stablelm"),
            (kind("doge", r#""is_moe": true"#), "is_moe: expected nothing, because no doge"),
            (
                kind("gpt2", r#""n_embd": 768, "hidden_size": 1024"#),
                "n_embd: expected 1024, as hidden_size says, found 768",
            ),
            (
                llama(r#""num_attention_heads": [32, 16]"#),
                "num_attention_heads: expected a whole number, 67108864 at most, found [32,16]",
            ),
            (
                llama(r#""intermediate_size": null"#),
                "intermediate_size: expected a whole number, found nothing",
            ),
            (
                llama(r#""tie_word_embeddings": "yes""#),
                "tie_word_embeddings: expected true or false, found \"yes\"",
            ),
        ] {
            let refused = billions(&config).expect_err(&config);
            assert!(refused.starts_with(&format!("config.json: {said}")), "{config}: {refused}");
        }
        // A class alone tells the family, and how its name is spelled does not matter.
        for config in [
            r#"{"architectures": ["LLaMAForCausalLM"]}"#,
            r#"{"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"]}"#,
        ] {
            billions(config).unwrap();
        }
    }

    #[test]
    fn a_size_that_none_can_be_is_refused_at_its_key() {
        for key in
            ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
        {
            for value in [
                "0",
                "-1",
                "4096.5",
                "1e99",
                "99999999999999999999",
                "67108865",
                "\"4096\"",
                "true",
                "NaN",
                "{}",
            ] {
                let refused =
                    billions(&format!(r#"{{"model_type": "llama", "{key}": {value}}}"#)).expect_err(value);
                assert!(
                    refused.starts_with(&format!("config.json: {key}: expected ")),
                    "{key} of {value}: {refused}"
                );
            }
        }
        let long = format!(r#"{{"model_type": "llama", "hidden_size": "{}"}}"#, "9".repeat(1 << 20));
        assert!(billions(&long).unwrap_err().len() < 400);
    }
}
