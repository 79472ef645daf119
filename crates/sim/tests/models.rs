//! Models as others describe them: published files, held against counts of the classes that run them.

use std::path::PathBuf;

use polder_sim::Model;
use polder_sim::memory::kv_bytes;
use serde_json::Value;

/// A model of such a file, or why not.
fn read(text: &str, name: &str) -> Result<Model, String> {
    let path = std::env::temp_dir().join(format!("polder-{}-{name}.json", std::process::id()));
    std::fs::write(&path, text).unwrap();
    let model = Model::load_with(path.to_str().unwrap(), Some(512)).map_err(|error| error.to_string());
    std::fs::remove_file(&path).unwrap();
    model
}

fn config(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/configs").join(format!("{name}.json"));
    std::fs::read_to_string(path).unwrap()
}

/// Files on which planners went wrong, in public reports; right counts in billions, or what the refusal names.
const REPORTED: [(&str, Result<f64, &str>); 21] = [
    ("aria-text", Ok(24.869)),
    ("ctrl", Ok(1.638)),
    ("deepseek-v4-flash-window-null", Err("q_lora_rank: a model with multi-head latent attention")),
    ("doge-320m-dense", Ok(0.336)),
    ("exaone-3-7.8b", Ok(7.818)),
    ("falcon40b-refinedweb", Ok(41.303)),
    ("gpt-neo-2.7b-global", Ok(2.651)),
    ("hunyuan-a13b", Ok(80.393)),
    ("infinity", Ok(8.030)),
    ("jais2-8b", Ok(8.090)),
    ("lfm2-350m-legacy", Ok(0.354)),
    ("llava-1.5-7b-old", Err("mm_vision_tower: a model with a vision part")),
    ("llava-1.5-text-config", Ok(6.739)),
    ("minicpm-2b", Ok(2.725)),
    ("opt-350m", Ok(0.331)),
    ("phi-3-vision", Err("img_processor: a model with a vision part")),
    (
        "phi3-small",
        Err(
            "blocksparse_block_size: attention to some blocks of tokens alone cannot be described; set it to null",
        ),
    ),
    (
        "qwen3-vl-4b",
        Err(
            "text_config: expected a decoder of text alone; give what text_config has, and tie_word_embeddings",
        ),
    ),
    ("trinity-afmoe", Ok(13.827)),
    ("xlstm-7b", Err("qk_dim_factor: a model with recurrent layers")),
    ("xverse-moe-a4.2b", Ok(25.777)),
];

#[test]
fn reported_files_are_counted_right_or_refused_by_the_key_that_stands_in_the_way() {
    for (name, expected) in REPORTED {
        match (read(&config(name), name), expected) {
            (Ok(model), Ok(billions)) => {
                let off = model.parameters() / 1e9 / billions - 1.0;
                // Small models are published with three digits.
                assert!(off.abs() < 1.5e-3, "{name}: {} off by {off}", model.parameters());
            }
            (Err(refusal), Err(key)) => assert!(refusal.contains(key), "{name}: {refusal}"),
            (found, _) => panic!("{name}: {found:?}"),
        }
    }
    // Six of sixteen blocks attend, with keys and values of 8 heads of 64.
    let lfm = read(&config("lfm2-350m-legacy"), "lfm").unwrap();
    assert_eq!(kv_bytes(&lfm, 1.0), f64::from(2 * 2 * 6 * 8 * 64));
    // What the refusals ask for.
    let phi =
        config("phi3-small").replace("\"blocksparse_block_size\": 64", "\"blocksparse_block_size\": null");
    assert!((read(&phi, "phi").unwrap().parameters() / 7.392e9 - 1.0).abs() < 1e-3);
    let sees: Value = serde_json::from_str(&config("qwen3-vl-4b")).unwrap();
    let text = read(&sees["text_config"].to_string(), "text").unwrap();
    assert!((text.parameters() / 4.022e9 - 1.0).abs() < 1e-3);
}

