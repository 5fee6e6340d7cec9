"""Transfer parameters that no producer sent: the right answer or an error, and the servers live on."""

from __future__ import annotations

import copy
from collections.abc import Callable

from ..pair import Pair
from ..reference import Prompt
from ..servers import free_port
from ..settings import COMPUTE_MARGIN, LOST_PEER_LIMIT
from ..suite import scenario
from .setups import MAIN

Params = dict


def deep(levels: int) -> list:
    nested: list = []
    for _ in range(levels):
        nested = [nested]
    return nested


def change(params: Params, **changes: object) -> Params:
    return params | changes


def own(params: Params, **changes: object) -> Params:
    """Changes within the part that is kvferry's; nothing where there is none."""
    return params | {"kvferry": (params.get("kvferry") or {}) | changes}


def without(params: Params, *names: str) -> Params:
    return {name: value for name, value in params.items() if name not in names}


def higher(blocks: list, by: int) -> list:
    return [higher(block, by) if isinstance(block, list) else block + by for block in blocks]


# Each makes parameters that are wrong in one way out of good ones.
DAMAGES: dict[str, Callable[[Params], Params]] = {
    "types": lambda good: change(good, remote_block_ids="1, 2, 3", remote_port="high", remote_host=17, tp_size=[1]),
    "other-request": lambda good: change(good, remote_request_id="cmpl-never-was-0"),
    "block-ids-out-of-range": lambda good: change(good, remote_block_ids=higher(good["remote_block_ids"], 1_000_000)),
    "other-address": lambda good: change(good, remote_host="127.0.0.1", remote_port=free_port()),
    "unresolvable-host": lambda good: change(good, remote_host="no-such-host.invalid"),
    "other-epoch": lambda good: own(good, epoch=2**40),
    "other-instance": lambda good: own(good, instance="0123456789abcdef" * 2),
    "huge-lists": lambda good: change(good, remote_block_ids=[list(range(200_000))], tp_size=4096),
    "no-kvferry-part": lambda good: without(good, "kvferry"),
    "other-engine-id": lambda good: change(good, remote_engine_id="engine-of-somebody-else"),
    "negative": lambda good: change(good, remote_block_ids=higher(good["remote_block_ids"], -1000), remote_port=-1),
    "more-tokens-than-blocks": lambda good: change(good, remote_num_tokens=10**9),
    "nested": lambda good: change(good, remote_block_ids=deep(40), kvferry={"version": {"version": deep(40)}}),
    "nothing-but-the-flag": lambda good: {"do_remote_prefill": True},
    "both-flags": lambda good: change(good, do_remote_decode=True),
}


def register(name: str, damage: Callable[[Params], Params]) -> None:
    @scenario(f"damaged-{name}", MAIN, lengths=[100, 320])
    async def one(pair: Pair, prompts: list[Prompt]) -> str:
        good = await pair.prefilled(prompts[0])
        damaged = damage(copy.deepcopy(good))
        outcome = await pair.right_or_refused(prompts[0], damaged, limit=LOST_PEER_LIMIT + COMPUTE_MARGIN)
        # What the damage left held is still there for somebody who has the good ones.
        again = await pair.right_or_refused(prompts[0], good)
        await pair.right_at_once(prompts[1])
        return f"{outcome}; then with the good ones: {again}"


for name, damage in DAMAGES.items():
    register(name, damage)
