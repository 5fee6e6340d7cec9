"""How the connectors are configured, and what their figures are called.

kvferry's is what the suite is for; NixlConnector runs in the same harness to compare with, and to show that the
checks find what is wrong.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from .metrics import Metrics
from .settings import HOST


@dataclass(frozen=True)
class Wanted:
    """What a server is to be configured for."""

    port: int  # of the side channel
    lease: float
    policy: str | None  # kv_load_failure_policy; None: vLLM's default
    storage: str | None = None
    role: str = "kv_both"
    extra: tuple[tuple[str, Any], ...] = ()


class Connector:
    name = ""
    module = ""

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        return None if importlib.util.find_spec(self.module) else f"there is no module {self.module}"

    def transfer_config(self, wanted: Wanted) -> dict[str, Any]:
        raise NotImplementedError

    def environment(self, wanted: Wanted) -> dict[str, str]:
        return {}

    def held(self, metrics: Metrics) -> float:
        """Requests whose blocks a prefill server holds, if the connector says so."""
        return 0.0

    def expired(self, metrics: Metrics) -> float:
        """Holds that ended because nobody came, so far."""
        return 0.0

    def seen(self, metrics: Metrics) -> float | None:
        """Requests with transfer parameters that a decode engine has been given, so far; None: unknown."""
        return None


class Kvferry(Connector):
    name = "kvferry"
    module = "kvferry"

    def _own(self, wanted: Wanted) -> dict[str, Any]:
        return {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": "kvferry.vllm",
            "kv_role": wanted.role,
            "kv_connector_extra_config": {
                "lease_duration": wanted.lease,
                "side_channel_host": HOST,
                "side_channel_port": wanted.port,
                **dict(wanted.extra),
            },
        }

    def transfer_config(self, wanted: Wanted) -> dict[str, Any]:
        config = self._own(wanted)
        if wanted.storage:
            store = {
                "kv_connector": "KvferryStorageConnector",
                "kv_connector_module_path": "kvferry.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": wanted.storage},
            }
            config = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [config, store]},
            }
        if wanted.policy:
            config["kv_load_failure_policy"] = wanted.policy
        return config

    def held(self, metrics: Metrics) -> float:
        return metrics.total("kvferry_leases_held")

    def expired(self, metrics: Metrics) -> float:
        return metrics.total("kvferry_lease_parts_total", end="expired")

    def seen(self, metrics: Metrics) -> float | None:
        return metrics.total("kvferry_offers_total")


class Nixl(Connector):
    name = "nixl"
    module = "nixl"

    def transfer_config(self, wanted: Wanted) -> dict[str, Any]:
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            # Whole seconds, or its arithmetic goes wrong.
            "kv_connector_extra_config": {"kv_lease_duration": int(wanted.lease)},
        }
        if wanted.storage:
            raise ValueError("the suite has no store to combine NixlConnector with")
        if wanted.policy:
            config["kv_load_failure_policy"] = wanted.policy
        return config

    def environment(self, wanted: Wanted) -> dict[str, str]:
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(wanted.port)}

    def expired(self, metrics: Metrics) -> float:
        return metrics.total("vllm:nixl_num_kv_expired_reqs_total")


CONNECTORS: dict[str, Connector] = {connector.name: connector for connector in (Kvferry(), Nixl())}
