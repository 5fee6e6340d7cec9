"""Requests that never reach the decode side, or do so when their lease has ended; and vLLM's default failure
policy, which answers a failed load with an error."""

from __future__ import annotations

import time

from ..errors import Failed
from ..pair import Pair
from ..reference import Prompt
from ..settings import SCRAPE_MARGIN, SHORT_LEASE
from ..suite import scenario
from .setups import SHORT


async def expire(pair: Pair, prompts: list[Prompt]) -> tuple[list[dict], float]:
    """Prefills prompts and waits until their leases have ended; how long that took from the last one on."""
    offers = []
    for prompt in prompts:
        sent = time.monotonic()
        offers.append(await pair.prefilled(prompt))
    took = await pair.freed(SHORT_LEASE + SCRAPE_MARGIN)
    if (held := time.monotonic() - sent) < SHORT_LEASE:
        raise Failed(f"free {held:.1f} s after the last prompt was sent, with a lease of {SHORT_LEASE:.0f} s")
    return offers, took


@scenario("never-decoded", SHORT, lengths=[320, 1500])
async def never(pair: Pair, prompts: list[Prompt]) -> str:
    before = pair.connector.expired((await pair.metrics())[0])
    _, took = await expire(pair, prompts)
    ended = pair.connector.expired((await pair.metrics())[0]) - before
    if ended != len(prompts):
        raise Failed(f"{ended:.0f} leases expired instead of {len(prompts)}")
    return f"free after {took:.1f} s"


@scenario("after-its-lease", SHORT, lengths=[320, 1500, 320, 100])
async def late(pair: Pair, prompts: list[Prompt]) -> str:
    """The parameters come when other prompts are in the blocks."""
    # A first request, so that both servers know each other.
    await pair.transferred(prompts[3])
    offers, _ = await expire(pair, prompts[:2])
    await pair.overwrite(pair.prefill)
    outcomes = [await pair.right_or_refused(prompt, params) for prompt, params in zip(prompts, offers)]
    await pair.freed(SHORT_LEASE + SCRAPE_MARGIN)
    await pair.right_at_once(prompts[2])
    return ", ".join(outcomes)


# The last here of this setup: from now on there is another decode server.
@scenario("default-policy", SHORT, lengths=[320, 1500, 320, 100], limit=300)
async def default_policy(pair: Pair, prompts: list[Prompt]) -> str:
    """vLLM's default answers a failed load with HTTP 500."""
    await pair.restart_decode(policy=None)
    return await late(pair, prompts)
