//! How many tokens a text or a request has: exact for models whose vocabulary is public, an estimate for others.
//!
//! A [`Tokenizer`] counts a text. [`encoding_of`] knows which encoding an OpenAI model has; other models are counted with `o200k_base`
//! and multiplied by what `learned.rs` has learned of them. [`Counter::count`] counts a whole request: messages with their overhead,
//! system text, tools as the JSON that is sent. Counts of messages are kept by the hash of their JSON, because a chat sends its
//! history again with every turn. Special tokens in a text are plain text, as providers treat them.
//!
//! Nothing here asks the network: vocabularies are embedded.

mod cache;
mod content;
mod models;

use std::sync::Arc;

use self::cache::Cache;
use self::content::Content;
pub use self::models::encoding_of;
use crate::learned::Learned;
use crate::request::ModelRequest;

pub use crate::request::LARGE;

/// Counts the tokens of a text.
pub trait Tokenizer: Send + Sync {
    /// How many tokens the text has. Special tokens are plain text.
    fn count(&self, text: &str) -> u64;
}

/// A public vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// `o200k_base`: GPT-4o and later.
    O200k,
    /// `cl100k_base`: GPT-4, GPT-3.5 and the embedding models.
    Cl100k,
}

impl Encoding {
    /// Its name in the provider's tools.
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::O200k => "o200k_base",
            Encoding::Cl100k => "cl100k_base",
        }
    }
}

impl Tokenizer for Encoding {
    /// ```
    /// use tollgate_llm::count::{Encoding, Tokenizer};
    /// assert_eq!(Encoding::O200k.count("hello world"), 2);
    /// assert!(Encoding::O200k.count("<|endoftext|>") > 1);
    /// ```
    fn count(&self, text: &str) -> u64 {
        match tiktoken::get_encoding(self.name()) {
            Some(vocabulary) => u64::try_from(vocabulary.count(text)).unwrap_or(u64::MAX),
            // Both are compiled in. If one were not, about 4 characters are a token.
            None => u64::try_from(text.chars().count().div_ceil(4)).unwrap_or(u64::MAX),
        }
    }
}

/// The tokens of a request, before anything that was learned of its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Tokens by the encoding.
    pub tokens: u64,
    /// Which encoding counted.
    pub encoding: Encoding,
    /// Whether the model has that encoding. Otherwise the count is the basis of an estimate.
    pub is_exact: bool,
}

/// What a model whose vocabulary is not public is estimated at, before anything was learned of it, for so many tokens by `o200k_base`.
///
/// ```
/// assert_eq!(tollgate_llm::count::first_estimate(100), 120);
/// ```
pub fn first_estimate(counted: u64) -> u64 {
    Learned::default().input(counted, false)
}

/// Counts requests. Cheap to clone; clones share their cache.
#[derive(Clone, Debug, Default)]
pub struct Counter {
    cache: Arc<Cache>,
}

impl Counter {
    /// Counts a request on this thread.
    pub fn count(&self, request: &ModelRequest<'_>) -> Counted {
        let found = encoding_of(request.model());
        let encoding = found.unwrap_or(Encoding::O200k);
        let content = Content { encoding, api: request.api(), cache: &self.cache };
        Counted { tokens: content.count(request), encoding, is_exact: found.is_some() }
    }
}
