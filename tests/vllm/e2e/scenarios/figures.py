"""What is measured and shown, and not required: times, and what the plugin's threads take."""

from __future__ import annotations

import asyncio
import statistics

from ..errors import Failed, Skipped
from ..pair import Pair
from ..reference import Prompt
from ..suite import figure, scenario
from ..threads import ThreadTimes
from .setups import MAIN, NIXL

MEASURED = 20
IDLE = 10.0


@scenario("figures", MAIN, NIXL, lengths=[1500] * MEASURED, limit=300)
async def figures(pair: Pair, prompts: list[Prompt]) -> str:
    try:
        return await measured(pair, prompts)
    except Failed as error:
        # It is here to compare with: what it does wrong is no failure of ours.
        if pair.connector.name == "nixl":
            raise Skipped(f"NixlConnector could not be measured: {error}") from error
        raise


async def measured(pair: Pair, prompts: list[Prompt]) -> str:
    name = pair.connector.name
    local = []
    for prompt in prompts[:5]:
        # Nothing of it is cached on the prefill server either, so that its time is that of a local prefill.
        answer = await pair.client.complete(pair.prefill, pair.reference.tokens(prompt), max_tokens=2, stream=True)
        local.append(answer.first)
    before = await pair.metrics()
    busy = ThreadTimes(pair.servers)
    first = [(await pair.transferred(prompt, stream=True)).first for prompt in prompts]
    shares = busy.shares()
    after = await pair.metrics()
    median = statistics.median(first)
    figure(
        f"{name}: time to first token of the decode leg, {MEASURED} prompts of 1500 tokens: median {median:.3f} s "
        f"({min(first):.3f} to {max(first):.3f}); local prefill: median {statistics.median(local):.3f} s"
    )
    figure(f"{name}: threads while that ran: {shares}")
    for metric, what in (
        ("kvferry_handshake_microseconds", "handshake with a producer"),
        ("kvferry_confirmation_microseconds", "last byte to confirmed release"),
        ("kvferry_freeing_microseconds", "end of a lease to free blocks"),
        ("vllm:nixl_xfer_time_seconds", "read"),
    ):
        for side, old, new in zip(("prefill", "decode"), before, after):
            if (mean := new.mean(metric, old)) is not None:
                unit = "us" if metric.endswith("microseconds") else "s"
                bound = new.quantile(metric, 0.5, old)
                figure(f"{name}: {what} ({side}): mean {mean:.6g} {unit}, half of them within {bound:g} {unit}")
    reading, moved = (
        after[1].total(metric) - before[1].total(metric)
        for metric in ("kvferry_reading_microseconds_total", "kvferry_read_bytes_total")
    )
    if reading:
        figure(f"{name}: {moved / 1e6:.1f} MB read in {reading / 1e3:.1f} ms: {moved / reading / 1e3:.2f} GB/s")
    lanes = {
        sample.labels.get("lane", ""): sample.value
        for sample in after[1].samples.get("kvferry_lane_bytes_total", [])
        if sample.value
    }
    if lanes:
        figure(f"{name}: bytes by lane: {', '.join(f'{lane} {value:.0f}' for lane, value in lanes.items())}")
    quiet = ThreadTimes(pair.servers)
    await asyncio.sleep(IDLE)
    figure(f"{name}: threads while nothing runs: {quiet.shares()}")
    return f"median time to first token {median:.3f} s"
