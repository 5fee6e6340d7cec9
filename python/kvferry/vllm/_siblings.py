"""Which connectors one engine has in this process: children of vLLM's MultiConnector do not know of one another."""

from __future__ import annotations

import weakref
from typing import Any

from kvferry._native import ConfigurationError

_Key = tuple[str, str]
_connectors: dict[_Key, list[tuple[str, weakref.ref[Any]]]] = {}


def join(connector: Any, name: str, engine_id: str, role: str) -> None:
    """Adds a connector to those of its engine and role.

    Raises:
        ConfigurationError: a pair or an order that vLLM's MultiConnector cannot serve.
    """
    there = [(other, ref) for other, ref in _connectors.get((engine_id, role), ()) if ref() is not None]
    others = [other for other, _ in there]
    if name == "KvferryConnector":
        if "KvferryConnector" in others:
            raise ConfigurationError(
                "MultiConnector: two KvferryConnectors in one engine would write the same transfer parameters and "
                "share one handshake; keep one of them"
            )
        if "KvferryStorageConnector" in others:
            raise ConfigurationError(
                "MultiConnector: KvferryConnector must be listed before KvferryStorageConnector: the first child that "
                "offers anything loads, so a small hit on disk would lose the whole remote prefill"
            )
    elif name in others:
        raise ConfigurationError(
            f"MultiConnector: two {name}s in one engine; a second directory brings nothing that the first does not: "
            "keep one of them"
        )
    there.append((name, weakref.ref(connector)))
    _connectors[(engine_id, role)] = there


def leave(connector: Any, engine_id: str, role: str) -> None:
    """Forgets a connector that was shut down."""
    key = (engine_id, role)
    rest = [(name, ref) for name, ref in _connectors.get(key, ()) if ref() not in (None, connector)]
    if rest:
        _connectors[key] = rest
    else:
        _connectors.pop(key, None)
