"""The example router against servers that do as they are told: what they are sent, and what the client gets."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="the example router needs aiohttp")

import pd_proxy  # noqa: E402
from aiohttp import web  # noqa: E402

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]

LIMIT = 60.0
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 1, 4]],
    "remote_engine_id": "p",
    "kvferry": {"version": 1, "instance": "00" * 16, "unknown": {"deep": [None, 1.5, "é"]}},
}
HELD = {"choices": [{"text": "x"}], "kv_transfer_params": PARAMS}
EVENTS = [f'data: {{"choices": [{{"text": "{n}"}}]}}\n\n'.encode() for n in range(20)] + [b"data: [DONE]\n\n"]
DONE = {"choices": [{"text": "right"}]}
ASKED = {"model": "m", "prompt": "p", "max_tokens": 9}


def says(body: Any, status: int = 200) -> Reply:
    async def reply(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return reply


def streams(chunks: list[bytes], cut: bool = False) -> Reply:
    async def reply(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await out.prepare(request)
        for chunk in chunks:
            await out.write(chunk)
            # Turns of the loop in which it can arrive alone.
            for _ in range(10):
                await asyncio.sleep(0)
        if cut:
            assert request.transport is not None
            request.transport.close()
        return out

    return reply


class Fake:
    """A server with its replies, one per request; the last one is repeated."""

    def __init__(self, *replies: Reply, health: Reply | None = None, models: Reply | None = None) -> None:
        self.replies = list(replies)
        self.health, self.models = health or says({}), models or says({})
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.seen = asyncio.Event()
        self.left = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.ids.append(request.headers["X-Request-Id"])
        self.seen.set()
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        try:
            return await reply(request)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/{any:.*}", self.answer)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        self.runner, self.url = await listen(app)
        return self.url

    async def stop(self) -> None:
        await self.runner.cleanup()


async def listen(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(LIMIT)
    raise AssertionError("nobody closed the connection")


class Client:
    def __init__(self, url: str, session: Any) -> None:
        self.url, self.session = url, session

    def post(self, body: Any = ASKED, path: str = "/v1/completions", **more: Any) -> Any:
        return self.session.post(self.url + path, json=body, **more)

    async def whole(self, *arguments: Any, **more: Any) -> tuple[int, Any]:
        async with self.post(*arguments, **more) as answer:
            return answer.status, await answer.json()

    async def health(self) -> tuple[int, Any]:
        async with self.session.get(f"{self.url}/health") as answer:
            return answer.status, await answer.json()

    async def alone(self) -> dict[str, int]:
        """How many requests a decode server computed alone, by reason."""
        _, found = await self.health()
        counts = {name: count for name, count in found["counts"].items() if name.startswith("computed_by_decode_")}
        assert sum(counts.values()) == found["counts"]["computed_by_decode"]
        return {name.removeprefix("computed_by_decode_"): count for name, count in counts.items()}


@asynccontextmanager
async def routed(prefill: list[Fake | str], decode: list[Fake | str], **options: float) -> AsyncIterator[Client]:
    """A router before these servers; a text is an address where nobody listens."""
    fakes = [it for it in prefill + decode if isinstance(it, Fake)]
    urls = {id(it): await it.start() for it in fakes}
    addresses = [[it if isinstance(it, str) else urls[id(it)] for it in fleet] for fleet in (prefill, decode)]
    app = pd_proxy.application(pd_proxy.Options(*addresses, **{"pause": 600.0, "connect_timeout": LIMIT, **options}))
    runner, url = await listen(app)
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(url, session)
    finally:
        await runner.cleanup()
        for fake in fakes:
            await fake.stop()


# The discard port of the loopback: nobody listens.
NOBODY = "http://127.0.0.1:9"


def runs(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A coroutine as a test."""

    def run() -> None:
        async def limited() -> None:
            await asyncio.wait_for(test(), LIMIT)

        asyncio.run(limited())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@runs
