"""Which connectors one engine has in this process: children of vLLM's MultiConnector do not know of one another."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from kvferry._native import ConfigurationError

_Key = tuple[str, str]
_connectors: dict[_Key, list[_Member]] = {}


class _Member(NamedTuple):
    name: str
    has_directory: bool
    connector: weakref.ref[Any]


def join(connector: Any, name: str, engine_id: str, role: str, has_directory: bool = False) -> None:
    """Adds a connector to those of its engine and role; `has_directory` says that it keeps blocks in one.

    Raises:
        ConfigurationError: a pair or an order that vLLM's MultiConnector cannot serve.
    """
    there = [member for member in _connectors.get((engine_id, role), ()) if member.connector() is not None]
    others = [member.name for member in there]
    if name in others:
        why = (
            "would write the same transfer parameters and share one handshake"
            if name == "KvferryConnector"
            else "would keep the same blocks twice"
        )
        raise ConfigurationError(
            f"two {name}s in one engine {why}. Under MultiConnector keep one of them; an engine that was started again "
            "with the same engine_id must have been shut down before"
        )
    if has_directory and any(member.has_directory for member in there):
        raise ConfigurationError(
            "MultiConnector: KvferryConnector has a shared_storage_path (or KVFERRY_SHARED_STORAGE_PATH is set) beside "
            "a KvferryStorageConnector, and each block would be kept twice; set it for one of them only"
        )
    if name == "KvferryConnector" and "KvferryStorageConnector" in others:
        raise ConfigurationError(
            "MultiConnector: KvferryConnector must be listed before KvferryStorageConnector: the first child that "
            "offers anything loads, so a small hit on disk would lose the whole remote prefill"
        )
    _connectors[(engine_id, role)] = [*there, _Member(name, has_directory, weakref.ref(connector))]


def leave(connector: Any, engine_id: str, role: str) -> None:
    """Forgets a connector that was shut down."""
    key = (engine_id, role)
    rest = [member for member in _connectors.get(key, ()) if member.connector() not in (None, connector)]
    if rest:
        _connectors[key] = rest
    else:
        _connectors.pop(key, None)
