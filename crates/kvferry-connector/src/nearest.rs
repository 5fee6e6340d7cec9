//! The name that somebody may have meant, for errors about names that there are not.

/// The name that is spelled most like `text`; nothing only if there are no names.
pub(crate) fn nearest(text: &str, names: impl Iterator<Item = &'static str>) -> &'static str {
    let text = text.to_lowercase();
    names
        .min_by_key(|name| strsim::damerau_levenshtein(&text, &name.to_lowercase()))
        .unwrap_or_default()
}
