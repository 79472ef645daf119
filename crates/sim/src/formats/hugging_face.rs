//! A model from the `config.json` of a Hugging Face repository.

use std::collections::BTreeMap;

use polder_platform::{DataError, printable, quoted};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::step::model::{
    Experts, Indexer, Latent, MOST, MOST_LAYERS, Mixer, Model, OtherBlocks, Recurrent, Window,
};

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
    /// Keys of parts that cannot be described, with what the class takes where a file leaves one out: 0 everywhere else.
    #[serde(default)]
    zero: BTreeMap<String, u32>,
    /// Whether its feed-forward part has a gate.
    #[serde(default = "gated")]
    gated: bool,
    /// How many times as wide as the residual stream its feed-forward part is, where no key gives a width.
    times: Option<u32>,
    /// What its recurrent blocks mix tokens by.
    recurrent: Option<Recurrence>,
    /// Whether recurrent mixers stand beside attention, in each block.
    #[serde(default)]
    beside: bool,
    /// Whether a block that mixes tokens has no feed-forward part.
    #[serde(default)]
    alone: bool,
    /// Whether attention has an output gate.
    #[serde(default)]
    attention_gate: bool,
    /// Of so many blocks one looks at all tokens, the others at those of a window; with 0 none does, where no key says otherwise.
    pattern: Option<u32>,
    /// Which of these blocks it is: the last when left out.
    whole: Option<u32>,
    /// Rows of its table of learned positions besides one for each token; nothing where positions are computed.
    positions: Option<u32>,
    /// Whether queries and keys pass a norm, each head by itself, where no key says so.
    #[serde(default)]
    query_key_norms: bool,
    /// Experts that every token goes through, where no key says how many.
    shared: Option<u32>,
    /// From how many experts on its class makes a mixture; of fewer it makes a dense part.
    #[serde(default = "one")]
    experts_from: u32,
    /// Whether its heads have to be as wide together as the residual stream, because its class leads out of them by a square matrix.
    #[serde(default)]
    square: bool,
}

/// Recurrent mixers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Recurrence {
    /// Gu and Dao, 2023: a state for each channel, whose step, input and output come out of the channels.
    Mamba,
    /// Dao and Gu, 2024: heads that share a step.
    Mamba2,
    /// Gated DeltaNet (Yang et al., 2024): a state of keys and values for each head.
    Delta,
    /// Kimi Delta Attention (Kimi Linear, 2025, section 3): the same with a decay for each channel, out of two narrow products.
    Kimi,
    /// Lightning attention (Qin et al., 2024): the same without a convolution.
    Lightning,
    /// A convolution over a few tokens between two gates.
    Convolution,
}

const fn gated() -> bool {
    true
}

