"""Clients that go away while the decode leg is under way: the producer's blocks are free at once, by notification."""

from __future__ import annotations

import asyncio
import contextlib

from ..client import Answer, RawRequest, body
from ..errors import Failed, together
from ..pair import Pair
from ..reference import Prompt
from ..settings import FREED_LIMIT, GENERATED
from ..suite import scenario
from .setups import MAIN

# So many that no client has its answer before it goes.
TOKENS = 400


async def abandon(pair: Pair, prompt: Prompt, params: dict, delay: float) -> None:
    """Sends a decode leg and breaks the connection `delay` seconds later."""
    sent = body(pair.reference.tokens(prompt), params=params, max_tokens=TOKENS, stream=True)
    request = RawRequest(pair.decode, sent)
    try:
        await request.send()
        await asyncio.sleep(delay)
    finally:
        await request.abort()
    tokens = request.tokens()[:GENERATED]
    if tokens and (difference := pair.reference.difference(prompt, Answer(tokens=tokens))):
        raise Failed(f"WRONG TOKENS before the abort: {difference}")


async def aborted(pair: Pair, prompts: list[Prompt], delays: list[float]) -> str:
    """Abandons requests, and requires all blocks back within the limit, except those of requests that the decode
    engine has never heard of."""
    offers = [await pair.prefilled(prompt) for prompt in prompts]
    before = await pair.metrics()
    await together(abandon(pair, *each) for each in zip(prompts, offers, delays))
    unseen = ""
    try:
        took = await pair.freed(FREED_LIMIT)
    except Failed:
        after = await pair.metrics()
        seen = [pair.connector.seen(scraped[1]) for scraped in (before, after)]
        if None in seen or seen[1] - seen[0] >= len(prompts):
            raise
        unseen = f"{len(prompts) - (seen[1] - seen[0]):.0f} went before the engine heard of them; "
        # As a client that tries again: whoever is still offered something takes it.
        for prompt, params in zip(prompts, offers):
            pair.check(prompt, await pair.decoded(prompt, params))
        took = await pair.freed(FREED_LIMIT)
    expired = [pair.connector.expired(scraped[0]) for scraped in (before, await pair.metrics())]
    if expired[0] != expired[1]:
        raise Failed(f"{expired[1] - expired[0]:.0f} leases expired")
    return f"{unseen}free after {took:.2f} s"


def register(delay_ms: int) -> None:
    @scenario(f"abort-after-{delay_ms}-ms", MAIN, lengths=[1500])
    async def one(pair: Pair, prompts: list[Prompt]) -> str:
        return await aborted(pair, prompts, [delay_ms / 1000])


for delay_ms in (0, 20, 100, 500, 1500):
    register(delay_ms)


@scenario("abort-burst-of-8", MAIN, lengths=[1500, 1504] * 4)
async def burst(pair: Pair, prompts: list[Prompt]) -> str:
    return await aborted(pair, prompts, [0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8])


@scenario("abort-prefill-leg", MAIN, lengths=[5, 320])
async def abort_prefill(pair: Pair, prompts: list[Prompt]) -> str:
    """Somebody who leaves during the first leg holds nothing. (Who leaves after its end holds blocks until the lease
    ends: nobody but he knew of it.)"""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    # Long enough to be seen while it runs.
    sent = body(pair.reference.tokens(prompts[0]), params=params, max_tokens=2000)
    request = RawRequest(pair.prefill, sent)
    try:
        await request.send()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while not (await pair.metrics())[0].total("vllm:num_requests_running"):
                    await asyncio.sleep(0.01)
    finally:
        await request.abort()
    took = await pair.freed(FREED_LIMIT)
    await pair.right_at_once(prompts[1])
    return f"free after {took:.2f} s"
