//! Groups with a sliding window, laid out as vLLM does.

use std::fs;
use std::path::Path;

use super::super::*;
use super::machine::*;
use crate::contract::*;

const TOKENS: [u32; 18] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18,
];

/// A group that keeps everything and one with a window of 5 tokens, in blocks of 4.
fn machine(path: &Path) -> Machine {
    let mut config = config(path);
    config.block_tokens = vec![BLOCK, BLOCK];
    config.reach = vec![Reach::All, Reach::Window(5)];
    Machine::new(&config)
}

/// A directory with the first four blocks of [`TOKENS`], 10 to 40 and 110 to 140, but for those of the window whose
/// positions are named.
fn seeded(path: &Path, without: &[usize]) -> Machine {
    let mut machine = machine(path);
    let seed = job("seed", &TOKENS);
    let tables = [vec![1, 2, 3, 4, 5], vec![11, 12, 13, 14, 15]];
    for (group, base) in [(0_u32, 10), (1, 110)] {
        for position in 0..4_u8 {
            let block = 1 + 10 * group + u32::from(position);
            machine.ranks[0].fill(group, block, base + 10 * position);
        }
    }
    machine.scheduler.on_new_request(&seed.view());
    machine.step(&[Scheduled {
        request: seed.view(),
        new_blocks: GroupBlocks(&tables),
        renewed: true,
        computed: 0,
        tokens: 18,
    }]);
    machine.settle();
    let of_window = |save: &&Save| save.block.group == 1;
    let saves = machine.plans.iter().flat_map(|plan| &plan.save);
    let saves: Vec<Save> = saves.filter(of_window).cloned().collect();
    let all = files(path);
    for &position in without {
        let name = format!("{}.kv", saves[position].block.key);
        let file = all.iter().find(|file| file.ends_with(&name)).unwrap();
        fs::remove_file(file).unwrap();
    }
    machine
}

/// What is offered of the first `prompt` tokens, loaded into blocks that a scheduler has as vLLM lays them out.
fn load(machine: &mut Machine, prompt: usize, computed: u32) -> (u32, Option<LoadFailure>) {
    let job = job("b", &TOKENS[..prompt]);
    let tokens = machine.offer(&job, computed);
    if tokens == 0 {
        return (0, None);
    }
    let end = computed + tokens;
    let kept = end.saturating_sub(5 - 1) / BLOCK;
    let blocks = |base: u32, from: u32| -> Vec<u32> {
        let ids = (0..end.div_ceil(BLOCK)).map(|position| base + position);
        ids.map(|id| if id - base < from { NULL_BLOCK } else { id })
            .collect()
    };
    let tables = [blocks(21, 0), blocks(31, kept)];
    machine.scheduler.after_alloc(
        &job.view(),
        &Allocation {
            blocks: GroupBlocks(&tables),
            local_computed: computed,
            external: tokens,
        },
    );
    machine.settle();
    let rank = &machine.ranks[0];
    for position in computed / BLOCK..end / BLOCK {
        assert_eq!(rank.value(0, 21 + position), Some(10 + 10 * position as u8));
        let value = rank.value(1, 31 + position);
        assert!(
            position < kept || value == Some(110 + 10 * position as u8),
            "{value:?}"
        );
    }
    (tokens, machine.received.pop().unwrap().failure)
}

#[test]
fn c43_blocks_that_the_window_has_left_behind_are_not_needed() {
    let directory = tempfile::tempdir().unwrap();
    // With 16 tokens, the window begins at token 12.
    let mut machine = seeded(directory.path(), &[0, 1, 2]);
    assert_eq!(load(&mut machine, 18, 0), (16, None));
    assert_eq!(machine.worker().hits, 4 + 1);
}

#[test]
fn c43_blocks_inside_of_the_window_are() {
    let directory = tempfile::tempdir().unwrap();
    // Without the last one, it is that of 12 tokens, which begins at token 8.
    let mut machine = seeded(directory.path(), &[0, 1, 3]);
    assert_eq!(load(&mut machine, 18, 0), (12, None));
    assert_eq!(machine.worker().hits, 3 + 1);
}

/// With 16 tokens computed the window has dropped tokens 8 to 11, and the sixteenth token, which vLLM computes again,
/// looks at token 11: the block before the last is offered, and the last one computed.
#[test]
fn the_whole_prompt_is_not_offered_where_its_last_token_needs_a_dropped_block() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = seeded(directory.path(), &[]);
    assert_eq!(load(&mut machine, 16, 0), (12, None));
    assert_eq!(machine.worker().hits, 3 + 1);
    let computed = job("c", &TOKENS[..16]);
    // With 12 tokens computed here there is nothing to offer.
    assert_eq!(machine.offer(&computed, 12), 0);
}
