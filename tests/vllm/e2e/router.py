"""The example router as a process, and a server that stands between it and a prefill server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from .errors import Failed
from .pair import Pair
from .servers import free_port, plain_environment
from .settings import HOST, LOGS, POLL, REQUEST_LIMIT, ROOT, STOP_LIMIT

PROGRAM = ROOT / "examples" / "pd_proxy.py"
START_LIMIT = 30.0
# Seconds that it leaves a server out which did not answer.
PAUSE = 1.0


@dataclass
class Router:
    """`examples/pd_proxy.py`, running. It has the `port` and `url` of a server."""

    port: int
    pair: Pair

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def counts(self) -> dict[str, int]:
        async with self.pair.client.session.get(f"{self.url}/health") as answer:
            return (await answer.json())["counts"]

    async def requires(self, **wanted: int) -> None:
        """Fails unless so many requests were computed by the decode server alone, by reason, and no others."""
        counts = await self.counts()
        found = {name: count for name, count in counts.items() if name.startswith("computed_by_decode_")}
        if found != {f"computed_by_decode_{reason}": count for reason, count in wanted.items()}:
            raise Failed(f"the router counts {counts}, not {wanted}")


@asynccontextmanager
async def example_router(pair: Pair, prefill: str | None = None) -> AsyncIterator[Router]:
    """Runs it before a pair, or before another prefill server."""
    router = Router(free_port(), pair)
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, str(PROGRAM), "--host", HOST]
    command += ["--port", str(router.port), "--pause", str(PAUSE)]
    command += ["--prefill", prefill or pair.prefill.url, "--decode", pair.decode.url]
    log = LOGS / f"{pair.setup.name}-router.log"
    with log.open("a") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=plain_environment(),
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_LIMIT
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                await router.counts()
                break
            if process.returncode is not None or time.monotonic() > deadline:
                raise Failed(f"the example router does not serve, see {log}")
            await asyncio.sleep(POLL)
        yield router
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_LIMIT)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()


@asynccontextmanager
async def changing_prefill(pair: Pair, change: Callable[[dict], dict]) -> AsyncIterator[str]:
    """The URL of a prefill server whose answers are the pair's with other transfer parameters."""

    async def relay(request: web.Request) -> web.Response:
        limit = aiohttp.ClientTimeout(total=REQUEST_LIMIT)
        url = f"{pair.prefill.url}{request.path}"
        async with pair.client.session.post(url, json=await request.json(), timeout=limit) as answer:
            body: dict[str, Any] = await answer.json(content_type=None)
            if body.get("kv_transfer_params"):
                body["kv_transfer_params"] = change(body["kv_transfer_params"])
            return web.json_response(body, status=answer.status)

    app = web.Application()
    app.router.add_post("/v1/completions", relay)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        yield f"http://{HOST}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
