"""What the drivers of other engines have in common: the protocol of `kvferry bench`, the blocks, and the process that
holds them.

One line of JSON per question on standard input, one per answer on standard output. The first question is the case, each
later one asks for a turn; the end of the input ends the program. Started with `--hold` it is the process that is read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# Answers have standard output for themselves: what libraries print there goes to standard error.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

# What destinations hold before they are read into.
POISON = 0xA5A5A5A5A5A5A5A5


@dataclass
class Case:
    """One block size's read: `blocks` blocks of `block_bytes` bytes in each of `layers` layers."""

    block_bytes: int
    blocks: int
    layers: int
    pattern: str
    workers: int
    queue_depth: int
    pairs: str

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Ours and theirs, over all layers: places in memory of `layers` times `blocks` blocks."""
        pairs = np.fromfile(self.pairs, dtype="<u4").astype(np.int64).reshape(-1, 2)
        layers = np.arange(self.layers, dtype=np.int64)[:, None] * self.blocks
        return (layers + pairs[:, 0]).ravel(), (layers + pairs[:, 1]).ravel()

    @property
    def bytes(self) -> int:
        return self.block_bytes * self.blocks * self.layers

    def memory(self) -> np.ndarray:
        """One row per block."""
        return np.full((self.blocks * self.layers, self.block_bytes // 8), POISON, dtype=np.uint64)

    def fill(self, memory: np.ndarray) -> None:
        for block in range(len(memory)):
            memory[block] = self.content(block)

    def content(self, block: int) -> np.ndarray:
        start = np.uint64((block * 0x9E3779B97F4A7C15) & (2**64 - 1))
        return start + np.arange(self.block_bytes // 8, dtype=np.uint64)

    def wrong(self, memory: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> int:
        """Blocks that do not hold what their pair says."""
        pairs = zip(ours, theirs, strict=True)
        return sum(not np.array_equal(memory[here], self.content(int(there))) for here, there in pairs)


class Reader(Protocol):
    """Moves a case's blocks."""

    lane: str
    bytes: int

    def turn(self) -> tuple[float, int, int]:
        """Moves everything once: seconds, operations, wrong blocks."""


class Holder:
    """This program again, as the process that is read."""

    def __init__(self, question: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.held: dict[str, Any] = self.ask(question)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the process that holds the blocks has ended; its own messages are above")
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def say(**answer: Any) -> None:
    print(json.dumps(answer), file=_answers, flush=True)


def leave() -> None:
    """Ends this process without the destructors of libraries: NIXL 1.5.1's end in a segmentation fault."""
    _answers.flush()
    os._exit(0)


def run(read: Callable[[Case, Holder], Reader], hold: Callable[[Case], dict[str, Any]]) -> None:
    """The program: `read` makes a reader, `hold` makes what is read and says where it is."""
    question = json.loads(sys.stdin.readline())
    case = Case(**question)
    if "--hold" in sys.argv:
        say(**hold(case))
        while sys.stdin.readline():
            pass
        leave()
    holder = Holder(question)
    try:
        reader = read(case, holder)
        say(lane=reader.lane, bytes=reader.bytes)
        while sys.stdin.readline():
            seconds, operations, wrong = reader.turn()
            say(seconds=seconds, operations=operations, wrong=wrong)
    finally:
        holder.end()
    leave()
