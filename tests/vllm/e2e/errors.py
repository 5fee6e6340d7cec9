"""How a scenario ends early, and how a request does."""

from __future__ import annotations


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