async def test_both_legs_are_what_vllm_wants_and_parameters_pass_untouched() -> None:
    prefill, decode = Fake(says(HELD)), Fake(says(DONE))
    async with routed([prefill], [decode]) as client:
        async with client.post(headers={"X-Request-Id": "mine"}) as answer:
            assert (answer.status, await answer.json()) == (200, DONE)
            assert answer.headers["X-Request-Id"] == "mine"
        hold = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        first = {"model": "m", "prompt": "p", "max_tokens": 1, "stream": False, "kv_transfer_params": hold}
        assert prefill.bodies == [first]
        assert decode.bodies == [{**ASKED, "kv_transfer_params": PARAMS}]
        assert prefill.ids == decode.ids == ["mine"]
        assert await client.alone() == {}


@runs
async def test_a_chat_keeps_its_wishes_for_the_decode_leg_only() -> None:
    prefill, decode = Fake(says(HELD)), Fake(streams(EVENTS))
    asked = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 50,
        "min_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "a client's own"},
    }
    async with routed([prefill], [decode]) as client:
        async with client.post(asked, "/v1/chat/completions") as answer:
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert await answer.read() == b"".join(EVENTS)
            name = answer.headers["X-Request-Id"]
    sent = prefill.bodies[0]
    assert (sent["max_tokens"], sent["max_completion_tokens"], sent["stream"]) == (1, 1, False)
    assert not {"min_tokens", "stream_options"} & sent.keys()
    assert sent["kv_transfer_params"] == pd_proxy.HOLD
    assert decode.bodies == [{**asked, "kv_transfer_params": PARAMS}]
    assert prefill.ids == decode.ids == [name]


@runs
async def test_a_stream_is_passed_on_as_it_comes() -> None:
    has_first = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(EVENTS[0])
        # Not before the client has the first event.
        await has_first.wait()
        for event in EVENTS[1:]:
            await out.write(event)
        return out

    async with routed([Fake(says(HELD))], [Fake(slow)]) as client:
        async with client.post({**ASKED, "stream": True}) as answer:
            received = await answer.content.readexactly(len(EVENTS[0]))
            has_first.set()
            assert received + await answer.read() == b"".join(EVENTS)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (says({"error": "broken"}, status=500), "prefill_failed"),
        (says({"choices": []}), "no_parameters"),
        (says({"choices": [], "kv_transfer_params": None}), "no_parameters"),
        (says([1, 2]), "no_parameters"),
        (never, "prefill_unreachable"),
        (None, "prefill_unreachable"),
    ],
)
def test_without_a_first_leg_a_decode_server_computes_all(reply: Reply | None, reason: str) -> None:
    @runs
    async def test() -> None:
        decode = Fake(says(DONE))
        limit = 0.5 if reply is never else LIMIT
        async with routed([Fake(reply) if reply else NOBODY], [decode], prefill_timeout=limit) as client:
            assert await client.whole({**ASKED, "kv_transfer_params": PARAMS}) == (200, DONE)
            assert decode.bodies == [ASKED]
            assert await client.alone() == {reason: 1}

    test()


@pytest.mark.parametrize("health", [never, says({}, status=503)], ids=["hangs", "is dead"])
def test_a_prefill_leg_to_a_server_that_hangs_is_given_up(health: Reply) -> None:
    """Long before the leg's own limit, which is the test's here."""

    @runs
    async def test() -> None:
        prefill, decode = Fake(never, health=health), Fake(says(DONE))
        options = {"prefill_timeout": 2 * LIMIT, "health_after": 0.5, "connect_timeout": 0.5}
        async with routed([prefill], [decode], **options) as client:
            assert await client.whole() == (200, DONE)
            await prefill.left.wait()
            assert (len(prefill.bodies), decode.bodies) == (1, [ASKED])
            # It is left out from now on.
            assert await client.whole() == (200, DONE)
            assert len(prefill.bodies) == 1
            assert await client.alone() == {"prefill_silent": 1, "prefill_unreachable": 1}

    test()


@runs
async def test_a_server_that_stops_listening_with_a_leg_open_is_given_up() -> None:
    """As vLLM does when it is stopped: the connection stays open, and nobody answers on it."""
    prefill, decode = Fake(never), Fake(says(DONE))
    options = {"prefill_timeout": 2 * LIMIT, "health_after": 0.5, "connect_timeout": 0.5}
    async with routed([prefill], [decode], **options) as client:
        request = asyncio.ensure_future(client.whole())
        await prefill.seen.wait()
        for site in list(prefill.runner.sites):
            await site.stop()
        assert await request == (200, DONE)
        await prefill.left.wait()
        assert await client.alone() == {"prefill_silent": 1}


