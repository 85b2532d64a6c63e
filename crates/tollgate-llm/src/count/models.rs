//! Which encoding a model of OpenAI has.

use super::Encoding;

/// Whole names and beginnings of names. A name that ends in `*` stands for all that begin so.
const MODELS: [(&str, Encoding); 24] = [
    ("gpt-5*", Encoding::O200k),
    ("gpt-4.5*", Encoding::O200k),
    ("gpt-4.1*", Encoding::O200k),
    ("gpt-4o*", Encoding::O200k),
    ("chatgpt-4o-*", Encoding::O200k),
    ("gpt-oss-*", Encoding::O200k),
    ("codex-mini*", Encoding::O200k),
    ("o1", Encoding::O200k),
    ("o1-*", Encoding::O200k),
    ("o3", Encoding::O200k),
    ("o3-*", Encoding::O200k),
    ("o4-mini*", Encoding::O200k),
    ("gpt-4", Encoding::Cl100k),
    ("gpt-4-*", Encoding::Cl100k),
    ("gpt-3.5", Encoding::Cl100k),
    ("gpt-3.5-turbo", Encoding::Cl100k),
    ("gpt-3.5-turbo-*", Encoding::Cl100k),
    ("gpt-35-turbo", Encoding::Cl100k),
    ("gpt-35-turbo-*", Encoding::Cl100k),
    ("davinci-002", Encoding::Cl100k),
    ("babbage-002", Encoding::Cl100k),
    ("text-embedding-ada-002", Encoding::Cl100k),
    ("text-embedding-3-small", Encoding::Cl100k),
    ("text-embedding-3-large", Encoding::Cl100k),
];

/// The encoding of a model, if it is public: also of fine-tuned ones (`ft:gpt-4o:…`) and of names with their provider before them
/// (`openai/gpt-4o`).
///
/// ```
/// use tollgate_llm::count::{Encoding, encoding_of};
/// assert_eq!(encoding_of("gpt-4o-2024-11-20"), Some(Encoding::O200k));
/// assert_eq!(encoding_of("ft:gpt-4-0613:acme::x"), Some(Encoding::Cl100k));
/// assert_eq!(encoding_of("claude-sonnet-4-5"), None);
/// ```
pub fn encoding_of(model: &str) -> Option<Encoding> {
    let model = model.strip_prefix("openai/").unwrap_or(model);
    let model = match model.strip_prefix("ft:") {
        Some(tuned) => tuned.split(':').next().unwrap_or(tuned),
        None => model,
    };
    let is_named = |name: &str| match name.strip_suffix('*') {
        Some(start) => model.starts_with(start),
        None => model == name,
    };
    MODELS.iter().find(|(name, _)| is_named(name)).map(|(_, encoding)| *encoding)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_map_is_that_of_the_oracle() {
        use tiktoken_rs::tokenizer::{Tokenizer, get_tokenizer};
        for model in [
            "gpt-5",
            "gpt-5-mini",
            "gpt-4.1",
            "gpt-4.1-nano",
            "gpt-4o",
            "gpt-4o-mini-2024-07-18",
            "chatgpt-4o-latest",
            "gpt-oss-120b",
            "o1",
            "o1-preview",
            "o3-mini",
            "o4-mini",
            "o4-mini-2025-04-16",
            "gpt-4",
            "gpt-4-32k",
            "gpt-4-0613",
            "gpt-3.5-turbo",
            "gpt-3.5-turbo-0125",
            "gpt-35-turbo",
            "text-embedding-3-small",
            "davinci-002",
            "ft:gpt-4o-mini:acme::1",
            "ft:gpt-3.5-turbo:acme::1",
            "claude-opus-4-1",
            "gemini-2.5-pro",
            "llama3",
        ] {
            let expected = match get_tokenizer(model) {
                Some(Tokenizer::O200kBase | Tokenizer::O200kHarmony) => Some(Encoding::O200k),
                Some(Tokenizer::Cl100kBase) => Some(Encoding::Cl100k),
                _ => None,
            };
            assert_eq!(encoding_of(model), expected, "{model}");
        }
    }
}
