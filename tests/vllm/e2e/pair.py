"""A prefill and a decode server, and what scenarios do with them.

Responsible for the two legs of a request as a router sends them, for the comparison with the right answer, and for
knowing that nothing is held any more. The scenarios decide what is required.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from .client import PREFILL_PARAMS, Answer, Client
from .connectors import Connector, Wanted
from .errors import Failed, Refused, RequestError
from .metrics import Metrics
from .model import BLOCK_TOKENS, VOCABULARY
from .reference import Prompt, Reference
from .servers import Server, free_port, plain_environment
from .settings import COMPUTE_MARGIN, GENERATED, LEASE, LOST_PEER_LIMIT, POLL, REQUEST_LIMIT, SCRAPE_MARGIN


@dataclass(frozen=True)
class Setup:
    """How a pair is configured. Scenarios with the same setup share its servers."""

    name: str
    about: str
    model: str = "llama"
    connector: str | None = None  # None: the one that was asked for
    policy: str | None = "recompute"
    lease: float = LEASE
    storage: bool = False
    # kv_producer and kv_consumer in place of kv_both.
    roles: bool = False
    # More settings of the connector, and a module without which there is no such setup.
    extra: tuple[tuple[str, Any], ...] = ()
    needs: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()
    # Neither is started: the scenario does that itself.
    bare: bool = False


# Few blocks, so that freed ones are soon used again: enough for 8 prompts of 1500 tokens and their answers.
BLOCKS = 512
SERVER_ARGUMENTS = ["--block-size", "32", "--max-model-len", "2048", "--num-gpu-blocks-override", str(BLOCKS)]


class Pair:
    """Both servers of a setup."""

    def __init__(self, setup: Setup, connector: Connector, reference: Reference, client: Client, storage: str):
        self.setup = setup
        self.connector = connector
        self.reference = reference
        self.client = client
        self.storage = storage
        self._ports: dict[str, int] = {}
        self.prefill = self._server("prefill", setup.policy)
        self.decode = self._server("decode", setup.policy)

    def _server(self, side: str, policy: str | None) -> Server:
        wanted = Wanted(
            port=self._ports.setdefault(side, free_port()),
            lease=self.setup.lease,
            policy=policy,
            storage=self.storage if self.setup.storage else None,
            role={"prefill": "kv_producer", "decode": "kv_consumer"}[side] if self.setup.roles else "kv_both",
            extra=self.setup.extra,
        )
        config = self.connector.transfer_config(wanted)
        arguments = [*SERVER_ARGUMENTS, *self.setup.arguments, "--kv-transfer-config", json.dumps(config)]
        environment = plain_environment() | self.connector.environment(wanted) | dict(self.setup.environment)
        name = f"{self.setup.name}-{self.connector.name}-{side}"
        return Server(name, self.reference.model, arguments, environment)

    @property
    def servers(self) -> tuple[Server, Server]:
        return (self.prefill, self.decode)

    # --- Life ------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts those that do not run, together."""
        down = [server for server in self.servers if not server.alive]
        for server in down:
            await server.launch()
        await asyncio.gather(*(self.warm(server) for server in down))

    async def warm(self, server: Server) -> None:
        """Waits for a server, and for its first answer, which takes seconds without any connector."""
        await server.ready()
        try:
            await self.client.complete(server, list(range(3, 43)), max_tokens=2)
        except RequestError as error:
            raise Failed(f"{server.name} does not answer: {error}; {server.last_error()}") from error

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def restart_decode(self, policy: str | None) -> None:
        """Another decode server in the place of this one."""
        await self.decode.stop()
        self.decode = self._server(f"decode-{policy or 'default'}", policy)
        await self.start()

    # --- Requests --------------------------------------------------------------------

    async def prefilled(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        """The first leg: the parameters for the second one."""
        tokens = self.reference.tokens(prompt)
        params = copy.deepcopy(PREFILL_PARAMS)
        try:
            answer = await self.client.complete(self.prefill, tokens, max_tokens=1, params=params, **options)
        except RequestError as error:
            raise Failed(f"the prefill leg of {prompt.key}: {error}") from error
        if not answer.params:
            raise Failed(f"the prefill leg of {prompt.key} brought no kv_transfer_params")
        if difference := self.reference.difference(prompt, answer):
            raise Failed(f"the prefill leg of {prompt.key}: {difference}")
        return answer.params

    async def decoded(self, prompt: Prompt, params: Any, **options: Any) -> Answer:
        """The second leg, whatever it answers; a RequestError where it does not."""
        return await self.client.complete(self.decode, self.reference.tokens(prompt), params=params, **options)

    async def transferred(self, prompt: Prompt, **options: Any) -> Answer:
        """Both legs, with the right answer."""
        params = await self.prefilled(prompt)
        try:
            answer = await self.decoded(prompt, params, **options)
        except RequestError as error:
            raise Failed(f"the decode leg of {prompt.key}: {error}") from error
        self.check(prompt, answer)
        return answer

    async def right_or_refused(self, prompt: Prompt, params: Any, *, limit: float | None = None) -> str:
        """The second leg where an error is as good as the right answer; says which one it was. Anything else,
        silence included, fails."""
        started = time.monotonic()
        try:
            answer = await self.decoded(prompt, params, limit=limit or REQUEST_LIMIT)
        except Refused as error:
            return f"HTTP {error.status} after {time.monotonic() - started:.1f} s"
        except RequestError as error:
            raise Failed(f"{prompt.key}: {error}; {self.decode.last_error()}") from error
        self.check(prompt, answer)
        return f"right after {answer.total:.1f} s"

    async def right_at_once(self, prompt: Prompt) -> None:
        """A plain good request, after something went wrong."""
        answer = await self.transferred(prompt, limit=LOST_PEER_LIMIT + COMPUTE_MARGIN)
        if answer.total > LOST_PEER_LIMIT:
            raise Failed(f"the next good request took {answer.total:.1f} s")

    async def overwrite(self, server: Server) -> None:
        """Has plain requests of others compute in every block of a server that is free: what was there is gone."""
        length = 1500
        draw = random.Random(f"overwrite {time.monotonic()}")
        for _ in range(BLOCKS * BLOCK_TOKENS // length + 1):
            tokens = [draw.randrange(3, VOCABULARY) for _ in range(length)]
            await self.client.complete(server, tokens, max_tokens=1)

    def check(self, prompt: Prompt, answer: Answer) -> None:
        difference = self.reference.difference(prompt, answer)
        if not difference and len(answer.tokens) < GENERATED:
            difference = f"only {len(answer.tokens)} tokens"
        if difference:
            raise Failed(f"WRONG TOKENS for {prompt.key}: {difference}")

    # --- State -----------------------------------------------------------------------

    async def metrics(self) -> tuple[Metrics, Metrics]:
        """Of prefill and decode server."""
        try:
            return await asyncio.gather(*(self.client.metrics(server) for server in self.servers))
        except RequestError as error:
            raise Failed(f"{error}; {', '.join(s.last_error() for s in self.servers if not s.alive)}") from error

    def leftovers(self, scraped: tuple[Metrics, Metrics]) -> str:
        """What is still held, or nothing."""
        found = []
        for server, metrics in zip(self.servers, scraped):
            figures = {
                "blocks used": metrics.total("vllm:kv_cache_usage_perc"),
                "held": self.connector.held(metrics),
                "running": metrics.total("vllm:num_requests_running"),
                "waiting": metrics.total("vllm:num_requests_waiting"),
            }
            found += [f"{server.name}: {name} {value:.4g}" for name, value in figures.items() if value]
        return ", ".join(found)

    async def freed(self, limit: float) -> float:
        """Waits until nothing is held on either side; after how long, in seconds, it was so."""
        started = time.monotonic()
        while True:
            asked = time.monotonic() - started
            left = self.leftovers(await self.metrics())
            if not left:
                return asked
            if asked > limit:
                raise Failed(f"not free after {limit:.1f} s: {left}")
            await asyncio.sleep(POLL)

    async def settled(self) -> None:
        """What must be so after every scenario."""
        for server in self.servers:
            if not server.alive:
                raise Failed(f"{server.name} has died: {server.last_error()}")
        await self.freed(SCRAPE_MARGIN)
