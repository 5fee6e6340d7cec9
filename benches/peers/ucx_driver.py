"""UCX by itself: `ucx_perftest`'s get of one block, over and over, without an order of blocks or a check of bytes."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time

from _driver import Case, say

# Operations of a turn, and of the part that is not counted.
BYTES, WARM_UP = 1 << 28, 100


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    import json
    import sys

    case = Case(**json.loads(sys.stdin.readline()))
    program = shutil.which("ucx_perftest") or sys.exit("there is no ucx_perftest; install it (Debian: ucx-utils)")
    count = max(100, min(BYTES, case.bytes) // case.block_bytes)
    say(lane=f"UCX_TLS={os.environ.get('UCX_TLS', '(unset)')}, one buffer", bytes=count * case.block_bytes)
    while sys.stdin.readline():
        port = free_port()
        server = subprocess.Popen([program, "-p", str(port)], stdout=subprocess.DEVNULL)
        try:
            seconds = client(program, port, case, count)
        finally:
            server.terminate()
            server.wait()
        say(seconds=seconds, operations=count, wrong=0)


def client(program: str, port: int, case: Case, count: int) -> float:
    """Runs the benchmark; the server may need a moment to listen."""
    outstanding = str(max(1, case.queue_depth * 64))
    command = [program, "127.0.0.1", "-p", str(port), "-t", "ucp_get", "-s", str(case.block_bytes), "-n", str(count)]
    command += ["-w", str(WARM_UP), "-O", outstanding, "-f"]
    for _ in range(100):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rows = re.findall(r"^(?:Final:)?\s*\d+(?:\s+[0-9.]+){7}\s*$", done.stdout, re.MULTILINE)
        if done.returncode == 0 and rows:
            # Iterations; median, average and overall latency; average and overall MB/s; the same of messages.
            numbers = [float(number) for number in re.findall(r"[0-9.]+", rows[-1])]
            return count * case.block_bytes / (numbers[5] * (1 << 20))
        time.sleep(0.05)
    raise SystemExit(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
