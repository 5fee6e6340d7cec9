#!/usr/bin/env python3
"""A small router for vLLM servers that prefill and decode apart.

    python pd_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

A request goes to a prefill server for one token first. The `kv_transfer_params` of that answer go unchanged to a decode
server, which reads the prompt's blocks and answers the client. If something fails before the client got its first byte,
the request goes to a decode server once more, without parameters: that one computes the prompt itself.

Not responsible for load, affinity or authentication. Needs aiohttp, which vLLM has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

log = logging.getLogger("pd_proxy")

# Asks a prefill server to hold the prompt's blocks for somebody else.
HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
BROKEN = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
# A server whose /health failed so often in a row, with so many seconds between, is given up.
HEALTH_TRIES = 3
HEALTH_PAUSE = 0.5
# At most one line of a kind in so many seconds.
LINE_EVERY = 10.0


@dataclass
class Options:
    """Servers by URL, and times in seconds."""

    prefill: list[str]
    decode: list[str]
    connect_timeout: float = 3.0
    prefill_timeout: float = 120.0
    health_after: float = 5.0
    silence_timeout: float = 300.0
    pause: float = 5.0


@dataclass
class Server:
    kind: str
    url: str
    left_out_until: float = 0.0


class Fleet:
    """Servers of one kind. Those that did not answer are left out for a while."""

    def __init__(self, kind: str, urls: list[str]) -> None:
        self.servers = [Server(kind, url) for url in urls]
        self.turn = -1

    def in_turn(self) -> list[Server]:
        """Those that can be asked; each call begins with the next one."""
        self.turn = (self.turn + 1) % len(self.servers)
        now = time.monotonic()
        return [it for it in self.servers[self.turn :] + self.servers[: self.turn] if it.left_out_until <= now]


class Lines:
    """The log, with at most one line of a kind in `LINE_EVERY` seconds: while a server is down, every request would
    have the same one."""

    def __init__(self) -> None:
        self.said: dict[str, float] = {}
        self.held_back: Counter[str] = Counter()

    def say(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        now = time.monotonic()
        if now < self.said.get(kind, float("-inf")) + LINE_EVERY:
            self.held_back[kind] += 1
            return
        self.said[kind] = now
        held_back = self.held_back.pop(kind, 0)
        log.log(level, "%s%s", text, f" ({held_back} more like it were held back)" if held_back else "")


class LegFailed(Exception):
    """A server's fault, or a request without a first leg. `reason` is what is counted."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Refused(Exception):
    """An answer in place of a completion: the request's fault, or nobody is there."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(body)
        self.status = status


@dataclass(frozen=True)
class Call:
    """A client's request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]

    def is_single(self) -> bool:
        """One prompt with one answer, which is what a set of parameters is for."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
        counts = {self.body.get(name) or 1 for name in ("n", "best_of")}
        return not several and counts == {1} and not self.body.get("use_beam_search")

    def for_prefill(self) -> dict[str, Any]:
        """Computes the prompt, and one token that nobody sees."""
        body = {name: value for name, value in self.body.items() if name not in ("stream_options", "min_tokens")}
        body |= {"stream": False, "max_tokens": 1, "kv_transfer_params": HOLD}
        return body | ({"max_completion_tokens": 1} if "max_completion_tokens" in body else {})

    def for_decode(self, params: dict[str, Any] | None) -> dict[str, Any]:
        """Parameters are the prefill server's or none, never the client's own."""
        body = {name: value for name, value in self.body.items() if name != "kv_transfer_params"}
        return body if params is None else body | {"kv_transfer_params": params}


@dataclass(frozen=True)
class Answer:
    """A server's answer, of which the head is here: the first event of a stream, else all. To be closed."""

    response: aiohttp.ClientResponse
    head: bytes

    @property
    def streams(self) -> bool:
        return self.response.content_type == "text/event-stream"

    def failed(self) -> bool:
        """A stream has begun with status 200 when vLLM finds that it cannot go on, and says so in its first event."""
        if self.streams and self.head.startswith(b'data: {"error"'):
            try:
                return int(json.loads(self.head.partition(b"\n")[0][6:])["error"]["code"]) >= 500
            except (ValueError, KeyError, TypeError):
                return True
        return self.response.status >= 500


async def head_of(response: aiohttp.ClientResponse) -> bytes:
    if response.content_type != "text/event-stream":
        return await response.read()
    head = b""
    while b"\n\n" not in head and (chunk := await response.content.readany()):
        head += chunk
    if not head:
        raise aiohttp.ClientPayloadError("an empty stream")
    return head


