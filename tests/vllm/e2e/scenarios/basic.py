"""Requests that nobody disturbs: lengths around the block size, many at once, the same prompt again."""

from __future__ import annotations

import shutil

from ..errors import Failed, Refused, together
from ..pair import Pair
from ..reference import Prompt
from ..settings import SCRAPE_MARGIN
from ..suite import scenario
from .setups import LIBUCX, MAIN, MULTI, SLIDING, TCP, TP2

LENGTHS = (1, 5, 31, 32, 33, 64, 100, 320, 1500, 1504)
# The token that is computed last looks back by a window of 96 to the last token of a block that is dropped.
AT_THE_WINDOW = (95, 96, 97, 127, 128, 159, 255)
EXTERNAL_TOKENS = "vllm:external_prefix_cache_hits_total"


async def length(pair: Pair, prompts: list[Prompt]) -> str:
    answer = await pair.transferred(prompts[0])
    return f"decode leg {answer.total:.2f} s"


for tokens in LENGTHS:
    scenario(f"length-{tokens}", MAIN, lengths=[tokens])(length)


@scenario("windows", SLIDING, lengths=AT_THE_WINDOW, limit=300)
async def windows(pair: Pair, prompts: list[Prompt]) -> str:
    """vLLM computes the last token of a loaded prompt again; where a block that it looks back at is dropped by then,
    nothing may be loaded."""
    before = (await pair.metrics())[1].total(EXTERNAL_TOKENS)
    for prompt in prompts:
        await pair.transferred(prompt)
    fetched = (await pair.metrics())[1].total(EXTERNAL_TOKENS) - before
    return f"{fetched:.0f} of {sum(prompt.length for prompt in prompts)} tokens fetched"


@scenario("lengths", TCP, LIBUCX, MULTI, SLIDING, TP2, lengths=LENGTHS, limit=300)
async def lengths(pair: Pair, prompts: list[Prompt]) -> str | None:
    await come_as_transfers(pair, prompts)


async def come_as_transfers(pair: Pair, prompts: list[Prompt]) -> None:
    """Each prompt once; the decode engine counted all their tokens as fetched (one-token prompts are its own)."""
    before = (await pair.metrics())[1].total(EXTERNAL_TOKENS)
    for prompt in prompts:
        await pair.transferred(prompt)
    fetched = (await pair.metrics())[1].total(EXTERNAL_TOKENS) - before
    # Below a threshold of two tokens nothing is fetched.
    wanted = sum(prompt.length for prompt in prompts if prompt.length > 1)
    if fetched < wanted:
        raise Failed(f"{fetched:.0f} tokens were fetched instead of {wanted}")


@scenario("verified", LIBUCX, TP2, lengths=[100, 320])
async def verified(pair: Pair, prompts: list[Prompt]) -> str:
    """Every load that counts was compared, and no block differed."""
    for prompt in prompts:
        await pair.transferred(prompt)
    await pair.freed(SCRAPE_MARGIN)
    producer, consumer = await pair.metrics()
    # A rank compares before it reports; one whose load failed for another reason may not have come to that.
    compared = consumer.total("kvferry_verifying_microseconds_count")
    loaded = consumer.total("kvferry_rank_loads_total", result="loaded")
    blocks, differed = (consumer.total(f"kvferry_{what}_blocks_total") for what in ("verified", "corrupt"))
    told = producer.total("kvferry_checksums_sent_total")
    shown = f"{compared:.0f} comparisons for {loaded:.0f} loads of a rank, {blocks:.0f} blocks, {differed:.0f} differed"
    if not compared >= loaded > 0 or differed or not (blocks and told):
        raise Failed(f"{shown}; checksums of {told:.0f} were sent")
    return shown


@scenario("concurrent-32", MAIN, TCP, MULTI, SLIDING, TP2, lengths=[33, 100, 320, 700] * 8, limit=300)
async def concurrent(pair: Pair, prompts: list[Prompt]) -> str:
    answers = await together(pair.transferred(prompt) for prompt in prompts)
    return f"the slowest decode leg {max(answer.total for answer in answers):.2f} s"


async def twice(pair: Pair, prompt: Prompt, wanted: tuple[int, int]) -> str:
    """The same prompt twice, with the decode engine's prefix cache: what it fetched, and what was released."""
    counts = []
    for _ in range(2):
        before = await pair.metrics()
        await pair.transferred(prompt)
        await pair.freed(SCRAPE_MARGIN)
        after = await pair.metrics()
        released = [scraped[0].total("kvferry_lease_parts_total", end="released") for scraped in (before, after)]
        if pair.connector.name == "kvferry" and released[1] - released[0] != 1:
            raise Failed(f"{released[1] - released[0]:.0f} releases instead of 1")
        counts.append(after[1].total(EXTERNAL_TOKENS) - before[1].total(EXTERNAL_TOKENS))
    shown = f"fetched {counts[0]:.0f}, then {counts[1]:.0f} tokens"
    if tuple(counts) not in {wanted, (wanted[0], 0) if wanted[1] == 1 else wanted}:
        raise Failed(shown)
    return shown


@scenario("same-prompt-twice-320", MAIN, lengths=[320])
async def twice_320(pair: Pair, prompts: list[Prompt]) -> str:
    return await twice(pair, prompts[0], (320, 32))


@scenario("same-prompt-twice-321", MAIN, lengths=[321])
async def twice_321(pair: Pair, prompts: list[Prompt]) -> str:
    # One token is below the threshold: fetched or computed, both are right.
    return await twice(pair, prompts[0], (321, 1))


@scenario("other-blocks", MAIN, TCP, LIBUCX, SLIDING, lengths=[320, 320])
async def other_blocks(pair: Pair, prompts: list[Prompt]) -> str:
    """A control: with another request's block ids, and only those, the answer is another one, or there is none.
    If it were right, no bytes would have moved and the other scenarios would prove nothing."""
    mine, others = [await pair.prefilled(prompt) for prompt in prompts]
    if mine["remote_block_ids"] == others["remote_block_ids"]:
        raise Failed(f"two requests hold the same blocks {mine['remote_block_ids']}")
    try:
        answer = await pair.decoded(prompts[0], mine | {"remote_block_ids": others["remote_block_ids"]})
    except Refused as error:
        outcome = f"refused: {error}"
    else:
        if not pair.reference.difference(prompts[0], answer):
            figures = (await pair.metrics())[1]
            raise Failed(
                "the right answer came from blocks that are not its own: computed again or never read? loads failed: "
                f"{figures.total('kvferry_loads_failed_total'):.0f}"
            )
        outcome = "other tokens, so bytes are moved"
    answer = await pair.decoded(prompts[1], others)
    pair.check(prompts[1], answer)
    return outcome


@scenario(
    "from-the-store",
    MULTI,
    lengths=[320],
    only_kvferry="there is no store to combine it with",
)
async def from_the_store(pair: Pair, prompts: list[Prompt]) -> str:
    """What the prefill server has saved, a decode server loads for a request that no router prefilled."""
    params = await pair.prefilled(prompts[0])
    pair.check(prompts[0], await pair.decoded(prompts[0], params))
    await pair.stop()
    await pair.start()
    before = (await pair.metrics())[1].total(EXTERNAL_TOKENS)
    answer = await pair.decoded(prompts[0], None)
    pair.check(prompts[0], answer)
    fetched = (await pair.metrics())[1].total(EXTERNAL_TOKENS) - before
    shutil.rmtree(pair.storage, ignore_errors=True)
    if not fetched:
        raise Failed("nothing was loaded from the store")
    return f"{fetched:.0f} tokens after a restart of both servers"
