"""vLLM servers as processes: started, watched, stopped and killed.

Responsible for every process of a server: each has a session of its own, and none is left when `stop` or `kill`
returns, nor when the suite itself dies (the kernel ends the server, which ends its own). Not responsible for what
the servers say.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from .errors import Failed
from .settings import HOST, LOGS, POLL, SERVED_NAME, START_LIMIT, STOP_LIMIT


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def plain_environment() -> dict[str, str]:
    """This process's environment without what would reach vLLM or UCX unasked."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "UCX_", "KVFERRY_", "NIXL_", "PYTHON"))
    }
    # PYTHONDONTWRITEBYTECODE would double the time of a start; UCX may look at the loopback only; counting ranks of
    # log probabilities would have a C++ compiler run in the first request, which hangs where one was killed before.
    return kept | {
        "UCX_NET_DEVICES": "lo",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "RUST_BACKTRACE": "1",
    }


def session_members(session: int) -> list[int]:
    """The living processes of a session."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name, in brackets, may contain anything.
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                members.append(int(entry))
    return members


@dataclass
class Server:
    """A vLLM API server with its engine."""

    name: str
    model: Path
    arguments: list[str]
    environment: dict[str, str]
    port: int = field(default_factory=free_port)
    starts: int = 0
    process: asyncio.subprocess.Process | None = None
    log: Path = LOGS / "unnamed.log"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def pids(self) -> list[int]:
        return session_members(self.process.pid) if self.process else []

    async def launch(self) -> None:
        """Starts the processes; `ready` waits until they serve."""
        self.starts += 1
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = LOGS / f"{self.name}.{self.starts}.log"
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-W", "ignore"]
        command += ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", SERVED_NAME, "--host", HOST, "--port", str(self.port)]
        command += ["--dtype", "float32", "--enforce-eager", "--seed", "0", *self.arguments]
        with self.log.open("w") as output:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    async def ready(self) -> None:
        """Waits until the server answers on /health."""
        deadline = time.monotonic() + START_LIMIT
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            while True:
                if not self.alive:
                    raise Failed(f"{self.name} ended while starting: {self.last_error()}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with client.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                if time.monotonic() > deadline:
                    raise Failed(f"{self.name} did not serve within {START_LIMIT:.0f} s, see {self.log}")
                await asyncio.sleep(0.25)

    def last_error(self) -> str:
        """The last line of the log that names an error."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return "no log"
        errors = [
            line
            for line in lines
            if ("Error" in line or "panicked" in line)
            and " WARNING " not in line
            and "Engine core initialization failed" not in line
        ]
        return f"{errors[-1][-300:].strip() if errors else 'no error in its log'} (see {self.log})"

    async def stop(self) -> None:
        """Ends the server as an operator does; what is left after a while is killed."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """Ends all its processes at once, without a word to anybody."""
        await self._end(signal.SIGKILL)

    async def _end(self, first: signal.Signals) -> None:
        if self.process is None:
            return
        session = self.process.pid
        # Politely: its own children are its business. Otherwise: all at the same moment.
        targets = [session] if first is signal.SIGTERM else session_members(session)
        deadline = time.monotonic() + STOP_LIMIT
        while True:
            for pid in targets:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, first)
            targets = []
            if not session_members(session):
                break
            if time.monotonic() > deadline:
                targets, first = session_members(session), signal.SIGKILL
            await asyncio.sleep(POLL)
        await self.process.wait()
        self.process = None
