//! The name that somebody may have meant, for errors about names that there are not.

/// A question that names the one of `names` that is spelled like `text`, or all of them if none is.
pub(crate) fn suggestion(text: &str, names: impl Iterator<Item = &'static str> + Clone) -> String {
    match nearest(text, names.clone()) {
        Some(name) => format!("did you mean {name:?}?"),
        None => format!("there are {}", names.collect::<Vec<_>>().join(", ")),
    }
}

/// The name that is spelled most like `text`, if that is likely to be a slip: at most a third of the letters differ,
/// or one is the other's beginning or end.
pub(crate) fn nearest(
    text: &str,
    names: impl Iterator<Item = &'static str>,
) -> Option<&'static str> {
    let text = text.to_lowercase();
    let distance = |name: &str| strsim::damerau_levenshtein(&text, &name.to_lowercase());
    let name = names.min_by_key(|name| distance(name))?;
    let lower = name.to_lowercase();
    let (short, long) = match text.len() < lower.len() {
        true => (&text, &lower),
        false => (&lower, &text),
    };
    let is_part =
        short.len() > 3 && (long.starts_with(short.as_str()) || long.ends_with(short.as_str()));
    (is_part || distance(name) * 3 <= long.len()).then_some(name)
}