@runs
async def test_a_long_prefill_is_waited_for_while_the_server_is_well() -> None:
    asked = asyncio.Queue[None]()

    async def health(request: web.Request) -> web.StreamResponse:
        asked.put_nowait(None)
        # One failure more than would end the leg, but never in a row.
        return web.json_response({}, status=503 if asked.qsize() % pd_proxy.HEALTH_TRIES else 200)

    async def slow(request: web.Request) -> web.StreamResponse:
        while asked.qsize() < 2 * pd_proxy.HEALTH_TRIES:
            await asyncio.sleep(0.05)
        return web.json_response(HELD)

    prefill, decode = Fake(slow, health=health), Fake(says(DONE))
    async with routed([prefill], [decode], health_after=0.5) as client:
        assert await client.whole() == (200, DONE)
        assert decode.bodies == [{**ASKED, "kv_transfer_params": PARAMS}]
        assert await client.alone() == {}


ERROR = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'


@pytest.mark.parametrize(
    "failure",
    [
        says({"error": {"message": "a load failed", "code": 500}}, status=500),
        streams([ERROR, b"data: [DONE]\n\n"]),
        streams([ERROR[:9], ERROR[9:30], ERROR[30:]], cut=True),
    ],
    ids=["status", "event", "event in parts"],
)
def test_a_failed_load_is_computed_instead(failure: Reply) -> None:
    @runs
    async def test() -> None:
        prefill, decode = Fake(says(HELD)), Fake(failure, streams(EVENTS))
        asked = {**ASKED, "stream": True}
        async with routed([prefill], [decode]) as client:
            async with client.post(asked) as answer:
                assert (answer.status, await answer.read()) == (200, b"".join(EVENTS))
            assert decode.bodies == [{**asked, "kv_transfer_params": PARAMS}, asked]
            assert len(prefill.bodies) == 1
            assert await client.alone() == {"decode_failed": 1}

    test()


@pytest.mark.parametrize("first", [streams([], cut=True), streams([])], ids=["broken", "empty"])
def test_a_stream_that_ends_before_its_first_byte_is_computed_elsewhere(first: Reply) -> None:
    @runs
    async def test() -> None:
        silent, decode = Fake(first), Fake(streams(EVENTS))
        async with routed([Fake(says(HELD))], [silent, decode]) as client:
            async with client.post({**ASKED, "stream": True}) as answer:
                assert await answer.read() == b"".join(EVENTS)
            assert decode.bodies == [{**ASKED, "stream": True}]
            assert await client.alone() == {"decode_unreachable": 1}

    test()


@runs
async def test_a_second_failure_is_the_clients() -> None:
    """An error that is no load's: the other try has it too, and it is passed on as it is."""
    error = {"error": {"message": "out of order", "code": 500}}
    decode = Fake(says(error, status=500))
    async with routed([Fake(says(HELD))], [decode]) as client:
        assert await client.whole() == (500, error)
        assert len(decode.bodies) == 2
        assert await client.alone() == {"decode_failed": 1}


