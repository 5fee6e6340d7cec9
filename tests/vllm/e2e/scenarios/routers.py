"""Requests through routers: ours, vLLM's own, and one that passes on only the keys it knows."""

from __future__ import annotations

import copy
import time
import uuid

from ..client import PREFILL_PARAMS, Answer, RawRequest, body
from ..errors import Failed, RequestError, together
from ..pair import Pair
from ..reference import Prompt
from ..router import Router, changing_prefill, example_router
from ..servers import free_port
from ..settings import COMPUTE_MARGIN, LOST_PEER_LIMIT, REQUEST_LIMIT, SCRAPE_MARGIN, SHORT_LEASE
from ..suite import scenario
from .basic import EXTERNAL_TOKENS
from .deaths import under_way
from .setups import MAIN, SHORT

# What vLLM's own parameters consist of; a router with types has these and no others.
NIXL_KEYS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
)
# Of the line that says why parameters are not used; at most one in so many seconds.
UNLEASED = "no kvferry part in them"
LINE_EVERY = 10.0


async def fetched(pair: Pair) -> float:
    """Tokens that the decode engine has taken from elsewhere, so far."""
    return (await pair.metrics())[1].total(EXTERNAL_TOKENS)


async def routed(pair: Pair, router: Router, prompt: Prompt, *, limit: float = REQUEST_LIMIT, **options) -> Answer:
    """A request through a router, with the right answer."""
    try:
        sent = body(pair.reference.tokens(prompt), **options)
        answer = await pair.client.post(f"{router.url}/v1/completions", sent, limit=limit)
    except RequestError as error:
        raise Failed(f"{prompt.key} through the router: {error}") from error
    pair.check(prompt, answer)
    return answer


@scenario("example-router", MAIN, lengths=[33, 320, 1500, 1504, 100, 320, 700, 1500])
async def example(pair: Pair, prompts: list[Prompt]) -> str:
    """Through examples/pd_proxy.py: whole answers, streams, several at a time, and a client that leaves."""
    before = await fetched(pair)
    abandoned = prompts[3]
    async with example_router(pair) as router:
        await routed(pair, router, prompts[0])
        streamed = await routed(pair, router, prompts[2], stream=True)
        await together(routed(pair, router, prompt, stream=True) for prompt in (prompts[1], *prompts[4:]))
        come = sum(prompt.length for prompt in prompts if prompt is not abandoned)
        if (tokens := await fetched(pair) - before) < come:
            raise Failed(f"{tokens:.0f} tokens were fetched instead of {come}")
        request = RawRequest(router, body(pair.reference.tokens(abandoned), max_tokens=400, stream=True))
        try:
            await request.send()
            await under_way(pair)
        finally:
            await request.abort()
        # The decode engine has seen the abort: neither side holds anything.
        took = await pair.freed(SCRAPE_MARGIN)
        await router.requires()
    return f"first token of 1500 after {streamed.first:.2f} s, both legs; free {took:.2f} s after an abort"


@scenario("example-router-without-prefill", MAIN, lengths=[320] * 5, limit=300)
async def without_prefill(pair: Pair, prompts: list[Prompt]) -> str:
    """The prefill server is killed: the router has the decode server compute, and returns to both legs after."""
    async with example_router(pair) as router:
        await routed(pair, router, prompts[0])
        await pair.prefill.kill()
        limit = LOST_PEER_LIMIT + COMPUTE_MARGIN
        answers = [await routed(pair, router, prompt, limit=limit) for prompt in prompts[1:3]]
        await router.requires(prefill_unreachable=2)
        # It takes longer to start than the router leaves it out.
        await pair.start()
        before = await fetched(pair)
        for prompt in prompts[3:]:
            await routed(pair, router, prompt, limit=limit)
        if (tokens := await fetched(pair) - before) < 640:
            raise Failed(f"{tokens:.0f} tokens were fetched instead of 640 when the prefill server was back")
        await router.requires(prefill_unreachable=2)
    return f"alone: {', '.join(f'{answer.total:.2f} s' for answer in answers)}"


