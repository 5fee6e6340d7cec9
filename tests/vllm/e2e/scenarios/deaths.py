"""A server that is killed and comes back, with requests before, during and after."""

from __future__ import annotations

import asyncio
import time

from ..errors import Failed, RequestError, together
from ..pair import Pair
from ..reference import Prompt
from ..settings import COMPUTE_MARGIN, GENERATED, LEASE, LOST_PEER_LIMIT, POLL, SCRAPE_MARGIN
from ..suite import scenario
from .setups import MAIN

LOST_LIMIT = LOST_PEER_LIMIT + COMPUTE_MARGIN


async def under_way(pair: Pair) -> None:
    """Waits until the decode server generates."""
    deadline = time.monotonic() + LOST_LIMIT
    while not (await pair.client.metrics(pair.decode)).total("vllm:num_requests_running"):
        if time.monotonic() > deadline:
            raise Failed("the decode server does not begin with what it was sent")
        await asyncio.sleep(POLL)


async def outcome(pair: Pair, prompt: Prompt, params: dict | None, *, delay: float = 0, endless: bool = False) -> str:
    """A leg whose server or peer may die meanwhile: right, refused, or the connection broke; soon."""
    await asyncio.sleep(delay)
    started = time.monotonic()
    try:
        answer = await pair.decoded(prompt, params, limit=LOST_LIMIT, max_tokens=400 if endless else GENERATED)
    except RequestError as error:
        kind = type(error).__name__
        if kind == "TooLate":
            raise Failed(f"{prompt.key}: {error}") from error
        return f"{kind} after {time.monotonic() - started:.1f} s"
    if endless:
        raise Failed(f"{prompt.key} ended before its server")
    pair.check(prompt, answer)
    return f"right after {answer.total:.1f} s"


@scenario("decode-killed", MAIN, lengths=[1500] * 6 + [320] * 3, limit=300)
async def decode_killed(pair: Pair, prompts: list[Prompt]) -> str:
    before, during, stale, after = prompts[0], prompts[1:5], prompts[5], prompts[6:]
    await pair.transferred(before)
    offers = [await pair.prefilled(prompt) for prompt in during]
    left_over = await pair.prefilled(stale)

    async def kill() -> float:
        await under_way(pair)
        await pair.decode.kill()
        return time.monotonic()

    legs = (outcome(pair, prompt, params, endless=True) for prompt, params in zip(during, offers))
    died, *outcomes = await together([kill(), *legs])
    # The prefill server works on meanwhile; what it held for the dead is free when the leases are over.
    await pair.prefilled(after[0])
    await pair.start()
    back = time.monotonic() - died
    # A router that has kept parameters since before the death, when the lease is over and others use the blocks.
    await pair.freed(LEASE + SCRAPE_MARGIN)
    await pair.overwrite(pair.prefill)
    kept = await pair.right_or_refused(stale, left_over, limit=LOST_LIMIT)
    for prompt in after[1:]:
        await pair.right_at_once(prompt)
    return f"during: {', '.join(outcomes)}; back after {back:.0f} s; with parameters from before: {kept}"


@scenario("prefill-killed", MAIN, lengths=[1500] * 8 + [320] * 3, limit=300)
async def prefill_killed(pair: Pair, prompts: list[Prompt]) -> str:
    before, loading, stale, after = prompts[0], prompts[1:5], prompts[5:8], prompts[8:]
    await pair.transferred(before)
    offers = [await pair.prefilled(prompt) for prompt in (*loading, *stale)]

    async def kill() -> None:
        await asyncio.sleep(0.05)
        await pair.prefill.kill()

    # Some are sent before, some after: their loads meet the death at different places.
    legs = (
        outcome(pair, prompt, params, delay=place * 0.02) for place, (prompt, params) in enumerate(zip(loading, offers))
    )
    _, *outcomes = await together([kill(), *legs])
    # Its parameters are still on their way to the decode server.
    dead = [await outcome(pair, stale[0], offers[4]), await outcome(pair, stale[1], offers[5])]
    # Without any, the decode server serves alone.
    alone = await pair.decoded(after[0], None)
    pair.check(after[0], alone)
    await pair.start()
    # The other life of the prefill server listens where the first one did, and has other bytes in those blocks.
    await pair.overwrite(pair.prefill)
    kept = await outcome(pair, stale[2], offers[6])
    for prompt in after[1:]:
        await pair.right_at_once(prompt)
    return f"during: {', '.join(outcomes)}; while it is dead: {', '.join(dead)}; its next life: {kept}"
