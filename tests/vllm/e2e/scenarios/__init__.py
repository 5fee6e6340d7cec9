"""The scenarios, one module per family. They run in the order in which they are loaded."""

from __future__ import annotations

import importlib

FAMILIES = ("basic", "aborts", "damage", "deaths", "leases", "in_process", "routers", "figures")


def load() -> None:
    """Registers all of them."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
