"""What the hooks of an empty step cost: the scheduler's and a worker's, with the pickling between them.

    scripts/test-python && target/python/bin/python benches/vllm_step.py

The design gives them 20 microseconds. While anything is held, vLLM takes about a thousand empty steps a second.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python" / "tests"))

from fakes import Storage, Tensor, blocks, cache_config, request, step, vllm_config
from kvferry.vllm import _setup
from kvferry.vllm._messages import Handshake, Plan
from kvferry.vllm._scheduler import SchedulerSide
from kvferry.vllm._stats import Collector
from kvferry.vllm._worker import WorkerSide

LAYER = "model.layers.0.self_attn.attn"
ROUNDS, STEPS = 9, 2_000


def microseconds(run: Any) -> float:
    """The median of some rounds, per step."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(STEPS):
            run()
        times.append((time.perf_counter() - started) / STEPS * 1e6)
    return statistics.median(times)


def main() -> None:
    config = cache_config([{"layer_names": [LAYER], "block_size": 32}], 64)
    setup = _setup.of("KvferryConnector", vllm_config("bench"), config)
    worker = WorkerSide(setup, 0, config, "cpu")
    worker.register({LAYER: Tensor(Storage(64 * 4 * 32 * 16 * 4), [64, 4, 32, 16], [2048, 512, 16, 1])})
    scheduler = SchedulerSide(setup)
    description = worker.describe()
    assert description is not None
    scheduler.publish({(0, 0): Handshake(description, setup.digest)})
    of_scheduler, of_worker = Collector("scheduler"), Collector("0")
    output = step()
    # Something is held, as when vLLM takes these steps.
    held = request("held", list(range(40)), {"do_remote_decode": True})
    scheduler.new_request(held)
    scheduler.after_alloc(held, blocks([1, 2]), 0)
    worker.begin(scheduler.build_step(step(new={"held": (([1, 2],), 0, 40)})))
    held.num_computed_tokens, held.status = 40, SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    assert scheduler.finished(held, ([1, 2],))[0]
    worker.begin(scheduler.build_step(output))
    sent = pickle.dumps(Plan(scheduler.build_step(output)))

    def scheduler_hooks() -> None:
        pickle.dumps(Plan(scheduler.build_step(output)))
        of_scheduler.collect(scheduler)
        scheduler.half.has_pending_work()

    def worker_hooks() -> None:
        plan = pickle.loads(sent).plan
        worker.release(plan)
        worker.begin(plan)
        worker.end()
        worker.results()
        of_worker.collect(worker)

    ours = [microseconds(scheduler_hooks), microseconds(worker_hooks)]
    base = microseconds(lambda: pickle.loads(pickle.dumps(output.num_scheduled_tokens)))
    print(f"scheduler's hooks and pickling  {ours[0]:6.2f} us")
    print(f"a worker's hooks and unpickling {ours[1]:6.2f} us")
    print(
        f"both                            {sum(ours):6.2f} us of 20; {sum(ours) / base:.0f} times an empty "
        "dict's pickling"
    )
    print(f"a plan's envelope               {len(sent)} bytes")
    worker.shutdown()
    scheduler.shutdown()


if __name__ == "__main__":
    main()
