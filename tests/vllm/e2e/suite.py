"""Scenarios, their setups, and the run of those that were asked for.

A scenario is a coroutine that gets a `Pair` and its prompts, returns a remark or nothing, and raises `Failed` or
`Skipped`. It leaves both servers running and nothing held.
"""

from __future__ import annotations

import asyncio
import fnmatch
import importlib.util
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from .client import Client
from .connectors import CONNECTORS
from .errors import Failed, RequestError, Skipped
from .model import folder_name
from .pair import SERVER_ARGUMENTS, Pair, Setup
from .reference import Prompt, Reference
from .servers import plain_environment
from .settings import HOME, SCRAPE_MARGIN

Body = Callable[[Pair, list[Prompt]], Awaitable[str | None]]


@dataclass(frozen=True)
class Scenario:
    name: str
    setup: Setup
    body: Body
    prompts: tuple[Prompt, ...]
    # Why it has no sense with another connector than kvferry's.
    only_kvferry: str | None
    limit: float

    @property
    def full_name(self) -> str:
        return f"{self.setup.name}/{self.name}"


SCENARIOS: list[Scenario] = []


def scenario(
    name: str,
    *setups: Setup,
    lengths: Iterable[int] = (),
    only_kvferry: str | None = None,
    limit: float = 180.0,
) -> Callable[[Body], Body]:
    """Registers a scenario for each setup. `lengths` are those of its prompts, in tokens."""

    def register(body: Body) -> Body:
        prompts = tuple(Prompt(f"{name}/{place}", length) for place, length in enumerate(lengths))
        for setup in setups:
            SCENARIOS.append(Scenario(name, setup, body, prompts, only_kvferry, limit))
        return body

    return register


@dataclass
class Results:
    """What came out, shown as it comes."""

    passed: int = 0
    failed: int = 0
    skips: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def ok(self, name: str, seconds: float, remark: str | None) -> None:
        self.passed += 1
        print(f"ok       {name} ({seconds:.1f} s){': ' + remark if remark else ''}", flush=True)

    def fail(self, name: str, why: str) -> None:
        self.failed += 1
        print(f"FAILED   {name}: {why}", flush=True)

    def skip(self, name: str, why: str) -> None:
        self.skips.append(f"{name}: {why}")
        print(f"skipped: {name}: {why}", flush=True)


RESULTS = Results()


def figure(text: str) -> None:
    """Keeps a measured figure for the end of the run."""
    RESULTS.figures.append(text)


def chosen(patterns: list[str]) -> list[Scenario]:
    """Scenarios by name: a setup, a scenario, both with a slash between, wildcards allowed."""
    if not patterns:
        return list(SCENARIOS)
    return [
        each
        for each in SCENARIOS
        if any(
            fnmatch.fnmatch(name, pattern)
            for pattern in patterns
            for name in (each.full_name, each.name, each.setup.name)
        )
    ]


class Suite:
    """Runs scenarios, one setup after the other."""

    def __init__(self, connector: str):
        self.connector = connector
        self.client = Client()
        self.references: dict[str, Reference] = {}

    async def run(self, scenarios: list[Scenario]) -> None:
        try:
            await self._answers(scenarios)
            for setup in dict.fromkeys(each.setup for each in scenarios):
                await self._setup(setup, [each for each in scenarios if each.setup == setup])
        finally:
            await self.client.close()

    async def _answers(self, scenarios: list[Scenario]) -> None:
        for kind in dict.fromkeys(each.setup.model for each in scenarios):
            reference = Reference(kind, HOME / folder_name(kind), SERVER_ARGUMENTS)
            prompts = [prompt for each in scenarios if each.setup.model == kind for prompt in each.prompts]
            if missing := reference.missing(prompts):
                print(f"asking a plain server for {len(missing)} right answers of {kind}", flush=True)
                await reference.compute(missing, self.client, plain_environment())
            self.references[kind] = reference

    async def _setup(self, setup: Setup, scenarios: list[Scenario]) -> None:
        connector = CONNECTORS[setup.connector or self.connector]
        runnable = []
        for each in scenarios:
            why = each.only_kvferry if connector.name != "kvferry" else None
            if setup.needs and not importlib.util.find_spec(setup.needs):
                why = f"there is no module {setup.needs}"
            if why := why or connector.missing():
                RESULTS.skip(each.full_name, why)
            else:
                runnable.append(each)
        if not runnable:
            return
        print(f"-- {setup.name}: {setup.about} ({connector.name})", flush=True)
        storage = HOME / "e2e-storage" / setup.name
        pair = Pair(setup, connector, self.references[setup.model], self.client, str(storage))
        try:
            for each in runnable:
                await self._scenario(each, pair)
        finally:
            await pair.stop()

    async def _scenario(self, each: Scenario, pair: Pair) -> None:
        started = time.monotonic()
        try:
            if not each.setup.bare:
                await pair.start()
            started = time.monotonic()
            async with asyncio.timeout(each.limit):
                remark = await each.body(pair, list(each.prompts))
                if not each.setup.bare:
                    await pair.settled()
        except Skipped as why:
            RESULTS.skip(each.full_name, str(why))
            return
        except (Failed, RequestError) as why:
            RESULTS.fail(each.full_name, f"{why} ({time.monotonic() - started:.1f} s)")
        except TimeoutError:
            RESULTS.fail(each.full_name, f"not over after {each.limit:.0f} s")
        except Exception as error:
            traceback.print_exc()
            RESULTS.fail(each.full_name, f"{type(error).__name__}: {error}")
        else:
            RESULTS.ok(each.full_name, time.monotonic() - started, remark)
            return
        # The next one begins with servers that are as new, unless these have recovered.
        if not each.setup.bare:
            try:
                # A held lease ends sooner than servers start.
                await pair.freed(each.setup.lease + SCRAPE_MARGIN)
                await self._serves(pair)
            except (Failed, RequestError):
                await pair.stop()

    async def _serves(self, pair: Pair) -> None:
        for server in pair.servers:
            await self.client.complete(server, list(range(3, 43)), max_tokens=2, limit=10)
