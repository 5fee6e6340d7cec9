"""Requests to a server's completions API, with token ids in both directions."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .errors import Lost, Refused, TooLate
from .metrics import Metrics
from .servers import Server
from .settings import GENERATED, HOST, REQUEST_LIMIT, SERVED_NAME

# What vLLM's routers send with the first leg.
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class Answer:
    """What a completion brought. Times are in seconds from sending on."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # How far the second best token was, per token.
    gaps: list[float] = field(default_factory=list)
    params: dict[str, Any] | None = None
    first: float = 0.0
    total: float = 0.0

    def add(self, choice: dict[str, Any]) -> None:
        self.tokens += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        self.logprobs += logprobs.get("token_logprobs") or []
        for best in logprobs.get("top_logprobs") or []:
            values = sorted(best.values(), reverse=True)
            self.gaps.append(values[0] - values[1] if len(values) > 1 else float("inf"))


def body(tokens: list[int], *, max_tokens: int = GENERATED, params: Any = None, stream: bool = False) -> dict:
    """A greedy request that goes on to its limit."""
    made = {
        "model": SERVED_NAME,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 2,
        "stream": stream,
    }
    if params is not None:
        made["kv_transfer_params"] = params
    return made


class Client:
    """HTTP towards the servers, a connection per request."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        await self.session.close()

    async def post(
        self, url: str, sent: dict, *, limit: float = REQUEST_LIMIT, headers: dict[str, str] | None = None
    ) -> Answer:
        """Sends a completion and waits for all of it."""
        answer = Answer()
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit), self.session.post(url, json=sent, headers=headers) as response:
                if response.status != 200:
                    raise Refused(response.status, await response.text())
                if sent.get("stream"):
                    await self._read_stream(response, answer, started)
                else:
                    whole = await response.json(content_type=None)
                    answer.add(whole["choices"][0])
                    answer.params = whole.get("kv_transfer_params")
        except aiohttp.ClientError as error:
            raise Lost(f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise TooLate(f"no answer within {limit:.0f} s") from error
        answer.total = time.monotonic() - started
        return answer

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: Answer, started: float) -> None:
        ended = False
        async for line in response.content:
            text = line.decode().strip()
            if not text.startswith("data: "):
                continue
            if text == "data: [DONE]":
                ended = True
                continue
            chunk = json.loads(text[6:])
            if "error" in chunk:
                raise Refused(int(chunk["error"].get("code") or 500), text)
            if not answer.tokens:
                answer.first = time.monotonic() - started
            for choice in chunk["choices"]:
                answer.add(choice)
        if not ended:
            raise Lost("the stream ended early")

    async def complete(self, server: Server, tokens: list[int], *, limit: float = REQUEST_LIMIT, **options) -> Answer:
        return await self.post(f"{server.url}/v1/completions", body(tokens, **options), limit=limit)

    async def metrics(self, server: Server) -> Metrics:
        try:
            async with asyncio.timeout(10), self.session.get(f"{server.url}/metrics") as response:
                return Metrics(await response.text())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Lost(f"/metrics of {server.name}: {error!r}") from error


class RawRequest:
    """A request whose connection the scenario holds itself, to break it at a given moment."""

    def __init__(self, server: Server, sent: dict):
        self.server = server
        self.sent = sent
        self.received = b""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task | None = None

    async def send(self) -> None:
        """Returns when the kernel has taken all of it."""
        reader, self._writer = await asyncio.open_connection(HOST, self.server.port)
        content = json.dumps(self.sent).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self._writer.write(head.encode() + content)
        await self._writer.drain()
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            self.received += data

    async def abort(self) -> None:
        """Closes the connection, whatever has come."""
        if self._reading:
            self._reading.cancel()
        if self._writer:
            self._writer.transport.abort()

    def tokens(self) -> list[int]:
        """Those that had come, of a streamed answer."""
        answer = Answer()
        for line in self.received.split(b"\n"):
            if line.startswith(b"data: {") and line.rstrip().endswith(b"}"):
                for choice in json.loads(line[6:]).get("choices", []):
                    answer.add(choice)
        return answer.tokens
