"""How a scenario ends early, and how a request does; alone or with others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


class Failed(Exception):
    """A scenario's requirement does not hold."""


class Skipped(Exception):
    """A scenario that cannot run here; the reason is shown."""


class RequestError(Exception):
    """A request without an answer, for a reason that the client was told or can see."""


class Refused(RequestError):
    """The server answered with an error."""

    def __init__(self, status: int, body: str):
        super().__init__(f"HTTP {status}: {body[:300]}")
        self.status = status


class Lost(RequestError):
    """The connection to the server broke, or there was none."""


class TooLate(RequestError):
    """No answer within the limit."""


async def together(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Runs all of them to their ends, whatever happens to one; then the first error counts."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
