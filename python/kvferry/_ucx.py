"""Which UCX the process is to load."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvferry._native import ConfigurationError

LIBRARY = "libucp.so.0"


def library(choice: str | None) -> str | None:
    """The file of a choice: nothing for what `KVFERRY_UCX_LIBRARY` says, `system` for what the dynamic loader finds,
    `libucx` for the package of that name, or a path to the file or its directory."""
    if choice is None:
        return None
    if choice == "system":
        # By name: for the dynamic loader, whatever a variable says.
        return LIBRARY
    if choice != "libucx":
        return choice
    spec = importlib.util.find_spec("libucx")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        file = Path(folder) / "lib" / LIBRARY
        if file.exists():
            return str(file)
    where = f"in {', '.join(folders)} there is no lib/{LIBRARY}" if folders else "it is not installed"
    raise ConfigurationError(
        f'ucx is "libucx", the Python package, but {where}; pip install libucx-cu12, or leave `ucx` out to use the '
        "system's"
    )
