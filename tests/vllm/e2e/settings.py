"""Where things are and how long they may take: one place for the suite's constants.

Times are in seconds. Limits that kvferry's design promises are named after the promise; all others are only there
so that a broken server ends a run instead of stopping it.
"""

from __future__ import annotations

import os
from pathlib import Path

# From scripts/vllm-e2e: the directory of vLLM's environment, models, answers and logs.
HOME = Path(os.environ.get("KVFERRY_VLLM_HOME", "target/vllm")).absolute()
LOGS = HOME / "e2e-logs"
ROOT = Path(__file__).resolve().parents[3]

HOST = "127.0.0.1"
SERVED_NAME = "m"
# Tokens that a decode leg generates; those of a right answer.
GENERATED = 16

# --- What is promised ----------------------------------------------------------------
# From an abort that the decode engine saw to free blocks on the prefill engine.
FREED_LIMIT = 1.0
# What a lost peer costs a request.
LOST_PEER_LIMIT = 10.0
# A prompt computed again, and everything else that is no waiting, on a loaded machine with two cores.
COMPUTE_MARGIN = 3.0
# Lease of the prefill servers, where a scenario does not need another.
LEASE = 30.0
SHORT_LEASE = 3.0

# --- What only ends a run ------------------------------------------------------------
START_LIMIT = 240.0
STOP_LIMIT = 20.0
REQUEST_LIMIT = 60.0
# Between an event and its figure on /metrics.
SCRAPE_MARGIN = 2.0
POLL = 0.02