class Router:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.prefill, self.decode = Fleet("prefill", options.prefill), Fleet("decode", options.decode)
        self.lines = Lines()
        self.counts = Counter(requests=0, computed_by_decode=0, streams_broken=0)

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        # A connection per leg: one that was kept may close just when it is used, and closing it is what ends a leg.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self.session:
            yield

    # --- Servers ---

    async def leg(self, server: Server, call: Call, body: dict[str, Any], *, strict: bool, **times: float) -> Answer:
        """Sends a leg and waits for the head of its answer. Raises LegFailed without one, and if `strict` also where
        it is an error of the server. A server that does not answer is left out from now on."""
        try:
            response = await self.session.post(
                server.url + call.path,
                json=body,
                headers={**call.headers, "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(connect=self.options.connect_timeout, **times),
            )
            try:
                answer = Answer(response, await head_of(response))
            except BaseException:
                response.close()
                raise
        except BROKEN as error:
            server.left_out_until = time.monotonic() + self.options.pause
            why = str(error) or "no answer in time"
            raise LegFailed(f"{server.kind}_unreachable", f"{server.kind} server {server.url}: {why}") from error
        if strict and answer.failed():
            response.close()
            why = f"HTTP {response.status}, {shown(answer.head)}"
            raise LegFailed(f"{server.kind}_failed", f"{server.kind} server {server.url}: {why}")
        return answer

    async def while_it_lives(self, server: Server, leg: Coroutine[Any, Any, Answer]) -> Answer:
        """A leg's answer. One that waits for long waits for a server that answers elsewhere: a server that hangs, or
        that has stopped listening, would cost the leg's whole time. Raises LegFailed."""
        answer, gone = asyncio.ensure_future(leg), asyncio.ensure_future(self.until_gone(server))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return await answer
            server.left_out_until = time.monotonic() + self.options.pause
            why = f"no answer to the leg, and /health says: {gone.result()}"
            raise LegFailed(f"{server.kind}_silent", f"{server.kind} server {server.url}: {why}")
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def until_gone(self, server: Server) -> str:
        """Returns what /health said last when it has failed some times in a row."""
        failed, state = 0, ""
        while failed < HEALTH_TRIES:
            await asyncio.sleep(HEALTH_PAUSE if failed else max(self.options.health_after, HEALTH_PAUSE))
            state = await self.state_of(server)
            failed = 0 if state == "ok" else failed + 1
        return state

    async def first_leg(self, call: Call) -> dict[str, Any]:
        """Has the prompt computed and held: the parameters for the second leg."""
        if not call.is_single():
            raise LegFailed("several", "several prompts or answers in one request")
        servers = self.prefill.in_turn()
        if not servers:
            raise LegFailed("prefill_unreachable", "no prefill server could be reached in the last seconds")
        limit = self.options.prefill_timeout
        leg = self.leg(servers[0], call, call.for_prefill(), strict=True, total=limit)
        answer = await self.while_it_lives(servers[0], leg)
        answer.response.close()
        if answer.response.status >= 400:
            raise Refused(answer.response.status, answer.head.decode(errors="replace"))
        try:
            params = json.loads(answer.head)["kv_transfer_params"]
        except (ValueError, KeyError, TypeError):
            params = None
        if not isinstance(params, dict) or not params:
            raise LegFailed("no_parameters", f"prefill server {servers[0].url} gave no kv_transfer_params")
        return params

    async def second_leg(self, call: Call, params: dict[str, Any] | None) -> Answer:
        """The answer of a decode server: of the first one, or without parameters of the first that can be reached."""
        failures = []
        limit = self.options.silence_timeout
        for server in self.decode.in_turn() or self.decode.servers:
            strict = params is not None
            try:
                return await self.leg(server, call, call.for_decode(params), strict=strict, sock_read=limit)
            except LegFailed as failure:
                if strict:
                    raise
                failures.append(str(failure))
        raise Refused(503, error_body(503, f"no decode server can be reached: {'; '.join(failures)}"))

    # --- Clients ---

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions. A client that goes away cancels this, which ends its leg."""
        self.counts["requests"] += 1
        name = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        headers = {"X-Request-Id": name, **authorization_of(request)}
        try:
            call = Call(request.path, await self.body_of(request), headers)
            try:
                answer = await self.second_leg(call, await self.first_leg(call))
            except LegFailed as failure:
                self.counts.update(("computed_by_decode", f"computed_by_decode_{failure.reason}"))
                level = logging.INFO if failure.reason == "several" else logging.WARNING
                text = f"request {name} is computed by a decode server alone: {failure}"
                self.lines.say(failure.reason, text, level)
                answer = await self.second_leg(call, None)
        except Refused as refused:
            text = f"request {name}: HTTP {refused.status}, {shown(str(refused))}"
            self.lines.say(f"HTTP {refused.status}", text, logging.INFO)
            headers = {"X-Request-Id": name}
            return web.Response(
                status=refused.status, text=str(refused), content_type="application/json", headers=headers
            )
        try:
            return await self.pass_on(request, name, answer)
        finally:
            answer.response.close()

    async def body_of(self, request: web.Request) -> dict[str, Any]:
        try:
            body = json.loads(await asyncio.wait_for(request.read(), self.options.silence_timeout))
        except asyncio.TimeoutError:
            raise Refused(408, error_body(408, "the request did not arrive whole in time")) from None
        except ValueError as error:
            raise Refused(400, error_body(400, f"the request is no JSON: {error}")) from error
        if not isinstance(body, dict):
            raise Refused(400, error_body(400, "the request is no JSON object"))
        return body

    async def pass_on(self, request: web.Request, name: str, answer: Answer) -> web.StreamResponse:
        """Gives the client what comes, as it comes."""
        headers = {"Content-Type": answer.response.headers.get("Content-Type", ""), "X-Request-Id": name}
        status, transport = answer.response.status, request.transport
        if not answer.streams:
            return web.Response(status=status, body=answer.head, headers=headers)
        out = web.StreamResponse(status=status, headers=headers)
        await out.prepare(request)
        chunk, lost = answer.head, ""
        while chunk:
            try:
                await asyncio.wait_for(out.write(chunk), self.options.silence_timeout)
            except (OSError, asyncio.TimeoutError):
                lost = "its client is gone"
                break
            try:
                chunk = await answer.response.content.readany()
            except BROKEN as error:
                # Too late for another try: the client is told.
                lost, chunk = f"the decode server's answer broke off: {error or type(error).__name__}", b""
                self.counts["streams_broken"] += 1
                await out.write(f"data: {error_body(502, lost)}\n\n".encode())
        if lost:
            self.lines.say("stream", f"request {name}: {lost}")
            # Without the end of a whole answer.
            if transport is not None:
                transport.close()
        return out

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models, as the first decode server that can be reached answers it."""
        headers = authorization_of(request)
        limit = aiohttp.ClientTimeout(total=self.options.connect_timeout)
        failures = []
        for server in self.decode.servers:
            try:
                async with self.session.get(server.url + request.path, headers=headers, timeout=limit) as response:
                    kind = {"Content-Type": response.headers.get("Content-Type", "")}
                    return web.Response(status=response.status, body=await response.read(), headers=kind)
            except BROKEN as error:
                failures.append(f"{server.url}: {str(error) or 'no answer in time'}")
        body = error_body(503, f"no decode server can be reached: {'; '.join(failures)}")
        return web.Response(status=503, text=body, content_type="application/json")

    async def health(self, request: web.Request) -> web.Response:
        """200 while a decode server answers: that is enough. With the counts since the start."""
        prefill, decode = await asyncio.gather(self.states_of(self.prefill), self.states_of(self.decode))
        is_well = "ok" in decode.values()
        status = "ok" if is_well else "no decode server answers"
        found = {"status": status, "prefill": prefill, "decode": decode, "counts": self.counts}
        return web.json_response(found, status=200 if is_well else 503)

    async def states_of(self, fleet: Fleet) -> dict[str, str]:
        states = await asyncio.gather(*map(self.state_of, fleet.servers))
        return {server.url: state for server, state in zip(fleet.servers, states, strict=True)}

    async def state_of(self, server: Server) -> str:
        limit = aiohttp.ClientTimeout(total=self.options.connect_timeout)
        try:
            async with self.session.get(f"{server.url}/health", timeout=limit) as response:
                return "ok" if response.status == 200 else f"HTTP {response.status}"
        except BROKEN as error:
            return str(error) or "no answer"


def authorization_of(request: web.Request) -> dict[str, str]:
    """The client's header with its key for the servers, if it has one."""
    return {name: request.headers[name] for name in ("Authorization",) if name in request.headers}


def shown(body: bytes | str) -> str:
    return (body if isinstance(body, str) else body.decode(errors="replace"))[:500].strip()


def error_body(status: int, message: str) -> str:
    """As OpenAI's API has errors."""
    return json.dumps({"error": {"message": message, "type": "pd_proxy", "code": status}})


def application(options: Options) -> web.Application:
    router = Router(options)
    app = web.Application(client_max_size=1 << 28)
    app.cleanup_ctx.append(router.run)
    app.router.add_post("/v1/completions", router.complete)
    app.router.add_post("/v1/chat/completions", router.complete)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/health", router.health)
    return app


def url(text: str) -> str:
    text = text if "://" in text else f"http://{text}"
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no server's address; one is http://127.0.0.1:8100")
    return text.rstrip("/")


def main() -> None:
    parser = argparse.ArgumentParser(prog="pd_proxy.py", description="Routes requests to prefill and decode servers.")
    for kind in ("prefill", "decode"):
        help = f"{kind} servers, asked in turns"
        parser.add_argument(f"--{kind}", nargs="+", type=url, required=True, metavar="URL", help=help)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(%(default)s)")
    for name, what in {
        "connect_timeout": "to connect to a server",
        "prefill_timeout": "for a whole prefill leg",
        "health_after": "without an answer to a prefill leg after which, and every so often, /health is asked",
        "silence_timeout": "between two bytes from a decode server, or to a client",
        "pause": "that a server is left out after it did not answer",
    }.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(Options, name)
        parser.add_argument(flag, type=float, default=default, metavar="S", help=f"seconds {what} (%(default)s)")
    arguments = vars(parser.parse_args())
    where = {name: arguments.pop(name) for name in ("host", "port")}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    web.run_app(
        application(Options(**arguments)),
        **where,
        access_log=None,
        # Its notice has the port also where 0 was asked for.
        print=lambda text: log.info("%s", text.splitlines()[0].strip("= ")),
        handler_cancellation=True,
        shutdown_timeout=5,
    )


if __name__ == "__main__":
    main()
