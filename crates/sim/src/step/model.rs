//! Transformers as data.

use polder_platform::printable_text;
use serde::{Deserialize, Serialize};

/// A transformer that is trained to predict the next token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// What it is, in a line.
    #[serde(deserialize_with = "printable_text")]
    pub title: String,
    /// Where its shape comes from.
    #[serde(deserialize_with = "printable_text")]
    pub source: String,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Blocks.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Heads of keys and values; as many as query heads when left out.
    pub kv_heads: Option<u32>,
    /// Width of a head; hidden / heads when left out.
    pub head_width: Option<u32>,
    /// Width inside the feed-forward part; 4 hidden when left out.
    pub feed_forward: Option<u32>,
    /// Whether the feed-forward part has a gate, as SwiGLU has: three matrices, not two.
    #[serde(default)]
    pub gated: bool,
    /// Whether values are dropped at random in training.
    #[serde(default)]
    pub dropout: bool,
    /// Tokens that there are; 0 leaves embedding, head and loss out.
    pub vocabulary: u32,
    /// Whether embedding and head are one matrix.
    #[serde(default)]
    pub tied: bool,
    /// Rows of a table of learned positions; 0 where positions are computed.
    #[serde(default)]
    pub positions: u32,
    /// Tokens of a sequence in training.
    pub sequence: u32,
    /// Experts, when the feed-forward part is a mixture.
    pub experts: Option<Experts>,
}

/// A mixture of experts in place of each feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Experts of a block.
    pub count: u32,
    /// Experts that a token goes through.
    pub active: u32,
    /// Experts that every token goes through besides.
    #[serde(default)]
    pub shared: u32,
}

/// Numbers of a model, at most.
pub(crate) const MOST: u32 = 1 << 26;
/// Blocks of a model, at most.
pub(crate) const MOST_LAYERS: u32 = 1 << 16;

impl Model {
    /// Whether its numbers go together: what is wrong otherwise, with the key.
    ///
    /// # Errors
    /// The key, and what was expected.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let counts = [
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads()),
            ("head_width", self.head_width()),
            ("feed_forward", self.feed_forward()),
            ("sequence", self.sequence),
        ];
        for (key, count) in counts {
            let most = if key == "layers" { MOST_LAYERS } else { MOST };
            if count == 0 || count > most {
                return Err((key, format!("expected a number from 1 to {most}, found {count}")));
            }
        }
        for (key, count) in [("vocabulary", self.vocabulary), ("positions", self.positions)] {
            if count > MOST {
                return Err((key, format!("expected a number from 0 to {MOST}, found {count}")));
            }
        }
        if self.head_width.is_none() && !self.hidden.is_multiple_of(self.heads) {
            let Self { hidden, heads, .. } = self;
            return Err((
                "heads",
                format!("expected a divisor of hidden, {hidden}, or a head_width; found {heads}"),
            ));
        }
        if !self.heads.is_multiple_of(self.kv_heads()) {
            return Err((
                "kv_heads",
                format!("expected a divisor of heads, {}; found {}", self.heads, self.kv_heads()),
            ));
        }
        match self.experts {
            Some(Experts { count, .. }) if count == 0 || count > MOST => {
                Err(("experts.count", format!("expected a number from 1 to {MOST}, found {count}")))
            }
            Some(Experts { shared, .. }) if shared > MOST => {
                Err(("experts.shared", format!("expected a number from 0 to {MOST}, found {shared}")))
            }
            Some(Experts { count, active, .. }) if active == 0 || active > count => {
                Err(("experts.active", format!("expected 1 to {count}, found {active}")))
            }
            _ => Ok(()),
        }
    }

    /// Heads of keys and values.
    #[must_use]
    pub fn kv_heads(&self) -> u32 {
        self.kv_heads.unwrap_or(self.heads)
    }

    /// Width of a head.
    #[must_use]
    pub fn head_width(&self) -> u32 {
        self.head_width.unwrap_or(self.hidden / self.heads.max(1))
    }

    /// Width inside a feed-forward part, of one expert when it is a mixture.
    #[must_use]
    pub fn feed_forward(&self) -> u32 {
        self.feed_forward.unwrap_or(self.hidden.saturating_mul(4))
    }

    /// Matrices between the residual stream and the inside of a feed-forward part, going in.
    pub(crate) fn entries(&self) -> f64 {
        if self.gated { 2.0 } else { 1.0 }
    }

    /// Parameters of a block's attention and norms.
    #[must_use]
    pub fn attention_parameters(&self) -> f64 {
        let [hidden, width] = [self.hidden, self.head_width()].map(f64::from);
        let [heads, kv] = [self.heads, self.kv_heads()].map(f64::from);
        hidden * width * (2.0 * heads + 2.0 * kv) + 4.0 * hidden
    }

    /// Parameters of one feed-forward part, of one expert when it is a mixture.
    #[must_use]
    pub fn expert_parameters(&self) -> f64 {
        (1.0 + self.entries()) * f64::from(self.hidden) * f64::from(self.feed_forward())
    }

    /// Parameters of a block that every rank of an expert group has.
    #[must_use]
    pub fn dense_parameters(&self) -> f64 {
        let always = match self.experts {
            Some(experts) => {
                f64::from(experts.shared) * self.expert_parameters()
                    + f64::from(self.hidden) * f64::from(experts.count)
            }
            None => self.expert_parameters(),
        };
        self.attention_parameters() + always
    }

    /// Parameters of a block that are spread over an expert group.
    #[must_use]
    pub fn spread_parameters(&self) -> f64 {
        self.experts.map_or(0.0, |experts| f64::from(experts.count) * self.expert_parameters())
    }

    /// Parameters of the embedding, and of the head when it is another matrix.
    #[must_use]
    pub fn embedding_parameters(&self) -> f64 {
        f64::from(self.vocabulary) * f64::from(self.hidden)
    }

    /// Parameters of learned positions.
    #[must_use]
    pub fn position_parameters(&self) -> f64 {
        f64::from(self.positions) * f64::from(self.hidden)
    }

    /// All parameters.
    #[must_use]
    pub fn parameters(&self) -> f64 {
        let blocks = f64::from(self.layers) * (self.dense_parameters() + self.spread_parameters());
        let tables = self.embedding_parameters() * if self.tied { 1.0 } else { 2.0 };
        blocks + tables + self.position_parameters()
    }

    /// Operations that the model needs for a step over so many sequences, forward and backward, attention as if it
    /// looked at every token: 72 B s L h^2 (1 + s/6h + V/12Lh) for the shape of GPT (Narayanan et al., SC21, section 3).
    #[must_use]
    pub fn flops(&self, batch: u32) -> f64 {
        let tokens = f64::from(batch) * f64::from(self.sequence);
        let active = self.experts.map_or(1.0, |it| f64::from(it.active + it.shared));
        let block =
            self.attention_parameters() - 4.0 * f64::from(self.hidden) + active * self.expert_parameters();
        let scores = 2.0 * f64::from(self.sequence) * f64::from(self.heads) * f64::from(self.head_width());
        let layers = f64::from(self.layers);
        6.0 * tokens * (layers * (block + scores) + self.embedding_parameters())
    }
}
