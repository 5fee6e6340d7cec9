//! Whose transfer parameters are whose.
//!
//! On the way out the first child that has parameters keeps them flat, where a router and a plain
//! connector look for them; those of any other child `i` go under `kvferry.children.<i>`. On the way in a child
//! sees its own, or the flat ones.

use serde_json::Value;

use crate::contract::Params;

const OURS: &str = "kvferry";
const CHILDREN: &str = "children";

/// What child number `name` is shown of a request's parameters. They come from a client: anything
/// that does not look right is not there.
pub(super) fn of_child<'a>(params: Option<&'a Params>, name: &str) -> Option<&'a Params> {
    let all = params?;
    let own = || {
        all.get(OURS)?
            .as_object()?
            .get(CHILDREN)?
            .as_object()?
            .get(name)?
            .as_object()
    };
    Some(own().unwrap_or(all))
}

/// Whether any child may have parameters of its own.
pub(super) fn nested(params: Option<&Params>) -> bool {
    params
        .and_then(|all| all.get(OURS)?.get(CHILDREN))
        .is_some()
}

/// The parameters of all children, in their order, as one object; and how many found no place.
pub(super) fn merge(children: Vec<(usize, Params)>) -> (Option<Params>, u64) {
    let mut children = children.into_iter();
    let Some((first, mut flat)) = children.next() else {
        return (None, 0);
    };
    let mut nested = Params::new();
    let mut all_of_first = None;
    for (index, params) in children {
        nested.insert(index.to_string(), Value::Object(params));
    }
    if nested.is_empty() {
        return (Some(flat), 0);
    }
    // If the first child's own have something there already (it is a MultiConnector itself), it gets
    // a place of its own too.
    if flat.get(OURS).and_then(|ours| ours.get(CHILDREN)).is_some() {
        all_of_first = Some(flat.clone());
    }
    nested.extend(all_of_first.map(|params| (first.to_string(), Value::Object(params))));
    let dropped = nested.len() as u64;
    match flat
        .entry(OURS)
        .or_insert_with(|| Value::Object(Params::new()))
    {
        Value::Object(ours) => {
            ours.insert(CHILDREN.to_owned(), Value::Object(nested));
            (Some(flat), 0)
        }
        _ => (Some(flat), dropped),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Params {
        value.as_object().unwrap().clone()
    }

    fn round(children: Vec<(usize, Value)>) -> Params {
        let children = children
            .into_iter()
            .map(|(index, value)| (index, object(value)));
        let (merged, dropped) = merge(children.collect());
        assert_eq!(dropped, 0);
        merged.unwrap()
    }

    #[test]
    fn c103_two_children_returning_parameters_each_see_their_own_again() {
        let merged = round(vec![
            (0, json!({"remote_port": 1, "kvferry": {"lease": 7}})),
            (2, json!({"remote_port": 2})),
        ]);
        assert_eq!(
            Value::Object(merged.clone()),
            json!({"remote_port": 1, "kvferry": {"lease": 7, "children": {"2": {"remote_port": 2}}}})
        );
        let seen = |name| {
            of_child(Some(&merged), name)
                .unwrap()
                .get("remote_port")
                .cloned()
        };
        assert_eq!((seen("0"), seen("2")), (Some(json!(1)), Some(json!(2))));
        // One that returned nothing sees what a plain connector would.
        assert_eq!(seen("1"), Some(json!(1)));
    }

    #[test]
    fn one_child_alone_has_flat_parameters_and_none_has_none() {
        assert_eq!(merge(Vec::new()), (None, 0));
        assert_eq!(round(vec![(3, json!({"a": 1}))]), object(json!({"a": 1})));
        assert_eq!(of_child(None, "0"), None);
    }

    #[test]
    fn parameters_that_are_nested_already_or_in_the_way_are_not_mixed_up() {
        let inner = json!({"a": 1, "kvferry": {"children": {"1": {"a": 2}}}});
        let merged = round(vec![(0, inner.clone()), (1, json!({"a": 3}))]);
        assert_eq!(of_child(Some(&merged), "0"), Some(&object(inner)));
        assert_eq!(of_child(Some(&merged), "1"), Some(&object(json!({"a": 3}))));
        let odd = object(json!({"kvferry": 5}));
        let (merged, dropped) = merge(vec![(0, odd.clone()), (1, object(json!({"a": 3})))]);
        assert_eq!((merged, dropped), (Some(odd), 1));
    }

    #[test]
    fn c17_what_a_client_made_of_them_is_not_trusted() {
        for bad in [
            json!({"kvferry": null}),
            json!({"kvferry": [1]}),
            json!({"kvferry": {"children": "0"}}),
            json!({"kvferry": {"children": {"0": 3}}}),
            json!({}),
        ] {
            let bad = object(bad);
            assert_eq!(of_child(Some(&bad), "0"), Some(&bad));
        }
    }
}
