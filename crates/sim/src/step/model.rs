//! Transformers as data.

use polder_platform::printable_text;
use serde::{Deserialize, Serialize};

/// A transformer that is trained to predict the next token. Its numbers are those of its usual blocks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    /// Width inside the feed-forward part; 4 hidden when left out. A block whose mixer is not attention alone may have none: 0.
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
    /// Whether queries and keys are rotated by their position (RoPE).
    #[serde(default)]
    pub rotary: bool,
    /// Whether queries and keys pass a norm, each head by itself.
    #[serde(default)]
    pub query_key_norms: bool,
    /// Whether each block gathers queries, keys and values out of a padded batch, and puts what attention gives back.
    #[serde(default)]
    pub unpadded: bool,
    /// Tokens of a sequence in training.
    pub sequence: u32,
    /// Width of an embedding, where a matrix leads to the residual stream and another from it to the head.
    pub embedding_width: Option<u32>,
    /// What mixes the tokens of a sequence.
    #[serde(default)]
    pub mixer: Mixer,
    /// Whether attention has an output gate, as wide as its heads.
    #[serde(default)]
    pub attention_gate: bool,
    /// Whether values come out of the matrix of keys.
    #[serde(default)]
    pub values_by_keys: bool,
    /// Tokens that a token looks at; all before it when left out.
    pub window: Option<Window>,
    /// Latents that keys and values come out of.
    pub latent: Option<Latent>,
    /// A recurrent mixer.
    pub recurrent: Option<Recurrent>,
    /// Experts, when the feed-forward part is a mixture.
    pub experts: Option<Experts>,
    /// Blocks that differ from the usual ones, in how many of `layers`.
    #[serde(default)]
    pub others: Vec<OtherBlocks>,
}

/// What mixes the tokens of a sequence in a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mixer {
    /// Softmax attention.
    #[default]
    Attention,
    /// A recurrence over the sequence: a state-space layer, linear attention, a short convolution.
    Recurrent,
    /// Both, beside each other.
    Both,
    /// Nothing.
    None,
}

/// Attention to a part of the tokens before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Tokens.
    pub tokens: u32,
    /// Whether they are those of the token's own chunk, in place of the last ones.
    #[serde(default)]
    pub chunks: bool,
}

/// Multi-head latent attention (DeepSeek-V2, 2024, section 2.1). The width of a head is that of queries and keys, with what is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latent {
    /// Width of the latent of queries; 0 where they come straight out of the residual stream.
    #[serde(default)]
    pub queries: u32,
    /// Width of the latent of keys and values.
    pub keys: u32,
    /// Width of a key that is rotated, one for all heads.
    pub rotated: u32,
    /// Width of a value of a head.
    pub values: u32,
    /// What chooses the tokens that a token looks at; it looks at all when left out.
    pub indexer: Option<Indexer>,
}

/// Chooses the tokens that a token looks at, by the scores of small heads over all before it (DeepSeek-V3.2, 2025, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Indexer {
    /// Its heads of queries; they share one key.
    pub heads: u32,
    /// Width of a head.
    pub width: u32,
    /// Tokens that it chooses.
    pub tokens: u32,
}

/// A recurrent mixer: a product into it, a convolution over a few tokens, a state, a product out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recurrent {
    /// Columns of the product into it: what it mixes, its gate, and what steers the state.
    pub into: u32,
    /// Its width.
    pub width: u32,
    /// Values of the state for each of its width.
    #[serde(default)]
    pub state: u32,
    /// Columns that are convolved.
    #[serde(default)]
    pub convolved: u32,
    /// Tokens of the convolution.
    #[serde(default)]
    pub kernel: u32,
    /// Parameters beside these, for each of its width.
    #[serde(default)]
    pub inside: u32,
}

