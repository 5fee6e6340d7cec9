"""KV-cache transfer between inference engines, over UCX.

Importing this package starts nothing and loads no UCX. The connectors for vLLM are in `kvferry.vllm`.
"""

from kvferry._native import VERSION as __version__
from kvferry._native import ConfigurationError, EngineError

__all__ = ["ConfigurationError", "EngineError", "__version__"]
