"""The suite's command line, called by `scripts/vllm-e2e`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import time

from . import model, scenarios
from .connectors import CONNECTORS
from .settings import HOME, LOGS
from .suite import RESULTS, Scenario, Suite, chosen


def make_models(kinds: list[str]) -> None:
    """In a process of their own: torch stays out of this one."""
    for kind in kinds:
        folder = HOME / model.folder_name(kind)
        if not (folder / "made").exists():
            command = [sys.executable, "-W", "ignore", model.__file__, str(folder), kind]
            subprocess.run(command, check=True, capture_output=True)


async def run(connector: str, selected: list[Scenario]) -> None:
    """Runs them; an interruption ends the servers first."""
    task = asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await Suite(connector).run(selected)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/vllm-e2e", description="End-to-end suite of the vLLM plugin.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="setups or scenarios, wildcards allowed")
    parser.add_argument("--connector", choices=list(CONNECTORS), default="kvferry")
    parser.add_argument("--list", action="store_true", help="name the scenarios and run nothing")
    arguments = parser.parse_args()
    scenarios.load()
    selected = chosen(arguments.only)
    if not selected:
        parser.error(f"no scenario is called {' or '.join(arguments.only)}; --list names them")
    if arguments.list:
        for each in selected:
            print(each.full_name)
        return 0
    started = time.monotonic()
    make_models(list(dict.fromkeys(each.setup.model for each in selected)))
    interrupted = False
    try:
        asyncio.run(run(arguments.connector, selected))
    except asyncio.CancelledError:
        interrupted = True
    for line in RESULTS.figures:
        print(f"figure   {line}")
    if interrupted:
        print("interrupted")
    print(f"{(time.monotonic() - started) / 60:.1f} minutes; logs of the servers: {LOGS}")
    print(f"{RESULTS.passed} passed, {RESULTS.failed} failed, {len(RESULTS.skips)} skipped")
    return 1 if RESULTS.failed or interrupted else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
