//! What two engines must have alike to read one another's blocks.

use std::collections::BTreeMap;

use super::Discovered;

/// Longest text about the insides of blocks that is sent as it is; a digest stands for a longer one.
const MAX_INTERIOR: usize = 2_048;

impl Discovered {
    /// Names and values for [`EngineConfig::compatibility`](kvferry_engine::EngineConfig::compatibility): engines
    /// whose values for a name differ refuse one another and name it. They say nothing of the model and of the data
    /// type beyond its size; whoever knows them adds them.
    #[must_use]
    pub fn fingerprint(&self) -> Vec<(String, String)> {
        let groups = 0..self.block_tokens.len();
        let of = |group: usize| {
            let is_in = move |table: &&super::FoundTable| table.group as usize == group;
            self.tables.iter().filter(is_in)
        };
        let tables: Vec<usize> = groups.clone().map(|group| of(group).count()).collect();
        let bytes: Vec<u64> = groups
            .clone()
            .map(|group| of(group).map(|table| table.block_bytes).sum())
            .collect();
        // An engine names the first in the order of names: what explains the others comes before them.
        let mut fields = vec![
            (
                "kv_block_tokens".to_owned(),
                format!("{:?}", self.block_tokens),
            ),
            ("kv_tables".to_owned(), format!("{tables:?}")),
            ("kv_tables_block_bytes".to_owned(), format!("{bytes:?}")),
        ];
        for group in groups {
            let mut interiors = BTreeMap::<&str, usize>::new();
            for table in of(group) {
                *interiors.entry(&table.interior).or_default() += 1;
            }
            let texts: Vec<String> = interiors
                .iter()
                .map(|(interior, count)| format!("{count} x ({interior})"))
                .collect();
            let text = texts.join("; ");
            let text = if text.len() > MAX_INTERIOR {
                format!("digest {}", blake3::hash(text.as_bytes()).to_hex())
            } else {
                text
            };
            if !text.is_empty() {
                fields.push((format!("kv_tables_interior_of_group_{group}"), text));
            }
        }
        fields
    }
}