@scenario(
    "example-router-failed-load",
    SHORT,
    lengths=[320, 1500, 100],
    only_kvferry="its failures are other ones",
    limit=300,
)
async def failed_load(pair: Pair, prompts: list[Prompt]) -> str:
    """vLLM's default policy answers a failed load with HTTP 500, or an error in the stream: the router has the prompt
    computed. The load fails because the parameters name an engine at a port where nobody listens."""
    if pair.decode.name != "short-kvferry-decode-default":
        await pair.restart_decode(policy=None)

    def elsewhere(params: dict) -> dict:
        return params | {"remote_port": free_port(), "remote_engine_id": "engine-that-never-was"}

    async with changing_prefill(pair, elsewhere) as prefill, example_router(pair, prefill) as router:
        limit = LOST_PEER_LIMIT + COMPUTE_MARGIN
        answers = [await routed(pair, router, prompts[0], limit=limit)]
        answers.append(await routed(pair, router, prompts[1], limit=limit, stream=True))
        await router.requires(decode_failed=2)
    await pair.freed(SHORT_LEASE + SCRAPE_MARGIN)
    await pair.right_at_once(prompts[2])
    return f"right after {', '.join(f'{answer.total:.2f} s' for answer in answers)}"


@scenario("toy-proxy", MAIN, lengths=[33, 320, 1500])
async def toy(pair: Pair, prompts: list[Prompt]) -> None:
    """vLLM's tests/v1/kv_connector/nixl_integration/toy_proxy_server.py, whose source is not in the wheel, imitated as
    it sends: the first leg is the client's body with the six parameters, `stream` off, one token, no `stream_options`
    and no `min_tokens`; the second one is the client's body with the whole `kv_transfer_params` of the first answer.
    Both have the same X-Request-Id and the Authorization header of an unset OPENAI_API_KEY."""
    before = await fetched(pair)
    for prompt, stream in zip(prompts, (False, True, True), strict=True):
        headers = {"Authorization": "Bearer None", "X-Request-Id": str(uuid.uuid4())}
        sent = body(pair.reference.tokens(prompt), stream=stream) | {"min_tokens": 4}
        if stream:
            sent["stream_options"] = {"include_usage": True}
        first = {name: value for name, value in sent.items() if name not in ("stream_options", "min_tokens")}
        first |= {"kv_transfer_params": copy.deepcopy(PREFILL_PARAMS), "stream": False, "max_tokens": 1}
        try:
            answer = await pair.client.post(f"{pair.prefill.url}/v1/completions", first, headers=headers)
            if not answer.params:
                raise Failed(f"the prefill leg of {prompt.key} brought no kv_transfer_params")
            second = sent | {"kv_transfer_params": answer.params}
            answer = await pair.client.post(f"{pair.decode.url}/v1/completions", second, headers=headers)
        except RequestError as error:
            raise Failed(f"{prompt.key}: {error}") from error
        pair.check(prompt, answer)
    come = sum(prompt.length for prompt in prompts)
    if (tokens := await fetched(pair) - before) < come:
        raise Failed(f"{tokens:.0f} tokens were fetched instead of {come}")


@scenario("typed-router", SHORT, lengths=[33, 320, 1500], only_kvferry="it has no keys of its own", limit=120)
async def typed(pair: Pair, prompts: list[Prompt]) -> str:
    """A router that passes on NixlConnector's keys only: the decode side computes, and its log says why."""
    log = pair.decode.log
    already = len(log.read_text(errors="replace"))
    before = (await pair.metrics())[1]

    def lines() -> int:
        return log.read_text(errors="replace")[already:].count(UNLEASED)

    started = time.monotonic()
    asked = 0
    # A line of before may hold the first ones back.
    while asked < len(prompts) or not lines():
        if time.monotonic() > started + LINE_EVERY + REQUEST_LIMIT:
            raise Failed(f"{asked} requests, and {log} does not say {UNLEASED!r}")
        prompt = prompts[asked % len(prompts)]
        params = await pair.prefilled(prompt)
        kept = {name: value for name, value in params.items() if name in NIXL_KEYS}
        if kept == params:
            raise Failed("the prefill server's parameters have no key of kvferry's")
        pair.check(prompt, await pair.decoded(prompt, kept))
        asked += 1
    after = (await pair.metrics())[1]
    passed = time.monotonic() - started
    if (said := lines()) > 1 + passed / LINE_EVERY:
        raise Failed(f"said {said} times in {passed:.0f} s")
    counted = after.total("kvferry_params_unused_total", reason="unleased")
    counted -= before.total("kvferry_params_unused_total", reason="unleased")
    if counted != asked:
        raise Failed(f"{counted:.0f} of {asked} were counted")
    if tokens := after.total(EXTERNAL_TOKENS) - before.total(EXTERNAL_TOKENS):
        raise Failed(f"{tokens:.0f} tokens were fetched")
    # Nobody has told the prefill server: the leases end by themselves.
    await pair.freed(SHORT_LEASE + SCRAPE_MARGIN)
    return f"{asked} requests, said {said} times"