@runs
async def test_a_wrong_request_is_told_so_and_not_tried_again() -> None:
    error = {"error": {"message": "the prompt is too long", "code": 400}}
    prefill, decode = Fake(says(error, status=400), says(HELD)), Fake(says(error, status=422))
    async with routed([prefill], [decode]) as client:
        assert await client.whole() == (400, error)
        assert decode.bodies == []
        assert await client.whole() == (422, error)
        assert (len(prefill.bodies), len(decode.bodies)) == (2, 1)
    wrong = b'data: {"error": {"message": "no such tool", "code": 400}}\n\n'
    decode = Fake(streams([wrong]))
    async with routed([Fake(says(HELD))], [decode]) as client:
        async with client.post() as answer:
            assert await answer.read() == wrong
        assert len(decode.bodies) == 1
        assert await client.alone() == {}


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff"])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    @runs
    async def test() -> None:
        prefill = Fake(says(HELD))
        async with routed([prefill], [Fake(says(DONE))]) as client:
            async with client.session.post(f"{client.url}/v1/completions", data=body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"], error["type"]) == (400, 400, "pd_proxy")
            assert prefill.bodies == []

    test()


@pytest.mark.parametrize(
    "more",
    [{"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}, {"n": 2}, {"best_of": 3}, {"use_beam_search": True}],
    ids=lambda more: "-".join(more),
)
def test_one_set_of_parameters_is_for_one_prompt_and_answer(more: dict[str, Any]) -> None:
    @runs
    async def test() -> None:
        prefill, decode = Fake(says(HELD)), Fake(says(DONE))
        async with routed([prefill], [decode]) as client:
            assert await client.whole({**ASKED, **more}) == (200, DONE)
            assert (prefill.bodies, decode.bodies) == ([], [{**ASKED, **more}])
            assert await client.alone() == {"several": 1}
            for single in ([1, 2, 3], [[1, 2, 3]], ["a"]):
                await client.whole({**ASKED, "prompt": single, "n": 1})
            assert len(prefill.bodies) == 3

    test()


@runs
async def test_servers_are_asked_in_turns_and_those_that_are_gone_left_out() -> None:
    prefills, decodes = [Fake(says(HELD)) for _ in range(2)], [Fake(says(DONE)) for _ in range(3)]
    async with routed([*prefills], [*decodes]) as client:
        for _ in range(6):
            assert await client.whole() == (200, DONE)
        assert [len(it.bodies) for it in prefills + decodes] == [3, 3, 2, 2, 2]
        await decodes[0].stop()
        for _ in range(6):
            assert await client.whole() == (200, DONE)
        # The one that met it first was computed elsewhere; nobody else did.
        assert await client.alone() == {"decode_unreachable": 1}
        for fake in prefills:
            await fake.stop()
        for _ in range(5):
            assert await client.whole() == (200, DONE)
        assert await client.alone() == {"decode_unreachable": 1, "prefill_unreachable": 5}
        await decodes[1].stop()
        await decodes[2].stop()
        for asked in (decodes[1:], decodes):
            # When nobody is left, all are asked: one may be back.
            status, body = await client.whole()
            assert (status, body["error"]["code"]) == (503, 503)
            assert [it.url in body["error"]["message"] for it in decodes] == [it in asked for it in decodes]


def test_a_server_that_was_left_out_is_asked_again() -> None:
    fleet = pd_proxy.Fleet("decode", ["a", "b"])
    assert [[it.url for it in fleet.in_turn()] for _ in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    fleet.servers[0].left_out_until = float("inf")
    assert [[it.url for it in fleet.in_turn()] for _ in range(2)] == [["b"], ["b"]]
    fleet.servers[0].left_out_until = 0.0
    assert [it.url for it in fleet.in_turn()] == ["b", "a"]


@pytest.mark.parametrize("where", ["prefill", "decode", "stream"])
def test_a_client_that_leaves_ends_its_leg(where: str) -> None:
    @runs
    async def test() -> None:
        async def endless(request: web.Request) -> web.StreamResponse:
            out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await out.prepare(request)
            await out.write(EVENTS[0])
            return await never(request)

        prefill = Fake(never if where == "prefill" else says(HELD))
        decode = Fake(endless if where == "stream" else never)
        async with routed([prefill], [decode]) as client:
            at = prefill if where == "prefill" else decode
            request = asyncio.ensure_future(client.post({**ASKED, "stream": True}).__aenter__())
            await at.seen.wait()
            if where == "stream":
                answer = await request
                assert await answer.content.readexactly(len(EVENTS[0])) == EVENTS[0]
                answer.close()
            else:
                request.cancel()
            await at.left.wait()
            assert len(decode.bodies) == (0 if where == "prefill" else 1)
            assert await client.alone() == {}

    test()


@runs
async def test_a_stream_that_breaks_off_is_not_a_whole_one() -> None:
    async with routed([Fake(says(HELD))], [Fake(streams(EVENTS[:2], cut=True))]) as client:
        async with client.post({**ASKED, "stream": True}) as answer:
            received = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                while chunk := await answer.content.readany():
                    received += chunk
        head = b"".join(EVENTS[:2])
        assert received.startswith(head)
        error = json.loads(received[len(head) :].removeprefix(b"data: "))["error"]
        assert (error["code"], "broke off" in error["message"]) == (502, True)
        _, found = await client.health()
        assert found["counts"] == {"requests": 1, "computed_by_decode": 0, "streams_broken": 1}


@runs
async def test_models_are_those_of_a_decode_server() -> None:
    models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
    seen: list[str | None] = []

    async def listed(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.json_response(models)

    decode = Fake(says(DONE), models=listed)
    async with routed([Fake(says(HELD))], [NOBODY, decode]) as client:
        url = f"{client.url}/v1/models"
        async with client.session.get(url, headers={"Authorization": "Bearer key"}) as answer:
            assert (answer.status, answer.content_type, await answer.json()) == (200, "application/json", models)
        assert (seen, decode.bodies) == (["Bearer key"], [])
        await decode.stop()
        async with client.session.get(url) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], NOBODY in error["message"]) == (503, 503, True)


@runs
async def test_health_is_that_of_the_decode_servers() -> None:
    prefill, decode = Fake(says(HELD)), Fake(says(DONE))
    async with routed([prefill], [NOBODY, decode]) as client:
        status, found = await client.health()
        assert (status, found["status"], list(found["prefill"].values())) == (200, "ok", ["ok"])
        assert found["decode"][NOBODY] not in ("ok", "") and len(found["decode"]) == 2
        await prefill.stop()
        assert (await client.health())[0] == 200
        await decode.stop()
        status, found = await client.health()
        assert (status, found["status"]) == (503, "no decode server answers")


@runs
async def test_a_server_that_is_down_costs_a_line_and_not_one_per_request() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    pd_proxy.log.addHandler(handler)
    try:
        async with routed([NOBODY], [Fake(says(DONE))]) as client:
            for _ in range(30):
                assert await client.whole() == (200, DONE)
            await client.whole({**ASKED, "prompt": ["a", "b"]})
            # The counts have them all.
            assert await client.alone() == {"prefill_unreachable": 30, "several": 1}
    finally:
        pd_proxy.log.removeHandler(handler)
    assert [NOBODY in line for line in lines] == [True], lines


def test_the_next_line_of_a_kind_says_how_many_were_held_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(pd_proxy.time, "monotonic", lambda: now)
    lines = pd_proxy.Lines()
    for _ in range(4):
        lines.say("a", "text a")
    lines.say("b", "text b")
    now += pd_proxy.LINE_EVERY
    lines.say("a", "text a")
    lines.say("a", "text a")
    now += pd_proxy.LINE_EVERY
    lines.say("b", "text b")
    wanted = ["text a", "text b", "text a (3 more like it were held back)", "text b"]
    assert [record.getMessage() for record in caplog.records] == wanted


PROGRAM = [sys.executable, pd_proxy.__file__]


@runs
async def test_the_program_ends_the_legs_of_clients_that_leave() -> None:
    prefill, decode = Fake(says(HELD)), Fake(says(DONE), never)
    servers = ["--prefill", await prefill.start(), "--decode", await decode.start()]
    process = await asyncio.create_subprocess_exec(*PROGRAM, *servers, "--port", "0", stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        while "Running on" not in (line := (await process.stderr.readline()).decode()):
            assert line, "it ended"
        async with aiohttp.ClientSession() as session:
            client = Client(line.split()[-1], session)
            assert await client.whole() == (200, DONE)
            decode.seen.clear()
            request = asyncio.ensure_future(client.whole())
            await decode.seen.wait()
            request.cancel()
            await decode.left.wait()
            assert await client.alone() == {}
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await prefill.stop()
        await decode.stop()


def test_it_explains_itself() -> None:
    shown = subprocess.run([*PROGRAM, "--help"], capture_output=True, text=True, timeout=LIMIT, check=True)
    for flag in ("--prefill", "--decode", "--port", "--pause"):
        assert flag in shown.stdout
    wrong = subprocess.run([*PROGRAM, "--decode", "ftp://x"], capture_output=True, text=True, timeout=LIMIT)
    assert wrong.returncode == 2 and "ftp://x" in wrong.stderr
