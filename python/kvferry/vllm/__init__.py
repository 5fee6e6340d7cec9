"""Connectors for vLLM: `KvferryConnector` and `KvferryStorageConnector`.

    --kv-transfer-config '{"kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.vllm",
                           "kv_role": "kv_both"}'

The classes are made when they are asked for, so that importing this module is cheap in each of vLLM's processes.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.vllm._connector import KvferryConnector, KvferryStorageConnector

__all__ = ["KvferryConnector", "KvferryStorageConnector", "register"]

_CONNECTORS = ("KvferryConnector", "KvferryStorageConnector")


def register() -> None:
    """Puts the connectors into vLLM's registry, where MultiConnector looks its children's classes up by name.

    vLLM calls it in each process (entry point `vllm.general_plugins`), and so does importing this module.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in _CONNECTORS:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvferry.vllm", name)


def __getattr__(name: str) -> Any:
    if name in _CONNECTORS:
        from kvferry.vllm import _connector

        return getattr(_connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if importlib.util.find_spec("vllm") is not None:
    register()
