"""Both halves of a connector in one process: offline engines with VLLM_ENABLE_V1_MULTIPROCESSING=0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..client import PREFILL_PARAMS, Answer
from ..errors import Failed
from ..pair import Pair
from ..reference import Prompt
from ..settings import GENERATED, LOGS, START_LIMIT, STOP_LIMIT
from ..suite import scenario
from .setups import IN_PROCESS

CHILD = Path(__file__).parents[1] / "offline.py"


class Offline:
    """An offline engine in a child process: a line of JSON asks, a line of JSON answers."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path):
        self.name = name
        self.process = process
        self.log = log

    @classmethod
    async def start(cls, pair: Pair, side: str) -> Offline:
        server = getattr(pair, side)
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{server.name}.log"
        config = server.arguments[server.arguments.index("--kv-transfer-config") + 1]
        with log.open("w") as output:
            process = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "KILL", sys.executable, "-W", "ignore"),
                *(str(CHILD), str(server.model), config),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=server.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                start_new_session=True,
            )
        return cls(server.name, process, log)

    async def ask(self, limit: float = START_LIMIT, **question: Any) -> dict[str, Any]:
        try:
            async with asyncio.timeout(limit):
                self.process.stdin.write(json.dumps(question).encode() + b"\n")
                await self.process.stdin.drain()
                line = await self.process.stdout.readline()
        except (TimeoutError, ConnectionError) as error:
            raise Failed(f"{self.name} does not answer: {error!r}, see {self.log}") from error
        if not line:
            raise Failed(f"{self.name} has ended, see {self.log}")
        return json.loads(line)

    async def stop(self) -> int | None:
        """The exit status, or None if it had to be killed."""
        self.process.stdin.close()
        try:
            async with asyncio.timeout(STOP_LIMIT):
                return await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            await self.process.wait()
            return None


def as_answer(output: dict[str, Any]) -> Answer:
    return Answer(tokens=output["tokens"], logprobs=output["logprobs"], params=output["params"])


@scenario("transfers", IN_PROCESS, lengths=[5, 33, 320, 1500], limit=600)
async def transfers(pair: Pair, prompts: list[Prompt]) -> str:
    engines: list[Offline] = []
    try:
        for side in ("prefill", "decode"):
            engines.append(await Offline.start(pair, side))
        prefill, decode = engines
        await asyncio.gather(*(engine.ask(prompts=[], params=[], max_tokens=1) for engine in engines))
        tokens = [pair.reference.tokens(prompt) for prompt in prompts]
        first = await prefill.ask(prompts=tokens, params=[PREFILL_PARAMS] * len(prompts), max_tokens=1)
        offers = [output["params"] for output in first["outputs"]]
        if None in offers:
            raise Failed(f"no kv_transfer_params: {offers}")
        second = await decode.ask(prompts=tokens, params=offers, max_tokens=GENERATED)
        for prompt, output in zip(prompts, second["outputs"]):
            pair.check(prompt, as_answer(output))
        wanted = sum(prompt.length for prompt in prompts)
        if second["external"] < wanted:
            raise Failed(f"{second['external']} tokens were fetched instead of {wanted}")
        # An offline engine hears of releases only while it steps.
        last = await prefill.ask(prompts=[tokens[0]], params=[None], max_tokens=4)
        statuses = [await engine.stop() for engine in engines]
        engines = []
        if statuses != [0, 0]:
            raise Failed(f"the engines' processes ended with {statuses} (None: had to be killed)")
        return f"{last['held']} leases held at the end"
    finally:
        for engine in engines:
            await engine.stop()