const fn one() -> u32 {
    1
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
    ("indexer_types", &["full"], "\"full\""),
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
const FEED_FORWARD: &[&str] = &[
    "intermediate_size",
    "block_ff_dim",
    "ffn_hidden_size",
    "ffn_dim",
    "n_inner",
    "dff",
    "ff_intermediate_size",
];
const TIMES: &[&str] = &["expansion_ratio", "intermediate_multiple_size"];
const EXPERTS: &[&str] = &["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"];
const ACTIVE: &[&str] =
    &["num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"];
const SHARED: &[&str] =
    &["n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"];
/// Width of an expert that every token goes through, where it is not that of the others.
const SHARED_WIDTH: &[&str] =
    &["shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"];
/// What each block is.
const BLOCKS: &[&str] = &["layer_types", "layers_block_type"];
/// Tokens of a sequence.
const SEQUENCE: &[&str] =
    &["max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"];

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
    let classes = keys.get("architectures").filter(|it| !it.is_null());
    if let Some(other) =
        classes.filter(|it| !it.as_array().is_some_and(|all| all.iter().all(Value::is_string)))
    {
        return wrong("architectures", format!("expected a list of classes, found {}", shown(other)));
    }
    let class = classes.and_then(|it| it.get(0)).and_then(text);
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

    /// Whether it says how queries and keys are rotated by their position. A class may rotate what a file says nothing of.
    fn rotates(&self) -> bool {
        let is_rotation = |key: &str| key.starts_with("rope_") || key.starts_with("rotary_");
        self.keys.keys().any(|key| is_rotation(key) && said(&self.keys, key).is_some())
    }

    /// Whether queries and keys pass a norm, each head by itself.
    fn norms_heads(&self) -> bool {
        self.family.query_key_norms || said(&self.keys, "use_qk_norm").is_some()
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
        self.expect_each(name, value)?;
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

    /// That a list of a size has one of each block.
    fn expect_each(&self, name: &str, value: &Value) -> Result<(), DataError> {
        // Of a list of unlike sizes none is the size.
        let Some(all) = value.as_array().filter(|_| !each(value).is_array()) else { return Ok(()) };
        let is_count = LAYERS.contains(&name);
        let count = if is_count { None } else { self.maybe(LAYERS)? };
        match count {
            Some(count) if all.len() == count as usize => Ok(()),
            Some(count) => self.wrong(
                name,
                format!(
                    "expected a whole number, or one of each of {count} blocks, found {} of them",
                    all.len()
                ),
            ),
            None if is_count => self.wrong(name, format!("expected a whole number, found {}", shown(value))),
            None => Ok(()),
        }
    }

    fn flag(&self, names: &[&'static str]) -> Result<bool, DataError> {
        let (name, value) = self.read(names)?;
        match value {
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
        let reads = |key: &str| self.family.keys.contains_key(key);
        let step = said(&self.keys, "decoder_sparse_step").filter(|step| **step != 1);
        if let Some(step) = step.filter(|_| !reads("decoder_sparse_step")) {
            let problem = format!("expected 1, experts in every block, found {}", shown(step));
            return self.wrong("decoder_sparse_step", problem);
        }
        for (key, known, expected) in
            ALIKE.into_iter().filter(|(key, ..)| self.family.recurrent.is_none() || !reads(key))
        {
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
        // A class that reads no list of blocks makes all of them alike.
        let blocks = BLOCKS.iter().filter(|key| !reads(key));
        for (key, value) in blocks.filter_map(|key| Some((*key, self.keys.get(*key)?))) {
            let is_alike = |it: &&Value| {
                let words = ["full_attention", "sliding_attention", "attention"];
                words.iter().any(|word| **it == **word)
                    || reads("attention_chunk_size") && **it == "chunked_attention"
            };
            if let Some(other) = leaves(value).find(|it| !it.is_null() && !is_alike(it)) {
                let problem = format!(
                    "expected \"full_attention\" of every block of a {}, found {}",
                    self.kind,
                    shown(other)
                );
                return self.wrong(key, problem);
            }
            let is_whole = |it: &&Value| **it == *"full_attention";
            if let (Some(_), Some(whole)) = (self.window()?, leaves(value).find(is_whole)) {
                let problem = format!(
                    "expected \"sliding_attention\" of every block, because the class of a {} reads no list, found {}",
                    self.kind,
                    shown(whole)
                );
                return self.wrong(key, problem);
            }
        }
        let is_object = |it: &Value| it.as_object().is_some_and(|keys| !keys.is_empty());
        let mut inner = self.keys.iter().filter(|(key, it)| {
            let is_inner = is_object(it) || it.as_array().is_some_and(|all| all.iter().any(is_object));
            // Of MPT it says how attention is computed, not what.
            let is_aside = ASIDE.contains(&key.as_str())
                || self.family.aside.contains(key)
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
        for (key, class) in &self.family.zero {
            let value =
                self.keys.get(key).filter(|it| !it.is_null()).cloned().unwrap_or_else(|| (*class).into());
            if value.as_f64() != Some(0.0) && value != Value::Bool(false) {
                let near = "cannot be described; see `polder plan show` for near ones";
                return self
                    .wrong(key, format!("a {} with other than 0, as {}, {near}", self.kind, shown(&value)));
            }
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
            None => Ok(()),
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
            || self.family.zero.contains_key(key)
            || [
                SEQUENCE,
                BLOCKS,
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

    /// Tokens that a token looks at in blocks that have a window, where there are such.
    fn window(&self) -> Result<Option<u32>, DataError> {
        // Qwen writes a window down also where it is not used.
        match self.is_windowed() {
            true => Ok(self.maybe(&["sliding_window"])?.filter(|tokens| *tokens > 0)),
            false => Ok(None),
        }
    }

    fn is_windowed(&self) -> bool {
        let reads = |key| self.family.keys.contains_key(key);
        // A class that has windows without a switch has them whatever a switch says.
        if reads("sliding_window") && !reads("use_sliding_window") {
            return true;
        }
        let switch =
            self.keys.get("use_sliding_window").or_else(|| self.family.keys.get("use_sliding_window"));
        switch != Some(&Value::Bool(false))
    }

    /// That each token looks at all before it, but for windows that are described.
    fn expect_no_window(&self, is_described: bool) -> Result<(), DataError> {
        let sequence = self.sequence()?.map_or(u64::MAX, u64::from);
        for key in WINDOWS {
            let value = self.keys.get(key).or_else(|| self.family.keys.get(key));
            let is_off = key.starts_with("sliding_window") && !self.is_windowed();
            let is_same = is_described && value == Some(self.read(&["sliding_window"])?.1);
            let Some(value) = value.filter(|it| !is_off && !is_same && !it.is_null() && **it != false) else {
                continue;
            };
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

    /// A number of each block out of a list, or one number for all.
    fn listed(&self, key: &'static str) -> Result<Option<Vec<u64>>, DataError> {
        match self.read(&[key])? {
            (_, Value::Null) => Ok(None),
            (_, Value::Array(all)) => {
                let number = |it: &Value| it.as_u64().or_else(|| it.as_bool().map(u64::from));
                match all.iter().map(number).collect() {
                    Some(numbers) => Ok(Some(numbers)),
                    None => self.wrong(
                        key,
                        format!("expected whole numbers, found {}", shown(&Value::Array(all.clone()))),
                    ),
                }
            }
            (name, value) => self.whole(name, value).map(|number| Some(vec![number.into()])),
        }
    }

    /// What each block has, in their order.
    fn blocks(&self) -> Result<Vec<Block>, DataError> {
        let (name, mut value) = self.read(BLOCKS)?;
        // A list of nothing is none, and a class makes its own.
        if value.is_null() {
            value = self.family.keys.get(name).unwrap_or(value);
        }
        let pattern = self.read(&["hybrid_override_pattern"])?.1;
        let is_listed = BLOCKS.iter().any(|key| self.keys.get(*key).is_some_and(|it| !it.is_null()))
            || !pattern.is_string();
        let words = match value {
            Value::Array(all) if all.is_empty() && self.keys.contains_key(name) => {
                return self.wrong(name, "expected what each block is, found []");
            }
            value if value == "must" => {
                return self.wrong(name, "expected what each block is, found nothing");
            }
            Value::Array(all) if is_listed => {
                let word =
                    |it: &Value| it.as_str().map_or_else(|| Some(it.to_string()), |it| Some(it.to_owned()));
                all.iter().filter_map(word).collect()
            }
            _ => match pattern {
                Value::String(letters) => letters.chars().map(|letter| letter.to_string()).collect(),
                _ => vec![],
            },
        };
        // Nemotron-H's list says how many there are, whatever another key says.
        let count = match self.maybe(LAYERS)? {
            _ if self.family.alone && !words.is_empty() => words.len(),
            _ => self.must(LAYERS)? as usize,
        };
        if count > MOST_LAYERS as usize {
            return self.wrong(LAYERS[0], format!("expected {MOST_LAYERS} at most, found {count}"));
        }
        let feeds = self.feeds(count)?;
        if words.is_empty() {
            self.expect_no_window(self.describes_windows())?;
            let alone = |feed| if self.family.alone { Feed::None } else { feed };
            let mixers = self.mixers(count)?.into_iter().zip(feeds);
            return Ok(mixers.map(|(block, feed)| Block { feed: alone(feed), ..block }).collect());
        }
        self.expect_no_window(true)?;
        let feed = |index| feeds.get(index).copied().unwrap_or(Feed::Dense);
        let blocks = words.iter().enumerate().map(|(index, word)| self.block(name, word, feed(index)));
        let blocks = blocks.collect::<Result<Vec<_>, _>>()?;
        match blocks.len() == count {
            true => Ok(blocks),
            false => self.wrong(
                name,
                format!("expected {count} blocks, as {} says, found {}", LAYERS[0], words.len()),
            ),
        }
    }

    /// Whether its blocks with a window are known without a list.
    fn describes_windows(&self) -> bool {
        let reads = |key| self.family.keys.contains_key(key);
        self.family.pattern.is_some()
            || reads("attention_chunk_size")
            || self.keys.get("max_window_layers").is_some_and(|_| reads("max_window_layers"))
    }

    /// A block out of what a list calls it.
    fn block(&self, key: &str, word: &str, feed: Feed) -> Result<Block, DataError> {
        let own = if self.family.alone { Feed::None } else { feed };
        let recurs = self.family.recurrent.is_some();
        let mixes = Block { feed: own, ..Block::whole() };
        match word {
            "full_attention" | "attention" | "*" => Ok(mixes),
            "indexed_attention" if self.family.keys.contains_key("index_topk") => Ok(mixes),
            "sliding_attention" => Ok(Block { is_windowed: true, ..mixes }),
            "chunked_attention" => Ok(Block { is_windowed: true, ..mixes }),
            "linear_attention" | "conv" | "mamba" | "M" if recurs => {
                Ok(Block { mixer: Mixer::Recurrent, ..mixes })
            }
            "hybrid" if self.family.beside => Ok(Block { mixer: Mixer::Both, ..mixes }),
            "mlp" | "-" if self.family.alone => Ok(Block { mixer: Mixer::None, feed: Feed::Dense, ..mixes }),
            "moe" | "E" if self.family.alone => {
                Ok(Block { mixer: Mixer::None, feed: Feed::Experts, ..mixes })
            }
            other => self.wrong(
                key,
                format!(
                    "expected \"full_attention\" of every block, found {}",
                    quoted(&format!("\"{other}\""))
                ),
            ),
        }
    }

    /// What mixes the tokens of each block, where no list says so in words.
    fn mixers(&self, count: usize) -> Result<Vec<Block>, DataError> {
        let all = |block: fn(u64) -> Block| (0..count as u64).map(block).collect::<Vec<_>>();
        let recurrent = Block { mixer: Mixer::Recurrent, ..Block::whole() };
        let attends_at = |attends: &dyn Fn(u64) -> bool| {
            (0..count as u64).map(|index| if attends(index) { Block::whole() } else { recurrent }).collect()
        };
        for key in ["full_attn_idxs", "attn_layer_indices"] {
            if let Some(indices) = self.listed(key)? {
                return Ok(attends_at(&|index| indices.contains(&index)));
            }
        }
        if let Some(flags) = self.listed("attn_type_list")? {
            return Ok(attends_at(&|index| flags.get(index as usize) == Some(&1)));
        }
        if let Some(period) = self.maybe(&["attn_layer_period"])? {
            let offset = u64::from(self.maybe(&["attn_layer_offset"])?.unwrap_or(0));
            let period = u64::from(period.max(1));
            return Ok(attends_at(&|index| index % period == offset));
        }
        if let Some(recurrence) = self.family.recurrent {
            return Ok(match recurrence {
                _ if self.family.beside => all(|_| Block { mixer: Mixer::Both, ..Block::whole() }),
                Recurrence::Lightning => attends_at(&|index| index % 2 == 0),
                // Where a class has an interval, it has lists too. One without makes its last block attend where no other does.
                Recurrence::Delta => {
                    let interval = self.maybe(&["full_attention_interval"])?;
                    let last = if interval.is_none() && count < 4 { count as u64 } else { 0 };
                    let interval = u64::from(interval.unwrap_or(4).max(1));
                    attends_at(&|index| (index + 1) % interval == 0 || index + 1 == last)
                }
                Recurrence::Kimi => attends_at(&|index| index > 0 && index % 4 == 0),
                Recurrence::Convolution => all(|_| Block::whole()),
                Recurrence::Mamba | Recurrence::Mamba2 => attends_at(&|_| false),
            });
        }
        let windowed = |is_windowed: &dyn Fn(u64) -> bool| {
            (0..count as u64)
                .map(|index| Block { is_windowed: is_windowed(index), ..Block::whole() })
                .collect()
        };
        if self.family.keys.contains_key("attention_chunk_size") {
            let flags = self.listed("no_rope_layers")?.filter(|flags| !flags.is_empty());
            let interval = u64::from(self.maybe(&["no_rope_layer_interval"])?.unwrap_or(4).max(1));
            return Ok(windowed(&|index| match &flags {
                Some(flags) => flags.get(index as usize) != Some(&0),
                None => (index + 1) % interval != 0,
            }));
        }
        if self.window()?.is_none() {
            return Ok(all(|_| Block::whole()));
        }
        if let Some(from) = self.maybe(&["max_window_layers"])? {
            return Ok(windowed(&|index| index >= u64::from(from)));
        }
        let pattern = self.pattern()?;
        Ok(match pattern {
            None => all(|_| Block::whole()),
            Some(0) => windowed(&|_| true),
            Some(of) => {
                let whole = u64::from(self.family.whole.unwrap_or(of - 1));
                windowed(&|index| index % u64::from(of) != whole)
            }
        })
    }

    /// Of how many blocks one looks at all tokens, where others have a window.
    fn pattern(&self) -> Result<Option<u32>, DataError> {
        let Some(own) = self.family.pattern else { return Ok(None) };
        let names = ["sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"];
        let given = || names.into_iter().filter_map(|key| Some((key, said(&self.keys, key)?)));
        let pattern = match given().find(|(key, _)| self.family.keys.contains_key(*key)) {
            Some((key, value)) => self.whole(key, value)?,
            None => own,
        };
        match given().find(|(_, value)| value.as_u64() != Some(pattern.into())) {
            Some((key, other)) => {
                let whose = format!("as the class of a {} makes its blocks", self.kind);
                self.wrong(key, format!("expected {pattern}, {whose}, found {}", shown(other)))
            }
            None => Ok(Some(pattern)),
        }
    }

    /// Which blocks have a mixture.
    fn feeds(&self, count: usize) -> Result<Vec<Feed>, DataError> {
        if self.experts()?.is_none() {
            return Ok(vec![Feed::Dense; count]);
        }
        let of = |has: &dyn Fn(u64) -> bool| {
            (0..count as u64).map(|index| if has(index) { Feed::Experts } else { Feed::Dense }).collect()
        };
        let key = "mlp_layer_types";
        if let (_, Value::Array(words)) = self.read(&[key])? {
            let feed = |word: &Value| match word.as_str() {
                Some("dense") => Ok(Feed::Dense),
                Some("sparse") => Ok(Feed::Experts),
                _ => self.wrong(key, format!("expected \"dense\" or \"sparse\", found {}", shown(word))),
            };
            return match words.len() == count {
                true => words.iter().map(feed).collect(),
                false => self.wrong(key, format!("expected {count} blocks, found {}", words.len())),
            };
        }
        if let Some(blocks) = self.listed("moe_layers")? {
            return Ok(of(&|index| blocks.contains(&index)));
        }
        if let Some(step) = self.maybe(&["interleave_moe_layer_step"])? {
            let step = u64::from(step.max(1));
            return Ok(of(&|index| index % step == step - 1));
        }
        if let Some(step) = self.maybe(&["expert_layer_period"])? {
            let offset = u64::from(self.maybe(&["expert_layer_offset"])?.unwrap_or(0));
            return Ok(of(&|index| index % u64::from(step.max(1)) == offset));
        }
        if let Some(start) = self.maybe(&["moe_layer_start_index"])? {
            let end = match self.read(&["moe_layer_end_index"])?.1.as_i64() {
                Some(end @ 0..) => end.unsigned_abs(),
                _ => u64::MAX,
            };
            let step = u64::from(self.maybe(&["moe_layer_interval"])?.unwrap_or(1).max(1));
            return Ok(of(&|index| (u64::from(start)..=end).contains(&index) && (index + 1) % step == 0));
        }
        let dense = self.listed("mlp_only_layers")?.unwrap_or_default();
        let step = u64::from(self.maybe(&["decoder_sparse_step"])?.unwrap_or(1).max(1));
        let first = u64::from(self.maybe(&["first_k_dense_replace", "num_dense_layers"])?.unwrap_or(0));
        let every = self.listed("moe_layer_freq")?.unwrap_or_else(|| vec![1]);
        Ok(of(&|index| {
            let is_one = match every.as_slice() {
                [step] => index % (*step).max(1) == 0,
                flags => flags.get(index as usize) == Some(&1),
            };
            index >= first && is_one && (index + 1) % step == 0 && !dense.contains(&index)
        }))
    }

    /// The sizes of its recurrent mixers.
    fn recurrent(&self, hidden: u32, heads: u32) -> Result<Option<Recurrent>, DataError> {
        let Some(recurrence) = self.family.recurrent else { return Ok(None) };
        let sum = |parts: &[[u32; 2]]| {
            parts.iter().fold(0_u32, |sum, [one, other]| sum.saturating_add(one.saturating_mul(*other)))
        };
        let or_zero = |names: &[&'static str]| Ok::<_, DataError>(self.maybe(names)?.unwrap_or(0));
        let kernel = or_zero(&["mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "conv_L_cache"])?;
        let state = or_zero(&["mamba_d_state", "ssm_state_size", "state_size"])?;
        let expanded = || {
            Ok::<_, DataError>(
                self.maybe(&["mamba_expand", "expand"])?.map(|times| times.saturating_mul(hidden)),
            )
        };
        Ok(Some(match recurrence {
            Recurrence::Mamba => {
                // Beside attention this key is that of another part. Falcon Mamba has 16 in `expand` and this, which counts.
                let own = if self.family.alone { self.maybe(&["intermediate_size"])? } else { None };
                let width = own.or(expanded()?).unwrap_or(hidden);
                // "auto" is a sixteenth of the residual stream.
                let rank = match self.read(&["mamba_dt_rank", "time_step_rank"])?.1 {
                    Value::String(text) if text == "auto" => hidden.div_ceil(16),
                    _ => self.must(&["mamba_dt_rank", "time_step_rank"])?,
                };
                let inside = sum(&[[2, rank], [3, state]]);
                Recurrent { into: sum(&[[2, width]]), width, state, convolved: width, kernel, inside }
            }
            Recurrence::Mamba2 => {
                let steps = self.must(&["mamba_n_heads", "mamba_num_heads", "num_heads"])?;
                let groups = or_zero(&["mamba_n_groups", "n_groups"])?;
                let width = match self.maybe(&["mamba_d_ssm"])? {
                    Some(width) => width,
                    None => match expanded()? {
                        Some(width) => width,
                        None => steps.saturating_mul(self.must(&["mamba_head_dim"])?),
                    },
                };
                let convolved = sum(&[[1, width], [2, groups.saturating_mul(state)]]);
                Recurrent {
                    into: sum(&[[1, width], [1, convolved], [1, steps]]),
                    width,
                    state,
                    convolved,
                    kernel,
                    inside: 0,
                }
            }
            Recurrence::Delta => {
                let [keys, values] = [
                    ["linear_num_key_heads", "linear_key_head_dim"],
                    ["linear_num_value_heads", "linear_value_head_dim"],
                ];
                let heads = self.must(&values[..1])?;
                let state = self.must(&keys[1..])?;
                let keys = self.must(&keys[..1])?.saturating_mul(state);
                let width = heads.saturating_mul(self.must(&values[1..])?);
                let convolved = sum(&[[2, keys], [1, width]]);
                Recurrent {
                    into: sum(&[[1, convolved], [1, width], [2, heads]]),
                    width,
                    state,
                    convolved,
                    kernel,
                    inside: 0,
                }
            }
            Recurrence::Kimi => {
                let [heads, state] = [self.must(&["linear_num_heads"])?, self.must(&["linear_head_dim"])?];
                let width = heads.saturating_mul(state);
                let convolved = sum(&[[3, width]]);
                let into = sum(&[[1, convolved], [1, heads], [2, state]]);
                Recurrent { into, width, state, convolved, kernel, inside: sum(&[[2, state]]) }
            }
            Recurrence::Lightning => {
                let state = self.maybe(&["head_dim"])?.unwrap_or(hidden / heads.max(1));
                let width = heads.saturating_mul(state);
                Recurrent { into: sum(&[[4, width]]), width, state, convolved: 0, kernel: 0, inside: 0 }
            }
            Recurrence::Convolution => Recurrent {
                into: sum(&[[3, hidden]]),
                width: hidden,
                state: 0,
                convolved: hidden,
                kernel,
                inside: 0,
            },
        }))
    }

    /// Latent attention, with the width of a head.
    fn latent(&self) -> Result<Option<(Latent, u32)>, DataError> {
        let Some(keys) = self.maybe(&["kv_lora_rank"])? else { return Ok(None) };
        let rotated = self.must(&["qk_rope_head_dim"])?;
        let queries = match self.maybe(&["q_lora_rank"])? {
            Some(0) => {
                return self.wrong("q_lora_rank", "expected a whole number from 1 on, or null, found 0");
            }
            rank => rank.unwrap_or(0),
        };
        let latent =
            Latent { queries, keys, rotated, values: self.must(&["v_head_dim"])?, indexer: self.indexer()? };
        Ok(Some((latent, self.must(&["qk_nope_head_dim"])?.saturating_add(rotated))))
    }

    /// What chooses the tokens that latent attention looks at.
    fn indexer(&self) -> Result<Option<Indexer>, DataError> {
        let Some(tokens) = self.maybe(&["index_topk"])? else { return Ok(None) };
        let [heads, width] = [self.must(&["index_n_heads"])?, self.must(&["index_head_dim"])?];
        Ok(Some(Indexer { heads, width, tokens }))
    }

    /// Heads of keys and values, where they are fewer than those of queries.
    fn kv_heads(&self) -> Result<Option<u32>, DataError> {
        // Falcon's newer models have it written down too, where it does not count.
        match self.flag(&["multi_query"])? && !self.flag(&["new_decoder_architecture"])? {
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
        let Some(count) = self.maybe(EXPERTS)?.filter(|count| *count >= self.family.experts_from) else {
            // What the file itself sends tokens to has to be there.
            let own = ACTIVE.iter().find_map(|key| Some((*key, said(&self.keys, key)?)));
            let (key, count) = (self.read(EXPERTS)?.0, self.maybe(EXPERTS)?.unwrap_or(0));
            return match own {
                Some((active, _)) if count == 0 && self.keys.contains_key(key) => {
                    let problem = format!("expected experts, to which {active} sends tokens, found none");
                    self.wrong(key, problem)
                }
                _ => Ok(None),
            };
        };
        let active = self.must(ACTIVE)?;
        // Gemma 4 has its dense part beside the experts.
        let shared_feed_forward = match self.flag(&["enable_moe_block"])? {
            true => self.maybe(FEED_FORWARD)?,
            false => self.shared_width()?,
        };
        // A width of its own is that of one.
        let shared = match shared_feed_forward {
            Some(_) => 1,
            None => self.maybe(SHARED)?.or(self.family.shared).unwrap_or(0),
        };
        let latent = self.maybe(&["moe_latent_size"])?;
        let experts = Experts { count, active, shared, shared_feed_forward, latent };
        Ok(Some((experts, self.maybe(&["moe_intermediate_size"])?)))
    }

    fn shared_width(&self) -> Result<Option<u32>, DataError> {
        match self.maybe(SHARED_WIDTH)? {
            // Nemotron-H takes the width of its dense parts then.
            Some(0) if self.family.alone => {
                self.wrong(self.read(SHARED_WIDTH)?.0, "expected a whole number from 1 on, found 0")
            }
            width => Ok(width.filter(|width| *width > 0)),
        }
    }

    /// The width of a feed-forward part.
    fn feed_forward(&self, hidden: u32) -> Result<u32, DataError> {
        let width = match (self.maybe(FEED_FORWARD)?, self.maybe(TIMES)?.or(self.family.times)) {
            (None, Some(times)) => hidden.saturating_mul(times),
            _ => self.must(FEED_FORWARD)?,
        };
        // LFM2 takes two thirds of what its file says, in whole multiples.
        match (self.maybe(&["block_multiple_of"])?, self.flag(&["block_auto_adjust_ff_dim"])?) {
            (Some(multiple), true) if multiple > 0 => {
                let (_, times) = self.read(&["block_ffn_dim_multiplier"])?;
                let narrower = f64::from(width / 3 * 2 + width % 3 * 2 / 3) * times.as_f64().unwrap_or(1.0);
                Ok((narrower as u32).div_ceil(multiple).saturating_mul(multiple))
            }
            _ => Ok(width),
        }
    }

    /// The same where some blocks have experts, and others none.
    fn dense_feed_forward(&self, hidden: u32) -> Result<u32, DataError> {
        match self.maybe(&["intermediate_size_mlp"])? {
            Some(width) => Ok(width),
            // Of a mixture that is left out, the part beside it stays.
            None => match self
                .shared_width()?
                .filter(|_| self.family.keys.contains_key("shared_intermediate_size"))
            {
                Some(width) => Ok(width),
                None => self.feed_forward(hidden),
            },
        }
    }
}

/// What a block of a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Block {
    mixer: Mixer,
    is_windowed: bool,
    feed: Feed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Feed {
    Dense,
    Experts,
    None,
}

impl Block {
    /// Attention to all tokens before.
    const fn whole() -> Self {
        Self { mixer: Mixer::Attention, is_windowed: false, feed: Feed::Dense }
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

/// What a file says inside an object, as keys of the file.
fn laid_flat(file: &str, keys: Map<String, Value>) -> Result<Map<String, Value>, DataError> {
    match keys.get("model_type").and_then(Value::as_str) {
        Some("kimi_linear") => kimi_linear(file, keys),
        Some("gemma4_text") => gemma4(file, keys),
        _ => Ok(keys),
    }
}

/// Gemma 4 as transformers 5.23 writes it: the heads of blocks that look at all tokens stand at the numbers of those blocks.
fn gemma4(file: &str, mut keys: Map<String, Value>) -> Result<Map<String, Value>, DataError> {
    const KEY: &str = "per_layer_config";
    const NAMES: [(&str, &str); 2] =
        [("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")];
    let wrong = |problem: String| Err(DataError::new(file, KEY, problem));
    let blocks = match keys.remove(KEY) {
        Some(Value::Object(blocks)) => blocks,
        None | Some(Value::Null) => return Ok(keys),
        Some(other) => return wrong(format!("expected an object, found {}", shown(&other))),
    };
    let Some(first) = blocks.values().next() else { return Ok(keys) };
    let words = keys.get("layer_types").and_then(Value::as_array);
    let whole = words.into_iter().flatten().enumerate().filter(|(_, word)| **word == "full_attention");
    let mut whole: Vec<_> = whole.map(|(index, _)| index.to_string()).collect();
    whole.sort();
    let mut own: Vec<_> = blocks.keys().cloned().collect();
    own.sort();
    if own != whole || blocks.values().any(|it| it != first) {
        return wrong(
            "expected the same of each block of \"full_attention\" in layer_types, and of no other".into(),
        );
    }
    for (name, value) in first.as_object().into_iter().flatten() {
        let Some((_, flat)) = NAMES.iter().find(|(own, _)| own == name) else {
            return wrong(format!("expected head_dim and num_key_value_heads, found {}", quoted(name)));
        };
        if name == "num_key_value_heads" && keys.get("attention_k_eq_v") != Some(&Value::Bool(true)) {
            return wrong("heads of keys and values of single blocks need attention_k_eq_v".into());
        }
        let own = keys.insert((*flat).into(), value.clone());
        if let Some(other) = own.filter(|it| !it.is_null() && it != value) {
            return wrong(format!("expected {}, as {flat} says, found {}", shown(&other), shown(value)));
        }
    }
    Ok(keys)
}

/// A checkpoint of Kimi Linear, whose blocks are counted from 1 on.
fn kimi_linear(file: &str, mut keys: Map<String, Value>) -> Result<Map<String, Value>, DataError> {
    const KEY: &str = "linear_attn_config";
    const NAMES: [(&str, &str); 3] = [
        ("head_dim", "linear_head_dim"),
        ("num_heads", "linear_num_heads"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    ];
    let Some(Value::Object(inner)) = keys.remove(KEY) else { return Ok(keys) };
    for (name, value) in inner {
        if let Some((_, flat)) = NAMES.iter().find(|(own, _)| *own == name) {
            keys.insert((*flat).into(), value);
        } else if let ("full_attn_layers", Value::Array(all)) = (name.as_str(), &value) {
            let from_zero: Value = all.iter().filter_map(|it| it.as_u64()?.checked_sub(1)).collect();
            keys.insert("full_attn_idxs".into(), from_zero);
        } else if name != "kda_layers" {
            let problem = format!("expected sizes and lists of blocks, found {}", quoted(&name));
            return Err(DataError::new(file, KEY, problem));
        }
    }
    Ok(keys)
}

/// Reads a model from the keys of a `config.json`, with so many tokens of a sequence in place of its own.
///
/// # Errors
/// When it lacks what a transformer has, or has what no known one of its kind has.
pub(crate) fn model(file: &str, keys: Map<String, Value>, sequence: Option<u32>) -> Result<Model, DataError> {
    expect_decoder(file, &keys)?;
    let keys = laid_flat(file, keys)?;
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
    let blocks = config.blocks()?;
    let mut counts: BTreeMap<Block, u32> = BTreeMap::new();
    for block in &blocks {
        *counts.entry(*block).or_default() += 1;
    }
    // The usual block is the most frequent one; of those with a mixture, where there are such.
    let Some(usual) = counts.keys().copied().max_by_key(|it| (it.feed == Feed::Experts, counts[it])) else {
        return Err(DataError::new(file, LAYERS[0], "expected a whole number from 1 on, found 0"));
    };
    let has_feed = counts.keys().any(|block| block.feed != Feed::None);
    let widths = BTreeMap::from([
        (Feed::None, 0),
        (
            Feed::Dense,
            if counts.keys().any(|it| it.feed == Feed::Dense) {
                config.dense_feed_forward(hidden)?
            } else {
                0
            },
        ),
        (
            Feed::Experts,
            match width {
                Some(width) => width,
                None if has_feed => config.feed_forward(hidden)?,
                None => 0,
            },
        ),
    ]);
    let mixes = |mixer| counts.keys().any(|block| block.mixer == mixer || block.mixer == Mixer::Both);
    let attends = mixes(Mixer::Attention);
    let latent = config.latent()?.filter(|_| attends);
    // A model without attention has the heads of its recurrence, or none.
    let heads = if attends { config.must(HEADS)? } else { config.maybe(HEADS)?.unwrap_or(1) };
    let head_width = match latent {
        Some((_, width)) => Some(width),
        None if !attends => Some(1),
        None => config.maybe(&["head_dim"])?,
    };
    if config.family.square && head_width.is_some_and(|width| heads.saturating_mul(width) != hidden) {
        let problem = format!("expected {hidden} in all of {heads} heads, as a {} needs", config.kind);
        return config.wrong("head_dim", problem);
    }
    let chunk = config.maybe(&["attention_chunk_size"])?;
    let window = match chunk {
        Some(tokens) => Some(Window { tokens, chunks: true }),
        None => config.window()?.map(|tokens| Window { tokens, chunks: false }),
    };
    let all = Window { tokens: 0, chunks: false };
    let values_by_keys = config.flag(&["attention_k_eq_v"])?;
    let global = (
        config.maybe(&["global_head_dim"])?,
        config.maybe(&["num_global_key_value_heads"])?.filter(|_| values_by_keys),
        values_by_keys,
    );
    let other = |(block, blocks): (&Block, &u32)| OtherBlocks {
        blocks: *blocks,
        mixer: Some(block.mixer),
        window: Some(if block.is_windowed { window.unwrap_or(all) } else { all }),
        dense: block.feed != Feed::Experts,
        feed_forward: Some(widths[&block.feed]),
        // Gemma 4's blocks that look at all tokens have heads of their own.
        head_width: if block.is_windowed { None } else { global.0 },
        kv_heads: if block.is_windowed { None } else { global.1 },
        heads: None,
        values_by_keys: (!block.is_windowed).then_some(global.2),
    };
    Ok(Model {
        title: printable(&format!("{} of {file}", config.kind)).into_owned(),
        source: file.into(),
        hidden,
        layers: blocks.len() as u32,
        heads,
        kv_heads: if attends && latent.is_none() { config.kv_heads()? } else { None },
        head_width,
        feed_forward: Some(widths[&usual.feed]),
        gated: config.family.gated,
        vocabulary: config.must(&["vocab_size"])?,
        tied: config.flag(&["tie_word_embeddings", "tie_embedding"])?,
        positions: match config.family.positions {
            Some(more) => config.must(SEQUENCE)? + more,
            None => 0,
        },
        rotary: attends && config.rotates(),
        query_key_norms: attends && config.norms_heads(),
        sequence: config.sequence()?.ok_or_else(missing)?,
        embedding_width: config.maybe(&["word_embed_proj_dim"])?.filter(|width| *width != hidden),
        mixer: usual.mixer,
        attention_gate: match config.family.keys.contains_key("attn_output_gate") {
            _ if !attends => false,
            true => config.flag(&["attn_output_gate"])?,
            false => config.family.attention_gate,
        },
        window: window.filter(|_| usual.is_windowed),
        latent: latent.map(|(latent, _)| latent),
        recurrent: config.recurrent(hidden, heads)?.filter(|_| mixes(Mixer::Recurrent)),
        experts: experts.map(|(experts, _)| experts).filter(|_| usual.feed == Feed::Experts),
        others: counts.iter().filter(|(block, _)| **block != usual).map(other).collect(),
        ..Model::default()
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
        // A window counts against the sequence that is trained, and a file that has none has its class's.
        let mistral = r#"{"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 8192, "sliding_window": 8192}"#;
        let [alone, longer] =
            [8192, 16384].map(|tokens| json::model("config.json", mistral, Some(tokens)).unwrap());
        assert!(!alone.tied && alone.seen() == 1.0 && longer.seen() == 0.75, "{alone:?}");
        let whole = Model { window: None, ..longer.clone() };
        assert!(longer.flops(1) < whole.flops(1) && longer.parameters() == whole.parameters());
    }

    /// What kinds of block a file has: how many, what mixes tokens, tokens of a window, width of a feed-forward part, experts.
    fn kinds(config: &str) -> Vec<(u32, Mixer, u32, u32, u32)> {
        let model = json::model("config.json", config, Some(4096))
            .unwrap_or_else(|error| panic!("{config}: {error}"));
        model.check().unwrap();
        let all = if model.others.is_empty() { vec![model.clone()] } else { model.kinds() };
        assert_eq!(all.iter().map(|kind| kind.layers).sum::<u32>(), model.layers);
        let of = |kind: &Model| {
            let window = kind.window.map_or(0, |window| window.tokens);
            let experts = kind.experts.map_or(0, |experts| experts.count);
            (kind.layers, kind.mixer, window, kind.feed_forward(), experts)
        };
        let mut all: Vec<_> = all.iter().map(of).collect();
        all.sort();
        all
    }

    #[test]
    fn blocks_that_differ_are_told_apart_by_lists_by_patterns_and_by_intervals() {
        use Mixer::{Attention, Both, None, Recurrent};
        let gemma = |more: &str| {
            kinds(&format!(
                r#"{{"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024{more}}}"#
            ))
        };
        assert_eq!(gemma(""), [(5, Attention, 0, 9216, 0), (29, Attention, 1024, 9216, 0)]);
        assert_eq!(
            gemma(r#", "sliding_window_pattern": 2"#),
            [(17, Attention, 0, 9216, 0), (17, Attention, 1024, 9216, 0)]
        );
        // Its class reads no switch.
        assert_eq!(gemma(r#", "use_sliding_window": false"#), gemma(""));
        assert_eq!(
            kinds(r#"{"model_type": "gpt_oss"}"#),
            [(18, Attention, 0, 2880, 128), (18, Attention, 128, 2880, 128)]
        );
        assert_eq!(
            kinds(r#"{"model_type": "cwm", "sliding_window": 512}"#),
            [(16, Attention, 0, 21504, 0), (48, Attention, 512, 21504, 0)]
        );
        let qwen = r#"{"model_type": "qwen2", "num_hidden_layers": 28, "use_sliding_window": true, "sliding_window": 1024, "max_window_layers": 21}"#;
        assert_eq!(kinds(qwen), [(7, Attention, 1024, 22016, 0), (21, Attention, 0, 22016, 0)]);
        let maverick = r#"{"model_type": "llama4_text", "interleave_moe_layer_step": 2, "num_local_experts": 128, "attention_chunk_size": 2048}"#;
        // Of each four blocks the last looks at all tokens, and the second and the last have experts.
        let expected = [
            (12, Attention, 0, 8192, 128),
            (12, Attention, 2048, 8192, 128),
            (24, Attention, 2048, 16384, 0),
        ];
        assert_eq!(kinds(maverick), expected);
        assert_eq!(
            kinds(r#"{"model_type": "deepseek_v3"}"#),
            [(3, Attention, 0, 18432, 0), (58, Attention, 0, 2048, 256)]
        );
        assert_eq!(
            kinds(r#"{"model_type": "qwen3_next"}"#),
            [(12, Attention, 0, 512, 512), (36, Recurrent, 0, 512, 512)]
        );
        let jamba = [
            (2, Attention, 0, 14336, 0),
            (2, Attention, 0, 14336, 16),
            (14, Recurrent, 0, 14336, 0),
            (14, Recurrent, 0, 14336, 16),
        ];
        let found = kinds(r#"{"model_type": "jamba"}"#);
        assert_eq!(found.iter().map(|it| it.0).sum::<u32>(), 32);
        assert!(
            found.iter().all(|it| jamba.iter().any(|kind| (kind.1, kind.4) == (it.1, it.4))),
            "{found:?}"
        );
        let nemotron =
            r#"{"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 52}"#;
        assert_eq!(
            kinds(nemotron),
            [(1, Attention, 0, 0, 0), (2, Recurrent, 0, 0, 0), (2, None, 0, 21504, 0)]
        );
        // A list of nothing is none: its class makes its own, and has a block that attends.
        assert_eq!(
            kinds(r#"{"model_type": "nemotron_h", "layers_block_type": null, "num_hidden_layers": 3}"#),
            kinds(r#"{"model_type": "nemotron_h"}"#)
        );
        let pattern =
            r#"{"model_type": "nemotron_h", "layers_block_type": null, "hybrid_override_pattern": "M*"}"#;
        assert_eq!(kinds(pattern), [(1, Attention, 0, 0, 0), (1, Recurrent, 0, 0, 0)]);
        let olmo = |layers| {
            kinds(&format!(
                r#"{{"model_type": "olmo_hybrid", "num_hidden_layers": {layers}, "linear_key_head_dim": 96, "linear_value_head_dim": 192,
                "linear_num_key_heads": 30, "linear_num_value_heads": 30}}"#
            ))
        };
        let width = 11008;
        assert_eq!(olmo(3), [(1, Attention, 0, width, 0), (2, Recurrent, 0, width, 0)]);
        assert_eq!(olmo(8), [(2, Attention, 0, width, 0), (6, Recurrent, 0, width, 0)]);
        assert_eq!(kinds(r#"{"model_type": "falcon_h1"}"#), [(32, Both, 0, 14336, 0)]);
        assert_eq!(kinds(r#"{"model_type": "mamba2"}"#), [(64, Recurrent, 0, 0, 0)]);
        let lfm = r#"{"model_type": "lfm2", "num_hidden_layers": 16, "block_ff_dim": 6656, "full_attn_idxs": [2, 5, 8]}"#;
        assert_eq!(kinds(lfm), [(3, Attention, 0, 4608, 0), (13, Recurrent, 0, 4608, 0)]);
        let ernie =
            r#"{"model_type": "ernie4_5_moe", "moe_layer_start_index": 3, "moe_layer_end_index": -1}"#;
        assert_eq!(kinds(ernie), [(3, Attention, 0, 12288, 0), (25, Attention, 0, 1536, 64)]);
        let glm = r#"{"model_type": "glm4_moe_lite", "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]}"#;
        assert_eq!(kinds(glm), [(1, Attention, 0, 1536, 64), (2, Attention, 0, 10240, 0)]);
    }

    #[test]
    fn a_list_of_blocks_that_does_not_go_with_their_number_is_refused() {
        for (config, said) in [
            (
                r#"{"model_type": "qwen3_next", "layer_types": ["full_attention"]}"#,
                "layer_types: expected 48 blocks, as num_hidden_layers says, found 1",
            ),
            (
                r#"{"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}"#,
                "mlp_layer_types: expected 47 blocks, found 1",
            ),
            (
                r#"{"model_type": "lfm2_moe", "max_position_embeddings": 4096}"#,
                "layer_types: expected what each block is, found nothing",
            ),
            (
                r#"{"model_type": "lfm2_moe", "layer_types": null}"#,
                "layer_types: expected what each block is, found nothing",
            ),
            (
                r#"{"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}"#,
                "expected \"full_attention\" of every block, found \"X\"",
            ),
            (
                r#"{"model_type": "qwen3_next", "num_hidden_layers": 4194304}"#,
                "num_hidden_layers: expected 65536 at most, found 4194304",
            ),
        ] {
            let refused = billions(config).expect_err(config);
            assert!(refused.contains(said), "{config}: {refused}");
        }
    }

    #[test]
    fn what_is_no_decoder_or_would_be_passed_over_in_silence_is_refused() {
        let whole = r#""model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": null"#;
        for (more, said) in [
            (
                r#""sliding_window_size": 4096"#,
                "sliding_window_size: attention within 4096 of 32768 tokens cannot be described; set it to null to ",
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
                "layer_types: expected \"full_attention\" of every block of a mistral, found \"linear_attention\"",
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
            counted.iter().all(|kind| families().contains_key(kind)) && counted.len() >= 100,
            "{counted:?}"
        );
    }

    /// Published sizes of models whose classes are no part of transformers, or whose files differ from what their classes write.
    #[test]
    fn files_as_they_are_published_give_the_published_sizes() {
        let [widths, eights, ones] = [3072, 8, 1].map(|size| format!("{:?}", [size; 32]));
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
            (r#""model_type": "phimoe", "attention_bias": true, "lm_head_bias": true, "hidden_size": 4096, "intermediate_size": 6400,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16,
                "num_experts_per_tok": 2, "vocab_size": 32064"#.into(), 41.873),
            // Lists of equal numbers, one for each block.
            (format!(r#""model_type": "hunyuan_v1_moe", {llama}, "num_key_value_heads": 8, "head_dim": 128, "attention_head_dim": 128,
                "intermediate_size": 3072, "moe_intermediate_size": {widths}, "num_experts": 64, "moe_topk": {eights},
                "num_shared_expert": {ones}, "tie_word_embeddings": true, "vocab_size": 128167"#), 80.393),
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
                kind("zamba2", r#""hidden_size": 2048"#),
                "model_type: expected a known one, found \"zamba2\"; describe it in a model file",
            ),
            (
                kind("lfm3", r#""conv_L_cache": 3"#),
                "conv_L_cache: a model with convolutions in place of attention",
            ),
            (
                kind("axk1", r#""num_dense_layers": 2"#),
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
                kind("phi3small", r#""blocksparse_block_size": 64"#),
                "blocksparse_block_size: attention to some blocks of tokens alone",
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
        for (config, said) in [
            (
                kind("qwen3_next", r#""num_local_experts": 4"#),
                "num_local_experts: expected 512, as num_experts says, found 4",
            ),
            (kind("mamba", r#""n_layer": 64"#), "n_layer: expected 32, as num_hidden_layers says, found 64"),
            (kind("falcon", r#""n_layer": 60"#), "n_layer: expected 32, as num_hidden_layers says, found 60"),
            (
                kind("deepseek_v3", r#""num_experts": 4"#),
                "num_experts: expected 256, as n_routed_experts says, found 4",
            ),
            (
                kind("deepseek_v3", r#""q_lora_rank": 0"#),
                "q_lora_rank: expected a whole number from 1 on, or null, found 0",
            ),
            (
                kind("gemma2", r#""_sliding_window_pattern": 3"#),
                "_sliding_window_pattern: expected 2, as the class of a gemma2 makes its blocks, found 3",
            ),
            (
                kind("mistral", r#""layer_types": ["sliding_attention", "full_attention"]"#),
                "layer_types: expected \"sliding_attention\" of every block, because the class of a mistral reads no list",
            ),
            (
                kind("qwen2_moe", r#""use_sliding_window": true"#),
                "use_sliding_window: a qwen2_moe with other than 0, as true, cannot be described",
            ),
            (
                kind("llama4_text", r#""num_shared_experts": 2"#),
                "num_shared_experts: expected nothing, because",
            ),
            (
                kind("nemotron_h", r#""layers_block_type": []"#),
                "layers_block_type: expected what each block is, found []",
            ),
            (
                kind("nemotron_h", r#""moe_shared_expert_intermediate_size": 0"#),
                "moe_shared_expert_intermediate_size: expected a whole number from 1 on, found 0",
            ),
            (
                kind("helium", r#""num_attention_heads": 16"#),
                "head_dim: expected 2560 in all of 16 heads, as a helium needs",
            ),
            (
                kind("olmo_hybrid", r#""num_hidden_layers": 1, "layer_types": ["linear_attention"]"#),
                "linear_num_value_heads: expected a whole number, found nothing",
            ),
            (
                kind("gemma4_text", r#""per_layer_config": {"1": {"head_dim": 64}}"#),
                "per_layer_config: expected the same of each block of \"full_attention\" in layer_types, and",
            ),
            (
                kind(
                    "gemma4_text",
                    r#""layer_types": ["full_attention"], "per_layer_config": {"0": {"intermediate_size": 64}}"#,
                ),
                "per_layer_config: expected head_dim and num_key_value_heads, found intermediate_size",
            ),
            (
                kind(
                    "gemma4_text",
                    r#""layer_types": ["full_attention"], "global_head_dim": 512, "per_layer_config": {"0": {"head_dim": 64}}"#,
                ),
                "per_layer_config: expected 512, as global_head_dim says, found 64",
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