/// `models.jsonl` has sizes of published files, and what transformers 5.23 counts of the model that they describe.
#[test]
fn published_models_of_every_family_have_the_published_counts() {
    let rows: Vec<Value> =
        include_str!("models.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut families = std::collections::BTreeSet::new();
    let mut wrong = vec![];
    for row in &rows {
        let (name, published) = (row["name"].as_str().unwrap(), row["parameters"].as_f64().unwrap());
        let family = row["config"]["model_type"].as_str().unwrap();
        families.insert(family);
        let found = read(&row["config"].to_string(), "published");
        let off = found.as_ref().map(|model| model.parameters() / published - 1.0);
        println!(
            "{family:20} {name:48} {:12.3} million published {:+.4}%",
            published / 1e6,
            100.0 * off.as_ref().map_or(f64::NAN, |off| *off)
        );
        match off {
            Ok(off) if off.abs() < 1e-3 => {}
            Ok(off) => wrong.push(format!("{name}: off by {off}")),
            Err(refusal) => wrong.push(format!("{name}: {refusal}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(families.len() >= 40, "{} families: {families:?}", families.len());
}

/// A file of our own and a published one describe one model.
#[test]
fn a_model_of_our_own_files_is_that_of_its_published_config() {
    let ours = Model::load("deepseek-v3").unwrap();
    let published = read(r#"{"model_type": "deepseek_v3", "max_position_embeddings": 4096}"#, "own").unwrap();
    let same = Model { title: ours.title.clone(), source: ours.source.clone(), sequence: 4096, ..published };
    assert_eq!(ours.parameters(), same.parameters());
    assert_eq!(ours.flops(1), same.flops(1));
    assert!((ours.parameters() / 671.026e9 - 1.0).abs() < 1e-3);
}

/// Bytes of a token in 16 bits, as the papers and model cards have them.
#[test]
fn latents_windows_and_states_keep_what_they_keep() {
    let of = |config: &str| read(config, "kept").unwrap();
    // DeepSeek-V2, section 2.1.4: (512 + 64) values for a token and block.
    let deepseek = of(r#"{"model_type": "deepseek_v3"}"#);
    assert_eq!(kv_bytes(&deepseek, 4096.0), f64::from(2 * 61 * (512 + 64)) * 4096.0);
    // Every other block of gpt-oss looks at 128 tokens.
    let oss = of(r#"{"model_type": "gpt_oss"}"#);
    assert_eq!(kv_bytes(&oss, 4096.0), f64::from(2 * 2 * 8 * 64) * 18.0 * (4096.0 + 128.0));
    // A state does not grow: 128 values in 32 bits for each of its width.
    let mamba = of(r#"{"model_type": "mamba2"}"#);
    assert_eq!([1.0, 4096.0].map(|tokens| kv_bytes(&mamba, tokens)), [f64::from(4 * 64 * 8192 * 128); 2]);
}

/// A file may say of a list what the class would never take: such a file is refused by the key.
#[test]
fn lists_and_classes_that_no_model_has_are_refused_by_their_key() {
    let plain = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    });
    let mixture = serde_json::json!({
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    });
    let with = |changes: &[(&str, Value)]| {
        let mut config = plain.clone();
        for (key, value) in changes {
            config[*key] = value.clone();
        }
        read(&config.to_string(), "changed")
    };
    let eight = |count: usize| Value::from(vec![8; count]);
    assert_eq!(with(&[("num_key_value_heads", eight(32))]).unwrap(), with(&[]).unwrap());
    let mixed = |key: &str, value: Value| {
        let own: Vec<_> =
            mixture.as_object().unwrap().iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        with(&[&own[..], &[(key, value)]].concat())
    };
    assert!(mixed("num_local_experts", 8.into()).unwrap().parameters() > 40e9);
    for (found, expected) in [
        (
            with(&[("num_key_value_heads", eight(3))]),
            "num_key_value_heads: expected a whole number, or one of each of 32 blocks, found 3 of them",
        ),
        (
            with(&[("num_hidden_layers", serde_json::json!([32]))]),
            "num_hidden_layers: expected a whole number, found [32]",
        ),
        (
            with(&[("architectures", "MixtralForCausalLM".into())]),
            "architectures: expected a list of classes, found ",
        ),
        (
            with(&[("layer_types", vec!["linear_attention"; 32].into())]),
            "layer_types: expected \"full_attention\" of every block of a llama, found \"linear_attention\"",
        ),
        (
            mixed("num_local_experts", 0.into()),
            "num_local_experts: expected experts, to which num_experts_per_tok sends tokens",
        ),
        (
            mixed("num_local_experts", Value::Null),
            "num_local_experts: expected experts, to which num_experts_per_tok",
        ),
    ] {
        let refusal = found.unwrap_err();
        assert!(refusal.contains(expected), "{refusal}");
    }
}

/// Rotation is what a file says; norms of queries and keys are what its class has, or a key.
#[test]
fn rotation_and_norms_of_queries_and_keys_are_read() {
    let keys = r#""hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
        "max_position_embeddings": 4096, "num_key_value_heads": 8, "vocab_size": 32000"#;
    for (class, more, expected) in [
        ("qwen3", ", \"head_dim\": 128, \"rope_theta\": 1000000", [true, true]),
        ("qwen3", ", \"head_dim\": 128", [false, true]),
        ("llama", ", \"rope_theta\": 10000.0", [true, false]),
        ("llama", ", \"rope_theta\": null", [false, false]),
        ("cohere", ", \"use_qk_norm\": true, \"rope_theta\": 8000000", [true, true]),
        ("cohere", ", \"use_qk_norm\": false", [false, false]),
    ] {
        let text = format!("{{\"model_type\": \"{class}\", {keys}{more}}}");
        let model = read(&text, "rotated").unwrap();
        assert_eq!([model.rotary, model.query_key_norms], expected, "{class}{more}");
    }
}