/// Blocks that differ from the usual ones. What is left out is as in those.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherBlocks {
    /// How many.
    pub blocks: u32,
    /// What mixes tokens.
    pub mixer: Option<Mixer>,
    /// Query heads.
    pub heads: Option<u32>,
    /// Heads of keys and values.
    pub kv_heads: Option<u32>,
    /// Width of a head.
    pub head_width: Option<u32>,
    /// Whether values come out of the matrix of keys.
    pub values_by_keys: Option<bool>,
    /// Tokens that a token looks at; with 0 `tokens` all.
    pub window: Option<Window>,
    /// Whether the feed-forward part is no mixture.
    #[serde(default)]
    pub dense: bool,
    /// Width inside the feed-forward part, 0 where there is none.
    pub feed_forward: Option<u32>,
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
    /// Width inside these; that of the others when left out.
    pub shared_feed_forward: Option<u32>,
    /// Width of a latent that goes to the routed experts and back, in place of the residual stream.
    pub latent: Option<u32>,
}

impl Experts {
    /// Of so many groups that share the experts, those that have one of a token's, on average over all choices.
    pub(crate) fn reached(&self, groups: u32) -> f64 {
        let [count, active, groups] = [self.count, self.active, groups].map(f64::from);
        let others = count - count / groups;
        let mut missed = 1.0;
        let mut chosen = 0.0;
        while chosen < active && missed > 0.0 {
            missed *= ((others - chosen) / (count - chosen)).max(0.0);
            chosen += 1.0;
        }
        groups * (1.0 - missed)
    }
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
        let of_others = self.others.iter().fold(0_u64, |sum, other| sum + u64::from(other.blocks));
        if of_others > self.layers.into() || self.others.iter().any(|other| other.blocks == 0) {
            let problem =
                format!("expected from 1 to {} blocks, the layers, in all, found {of_others}", self.layers);
            return Err(("others", problem));
        }
        self.check_block_kind(self.mixer != Mixer::Attention || !self.others.is_empty())?;
        for kind in self.kinds() {
            kind.check_block_kind(true).map_err(|(key, problem)| ("others", format!("{key}: {problem}")))?;
        }
        self.check_mixers()?;
        match (self.embedding_width, self.positions) {
            (Some(width), _) if width == 0 || width > MOST => {
                Err(("embedding_width", format!("expected a number from 1 to {MOST}, found {width}")))
            }
            (_, positions) if positions > MOST => {
                Err(("positions", format!("expected a number from 0 to {MOST}, found {positions}")))
            }
            (_, positions) if positions > 0 && self.sequence > positions => {
                let problem =
                    format!("expected {positions} at most, the learned positions, found {}", self.sequence);
                Err(("sequence", problem))
            }
            _ if self.vocabulary > MOST => {
                Err(("vocabulary", format!("expected a number from 0 to {MOST}, found {}", self.vocabulary)))
            }
            _ => Ok(()),
        }
    }

    /// That some block has what is said of its mixer: a size that none reads would be passed over.
    fn check_mixers(&self) -> Result<(), (&'static str, String)> {
        let mixers = self.others.iter().map(|other| other.mixer.unwrap_or(self.mixer)).chain([self.mixer]);
        let has = |one| mixers.clone().any(|mixer| mixer == one || mixer == Mixer::Both);
        if self.recurrent.is_some() && !has(Mixer::Recurrent) {
            let problem = "no block is recurrent; give mixer = \"recurrent\" or \"both\", or leave this out";
            return Err(("recurrent", problem.into()));
        }
        let of_attention = [
            ("latent", self.latent.is_some()),
            ("window", self.window.is_some()),
            ("attention_gate", self.attention_gate),
        ];
        if let Some((key, _)) =
            of_attention.into_iter().find(|(_, is_said)| *is_said && !has(Mixer::Attention))
        {
            return Err((key, "no block attends; leave it out".into()));
        }
        match (self.latent, self.kv_heads) {
            (Some(_), Some(heads)) => Err((
                "kv_heads",
                format!("expected nothing beside latent, which all heads share, found {heads}"),
            )),
            _ => Ok(()),
        }
    }

    /// The same of one kind of block, which may have no feed-forward part.
    fn check_block_kind(&self, may_lack_feed_forward: bool) -> Result<(), (&'static str, String)> {
        let least = |key| u32::from(key != "feed_forward" || !may_lack_feed_forward);
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
            let (least, most) = (least(key), if key == "layers" { MOST_LAYERS } else { MOST });
            if count < least || count > most {
                return Err((key, format!("expected a number from {least} to {most}, found {count}")));
            }
        }
        let parts = [
            ("window.tokens", self.window.map(|window| window.tokens), 1),
            ("latent.queries", self.latent.map(|latent| latent.queries), 0),
            ("latent.keys", self.latent.map(|latent| latent.keys), 1),
            ("latent.rotated", self.latent.map(|latent| latent.rotated), 0),
            ("latent.values", self.latent.map(|latent| latent.values), 1),
            ("latent.indexer.heads", self.indexer().map(|indexer| indexer.heads), 1),
            ("latent.indexer.width", self.indexer().map(|indexer| indexer.width), 1),
            ("latent.indexer.tokens", self.indexer().map(|indexer| indexer.tokens), 1),
            ("experts.latent", self.experts.and_then(|experts| experts.latent), 1),
            ("recurrent.into", self.recurrent.map(|recurrent| recurrent.into), 1),
            ("recurrent.width", self.recurrent.map(|recurrent| recurrent.width), 1),
            ("recurrent.state", self.recurrent.map(|recurrent| recurrent.state), 0),
            ("recurrent.convolved", self.recurrent.map(|recurrent| recurrent.convolved), 0),
            ("recurrent.kernel", self.recurrent.map(|recurrent| recurrent.kernel), 0),
            ("recurrent.inside", self.recurrent.map(|recurrent| recurrent.inside), 0),
        ];
        for (key, count, least) in parts {
            if let Some(count) = count.filter(|count| *count < least || *count > MOST) {
                return Err((key, format!("expected a number from {least} to {MOST}, found {count}")));
            }
        }
        if matches!(self.mixer, Mixer::Recurrent | Mixer::Both) && self.recurrent.is_none() {
            return Err(("recurrent", "expected the sizes of a recurrent mixer, found nothing".into()));
        }
        if self.latent.is_some_and(|latent| latent.rotated > self.head_width()) {
            let problem = format!("expected {} at most, the head_width", self.head_width());
            return Err(("latent.rotated", problem));
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
            Some(Experts { shared_feed_forward: Some(width), .. }) if width == 0 || width > MOST => Err((
                "experts.shared_feed_forward",
                format!("expected a number from 1 to {MOST}, found {width}"),
            )),
            Some(Experts { count, active, .. }) if active == 0 || active > count => {
                Err(("experts.active", format!("expected 1 to {count}, found {active}")))
            }
            _ => Ok(()),
        }
    }

    /// Its kinds of block, each as a model of such blocks alone. Empty where all are alike.
    pub(crate) fn kinds(&self) -> Vec<Self> {
        if self.others.is_empty() {
            return vec![];
        }
        let of_others: u32 = self.others.iter().map(|other| other.blocks).sum();
        let usual = Self { layers: self.layers - of_others, others: vec![], ..self.clone() };
        let other = |other: &OtherBlocks| Self {
            layers: other.blocks,
            mixer: other.mixer.unwrap_or(usual.mixer),
            heads: other.heads.unwrap_or(usual.heads),
            kv_heads: other.kv_heads.or(usual.kv_heads),
            head_width: other.head_width.or(usual.head_width),
            values_by_keys: other.values_by_keys.unwrap_or(usual.values_by_keys),
            window: other.window.or(usual.window).filter(|window| window.tokens > 0),
            experts: usual.experts.filter(|_| !other.dense),
            feed_forward: other.feed_forward.or(usual.feed_forward),
            ..usual.clone()
        };
        let others = self.others.iter().map(other);
        (usual.layers > 0).then(|| usual.clone()).into_iter().chain(others).collect()
    }

    /// What a function says of a block, on average over all blocks.
    fn mean(&self, of: impl Fn(&Self) -> f64) -> f64 {
        match self.others.is_empty() {
            true => of(self),
            false => {
                let all = self.kinds().iter().map(|kind| f64::from(kind.layers) * of(kind)).sum::<f64>();
                all / f64::from(self.layers)
            }
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

    /// Whether tokens look at others in each block of this kind.
    pub(crate) const fn attends(&self) -> bool {
        matches!(self.mixer, Mixer::Attention | Mixer::Both)
    }

    /// The recurrent mixer of each block of this kind.
    pub(crate) fn recurs(&self) -> Option<Recurrent> {
        self.recurrent.filter(|_| matches!(self.mixer, Mixer::Recurrent | Mixer::Both))
    }

    /// Width of a value of a head.
    pub(crate) fn value_width(&self) -> u32 {
        self.latent.map_or_else(|| self.head_width(), |latent| latent.values)
    }

    /// Parts of a block that join the residual stream, each behind a norm.
    pub(crate) fn parts(&self) -> u32 {
        u32::from(self.mixer != Mixer::None) + u32::from(self.feed_forward() > 0)
    }

    /// Tokens that a token looks at, as a part of those that it would look at without a window.
    pub(crate) fn seen(&self) -> f64 {
        let sequence = f64::from(self.sequence);
        let chosen = self.indexer().map(|it| (f64::from(it.tokens), false));
        match chosen.or_else(|| self.window.map(|window| (f64::from(window.tokens), window.chunks))) {
            Some((tokens, true)) if tokens < sequence => tokens / sequence,
            // The first tokens have fewer before them.
            Some((tokens, false)) if tokens < sequence => tokens / sequence * (2.0 - tokens / sequence),
            _ => 1.0,
        }
    }

    /// Width inside an expert that every token goes through.
    pub(crate) fn shared_feed_forward(&self) -> u32 {
        self.experts.and_then(|experts| experts.shared_feed_forward).unwrap_or_else(|| self.feed_forward())
    }

    /// What chooses the tokens that a token looks at, in each block of this kind.
    pub(crate) fn indexer(&self) -> Option<Indexer> {
        self.latent.filter(|_| self.attends()).and_then(|latent| latent.indexer)
    }

    /// Width of what goes to an expert and back.
    pub(crate) fn routed_width(&self) -> u32 {
        self.experts.and_then(|experts| experts.latent).unwrap_or(self.hidden)
    }

    /// Rows and columns of the matrices of a block's mixer, 0 where there is none.
    pub(crate) fn mixer_matrices(&self) -> [[f64; 2]; 9] {
        let mut all = [[0.0; 2]; 9];
        let [hidden, heads, width] = [self.hidden, self.heads, self.head_width()].map(f64::from);
        let queries = heads * width;
        match self.latent.filter(|_| self.attends()) {
            Some(Latent { queries: low, keys, rotated, values, indexer }) => {
                let [low, keys, rotated, values] = [low, keys, rotated, values].map(f64::from);
                if let Some(Indexer { heads, width, .. }) = indexer {
                    let [heads, width] = [heads, width].map(f64::from);
                    all[7] = [if low > 0.0 { low } else { hidden }, heads * width];
                    all[8] = [hidden, width + heads];
                }
                all[0] = if low > 0.0 { [hidden, low] } else { [hidden, queries] };
                all[1] = if low > 0.0 { [low, queries] } else { [0.0; 2] };
                all[2] = [hidden, keys + rotated];
                all[3] = [keys, heads * (width - rotated + values)];
                all[4] = [heads * values, hidden];
            }
            None if self.attends() => {
                let kv = f64::from(self.kv_heads()) * width;
                all[..4].copy_from_slice(&[[hidden, queries], [hidden, kv], [hidden, kv], [queries, hidden]]);
                if self.values_by_keys {
                    all[2] = [0.0; 2];
                }
                all[4] = if self.attention_gate { [hidden, queries] } else { [0.0; 2] };
            }
            None => {}
        }
        if let Some(recurrent) = self.recurs() {
            let [into, width] = [recurrent.into, recurrent.width].map(f64::from);
            all[5..7].copy_from_slice(&[[hidden, into], [width, hidden]]);
        }
        all
    }

    /// Parameters of the matrices of a block's mixer, and of its recurrence.
    fn mixer_parameters(&self) -> f64 {
        let matrices: f64 = self.mixer_matrices().iter().map(|[rows, columns]| rows * columns).sum();
        let recurrence = self.recurs().map_or(0.0, |it| {
            let [width, convolved, kernel, inside] =
                [it.width, it.convolved, it.kernel, it.inside].map(f64::from);
            convolved * kernel + width * inside
        });
        matrices + recurrence
    }

    /// Parameters of a feed-forward part that is so wide.
    fn through(&self, inside: u32) -> f64 {
        (1.0 + self.entries()) * f64::from(self.hidden) * f64::from(inside)
    }

    /// Parameters of a routed expert.
    fn expert(&self) -> f64 {
        (1.0 + self.entries()) * f64::from(self.routed_width()) * f64::from(self.feed_forward())
    }

    /// Parameters of the two matrices between the residual stream and what goes to experts, where there are such.
    fn latent_parameters(&self) -> f64 {
        let latent = self.experts.and_then(|experts| experts.latent).map_or(0.0, f64::from);
        2.0 * latent * f64::from(self.hidden)
    }

    /// Parameters of a block that every rank of an expert group has, on average over all blocks.
    #[must_use]
    pub fn dense_parameters(&self) -> f64 {
        self.mean(|kind| {
            let always = match kind.experts {
                Some(experts) => {
                    f64::from(experts.shared) * kind.through(kind.shared_feed_forward())
                        + f64::from(kind.hidden) * f64::from(experts.count)
                        + kind.latent_parameters()
                }
                None => kind.through(kind.feed_forward()),
            };
            kind.mixer_parameters() + 2.0 * f64::from(kind.parts() * kind.hidden) + always
        })
    }

    /// Parameters of a block that are spread over an expert group, on average over all blocks.
    #[must_use]
    pub fn spread_parameters(&self) -> f64 {
        self.mean(|kind| kind.experts.map_or(0.0, |it| f64::from(it.count) * kind.expert()))
    }

    /// Parameters that a pass over so many tokens reads: of routed experts those that a token chooses, each as likely, and of the embedding
    /// next to nothing.
    #[must_use]
    pub fn parameters_read(&self, tokens: f64) -> f64 {
        let chosen = |kind: &Self| {
            kind.experts.map_or(0.0, |it| {
                let [count, active] = [it.count, it.active].map(f64::from);
                count * (1.0 - (1.0 - active / count).powf(tokens)) * kind.expert()
            })
        };
        f64::from(self.layers) * (self.dense_parameters() + self.mean(chosen)) + self.embedding_parameters()
    }

    /// Parameters of the largest block.
    pub(crate) fn largest_block(&self) -> f64 {
        let of = |kind: &Self| kind.dense_parameters() + kind.spread_parameters();
        match self.others.is_empty() {
            true => of(self),
            false => self.kinds().iter().map(of).fold(0.0, f64::max),
        }
    }

    /// Sides of all matrices of all blocks, experts' too: what LoRA of rank 1 has parameters.
    pub(crate) fn sides(&self) -> f64 {
        let sides = |kind: &Self| {
            let mixer: f64 = kind.mixer_matrices().iter().map(|[rows, columns]| rows + columns).sum();
            let of = |outside: u32, inside: u32| match inside {
                0 => 0.0,
                _ => (kind.entries() + 1.0) * (f64::from(outside) + f64::from(inside)),
            };
            let feed = kind.experts.map_or_else(
                || of(kind.hidden, kind.feed_forward()),
                |it| {
                    let latent = it.latent.map_or(0.0, |width| 2.0 * f64::from(kind.hidden + width));
                    f64::from(it.count) * of(kind.routed_width(), kind.feed_forward())
                        + f64::from(it.shared) * of(kind.hidden, kind.shared_feed_forward())
                        + latent
                },
            );
            mixer + feed
        };
        f64::from(self.layers) * self.mean(sides)
    }

    /// Bytes that a sequence of so many tokens leaves for the next one, with keys and values of so many bytes each: those of all tokens that
    /// are still looked at, and states in 32 bits.
    #[must_use]
    pub fn kept_for_next(&self, tokens: f64, value: f64) -> f64 {
        let of = |kind: &Self| {
            let seen = kind.window.map_or(tokens, |window| tokens.min(window.tokens.into()));
            let attention = match kind.latent {
                _ if !kind.attends() => 0.0,
                Some(latent) => f64::from(latent.keys + latent.rotated),
                None => 2.0 * f64::from(kind.kv_heads()) * f64::from(kind.head_width()),
            };
            let state = kind.recurs().map_or(0.0, |it| f64::from(it.width) * f64::from(it.state));
            let index = kind.indexer().map_or(0.0, |it| f64::from(it.width));
            value * (attention + index) * seen + 4.0 * state
        };
        f64::from(self.layers) * self.mean(of)
    }

    /// Parameters of the embedding, and of the head when it is another matrix.
    #[must_use]
    pub fn embedding_parameters(&self) -> f64 {
        f64::from(self.vocabulary) * f64::from(self.embedding_width.unwrap_or(self.hidden))
    }

    /// Parameters of learned positions, and of the matrices between embedding, residual stream and head.
    #[must_use]
    pub fn position_parameters(&self) -> f64 {
        let between = self.embedding_width.map_or(0.0, |width| 2.0 * f64::from(width));
        (f64::from(self.positions) + between) * f64::from(self.hidden)
    }

    /// All parameters.
    #[must_use]
    pub fn parameters(&self) -> f64 {
        let blocks = f64::from(self.layers) * (self.dense_parameters() + self.spread_parameters());
        let tables = self.embedding_parameters() * if self.tied { 1.0 } else { 2.0 };
        blocks + tables + self.position_parameters()
    }

    /// Operations that the model needs for a step over so many sequences, forward and backward, attention as if it
    /// looked at every token of its window: 72 B s L h^2 (1 + s/6h + V/12Lh) for the shape of GPT (Narayanan et al., SC21, section 3).
    #[must_use]
    pub fn flops(&self, batch: u32) -> f64 {
        let tokens = f64::from(batch) * f64::from(self.sequence);
        let block = |kind: &Self| {
            let feed = kind.experts.map_or_else(
                || kind.through(kind.feed_forward()),
                |experts| {
                    f64::from(experts.active) * kind.expert()
                        + f64::from(experts.shared) * kind.through(kind.shared_feed_forward())
                        + kind.latent_parameters()
                },
            );
            let widths = f64::from(kind.head_width()) + f64::from(kind.value_width());
            let attends = f64::from(u8::from(kind.attends()));
            let scores = attends * f64::from(kind.sequence) * f64::from(kind.heads) * widths * kind.seen();
            // A state decays, takes a token and gives one.
            let state = kind
                .recurs()
                .map_or(0.0, |recurrent| 3.0 * f64::from(recurrent.width) * f64::from(recurrent.state));
            let index =
                kind.indexer().map_or(0.0, |indexer| f64::from(indexer.heads) * f64::from(indexer.width));
            kind.mixer_parameters() + feed + scores + f64::from(kind.sequence) * index + state
        };
        6.0 * tokens * (f64::from(self.layers) * self.mean(block) + self.embedding_parameters())
    }
}
