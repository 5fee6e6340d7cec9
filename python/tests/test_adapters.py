"""The adapters without vLLM: what they hand on, what they refuse, and in which words."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Storage, Tensor, blocks, cache_config, request, step, vllm_config
from kvferry import ConfigurationError, EngineError, _native
from kvferry.vllm import _setup, _siblings
from kvferry.vllm._messages import Handshake, Plan, Reports
from kvferry.vllm._scheduler import SchedulerSide, extra_key
from kvferry.vllm._worker import WorkerSide

LAYER = "model.layers.0.self_attn.attn"
GROUP = [{"layer_names": [LAYER], "block_size": 32}]
EXPORT = {"do_remote_decode": True}


def setup(connector: str = "KvferryConnector", engine: str = "engine", **extra: Any) -> _setup.Setup:
    return _setup.of(connector, vllm_config(engine, **extra), cache_config(GROUP, 8))


def tensor(**more: Any) -> Tensor:
    return Tensor(Storage(8 * 4 * 32 * 16 * 4), [8, 4, 32, 16], [2048, 512, 16, 1], **more)


def finish(side: SchedulerSide, name: str, prompt: list[int], ids: list[int], status: str) -> Any:
    done = request(name, prompt, EXPORT, num_computed_tokens=len(prompt), status=SimpleNamespace(name=status))
    return side.finished(done, (ids,))


# --- Settings ---


@pytest.mark.parametrize(
    ("connector", "extra", "words"),
    [
        ("KvferryConnector", {"lease_duraton": 3}, ["lease_duraton", "lease_duration"]),
        ("KvferryConnector", {"lease_duration": "soon"}, ["lease_duration", "soon"]),
        ("KvferryConnector", {"side_channel_port": 70_000}, ["side_channel_port", "70000"]),
        ("KvferryConnector", {"lane": "fast"}, ["lane", "fast"]),
        ("KvferryConnector", {"shared_storage_io_threads": 2}, ["shared_storage_io_threads"]),
        ("KvferryStorageConnector", {}, ["shared_storage_path"]),
        ("KvferryStorageConnector", {"shared_storage_path": "/x", "lane": "served"}, ["lane", "KvferryConnector"]),
        ("KvferryConnector", {"lease_duration": float("nan")}, ["no JSON"]),
    ],
)
def test_a_wrong_setting_is_named(connector: str, extra: dict[str, Any], words: list[str]) -> None:
    config = vllm_config("engine")
    config.kv_transfer_config.kv_connector_extra_config = extra
    with pytest.raises(ConfigurationError) as caught:
        _setup.of(connector, config, cache_config(GROUP, 8))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_numbers_may_be_texts_and_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup(lease_duration="2.5", side_channel_port="0").ranks == 1
    monkeypatch.setenv("KVFERRY_LEASE_DURATION", "for ever")
    with pytest.raises(ConfigurationError, match="KVFERRY_LEASE_DURATION"):
        setup(lease_duration=30)


def test_settings_and_slips_in_the_environment_are_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVFERRY_LANE", "served")
    monkeypatch.setenv("KVFERRY_LEASE_MX", "3")
    with caplog.at_level("INFO", logger="vllm.kvferry"):
        setup(lease_duration=5)
    assert 'settings: lease_duration=5, lane="served" (KVFERRY_LANE)' in caplog.text
    assert "KVFERRY_LEASE_MX is no setting; did you mean KVFERRY_LEASE_MAX?" in caplog.text


def test_every_setting_is_described() -> None:
    described = {name: (default, text) for name, default, text in _native.describe_settings("KvferryConnector")}
    assert described["lease_duration"][0] == "30"
    assert all(text for _, text in described.values())
    assert "shared_storage_path" in dict((row[0], row) for row in _native.describe_settings("KvferryStorageConnector"))


def test_the_package_libucx_is_used_only_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install libucx-cu12"):
        setup(ucx="libucx")


def test_what_vllm_does_that_kvferry_does_not_is_refused() -> None:
    config = vllm_config("engine")
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigurationError, match="decode_context_parallel_size=2"):
        _setup.of("KvferryConnector", config, cache_config(GROUP, 8))
    with pytest.raises(ConfigurationError, match="vLLM 0.32"):
        _setup.of("KvferryConnector", vllm_config("engine"), None)
    with pytest.raises(ConfigurationError, match="kv_role"):
        SchedulerSide(_setup.of("KvferryConnector", vllm_config("engine", role="kv_prefill"), cache_config(GROUP, 8)))


# --- Scheduler ---


def test_requests_without_parameters_cost_nothing_and_are_never_asked_about() -> None:
    side = SchedulerSide(setup())
    plain = request("plain", list(range(40)))
    side.new_request(plain)
    assert side.matched_tokens(plain, 0) == (0, False)
    side.after_alloc(plain, blocks([1, 2]), 0)
    empty = side.build_step(step())
    assert side.build_step(step(new={"plain": (([1, 2],), 0, 40)})) == empty
    assert side.finished(plain, ([1, 2],)) == (False, None)
    side.shutdown()


@pytest.mark.parametrize("connector", ["KvferryConnector", "KvferryStorageConnector"])
def test_a_producer_with_a_directory_looks_nothing_up(tmp_path: Any, connector: str) -> None:
    def side(role: str) -> SchedulerSide:
        config = vllm_config("engine", role=role)
        config.kv_transfer_config.kv_connector_extra_config = {"shared_storage_path": str(tmp_path)}
        return SchedulerSide(_setup.of(connector, config, cache_config(GROUP, 8)))

    def lookups(side: SchedulerSide) -> int:
        asked = request("r1", list(range(100)))
        side.new_request(asked)
        side.matched_tokens(asked, 0)
        counters, _, _ = side.half.figures()
        side.shutdown()
        return int(counters.get("kvferry_storage_lookups_total", 0))

    assert [lookups(side(role)) for role in ("kv_producer", "kv_consumer", "kv_both")] == [0, 1, 1]


def test_an_export_holds_its_blocks_and_offers_them_in_nixl_connectors_words() -> None:
    side = SchedulerSide(setup(engine="prefill-7"))
    prompt = list(range(40))
    asked = request("r1", prompt, EXPORT)
    side.new_request(asked)
    assert side.matched_tokens(asked, 0) == (0, False)
    side.after_alloc(asked, blocks([3, 4]), 0)
    empty = side.build_step(step())
    assert side.build_step(step(new={"r1": (([3, 4],), 0, 40)})) != empty
    hold, params = finish(side, "r1", prompt, [3, 4], "FINISHED_LENGTH_CAPPED")
    assert hold
    assert side.half.has_pending_work()
    host, _, port = (side.half.address or "").rpartition(":")
    expected = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[3, 4]],
        "remote_engine_id": "prefill-7",
        "remote_request_id": "r1",
        "remote_host": host,
        "remote_port": int(port),
        "tp_size": 1,
        "remote_num_tokens": 40,
    }
    assert {key: value for key, value in params.items() if key != "kvferry"} == expected
    side.shutdown()


@pytest.mark.parametrize("status", ["FINISHED_STOPPED", "FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_only_a_prefill_that_reached_its_length_is_held(status: str) -> None:
    side = SchedulerSide(setup())
    prompt = list(range(40))
    side.new_request(request("r1", prompt, EXPORT))
    side.build_step(step(new={"r1": (([3, 4],), 0, 40)}))
    assert finish(side, "r1", prompt, [3, 4], status) == (False, None)
    # The lease that was reserved is revoked in the next plan.
    assert side.half.has_pending_work()
    side.build_step(step())
    assert not side.half.has_pending_work()
    side.shutdown()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"do_remote_prefill": True, "remote_block_ids": {1}}, "no JSON"),
        ({"do_remote_prefill": True, "x": float("inf")}, "no JSON"),
    ],
)
def test_parameters_that_are_no_json_leave_the_request_alone(
    params: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = SchedulerSide(setup())
    asked = request("r1", list(range(40)), params)
    side.new_request(asked)
    assert words in caplog.text
    assert side.matched_tokens(asked, 0) == (0, False)
    assert side.finished(asked, ([1, 2],)) == (False, None)
    side.shutdown()


def test_a_request_with_an_id_that_cannot_travel_is_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    side = SchedulerSide(setup())
    asked = request("r" * 600, list(range(40)), EXPORT)
    side.new_request(asked)
    assert "is computed here" in caplog.text
    assert side.matched_tokens(asked, 0) == (0, False)
    assert side.build_step(step(new={"r" * 600: (([3, 4],), 0, 40)})) == side.build_step(step())
    assert side.finished(asked, ([1, 2],)) == (False, None)
    side.shutdown()


def test_a_request_that_was_refused_before_admission_is_nothing() -> None:
    side = SchedulerSide(setup())
    refused = request("r1", [0], EXPORT, status=SimpleNamespace(name="FINISHED_IGNORED"))
    side.new_request(refused)
    assert side.finished(refused, ([],)) == (False, None)
    assert side.finished(refused, ([],)) == (False, None)
    side.shutdown()


def test_what_a_cache_depends_on_beside_tokens() -> None:
    assert extra_key(request("r", [1])) == ""
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/a")
    media = SimpleNamespace(identifier="pic", mm_position=SimpleNamespace(offset=3))
    keys = {
        extra_key(request("r", [1], **more))
        for more in (
            {"lora_request": lora},
            {"cache_salt": "s"},
            {"mm_features": [media]},
            {"lora_request": lora, "cache_salt": "s"},
        )
    }
    assert len(keys) == 4


# --- Storage ---


def test_the_storage_connector_saves_and_another_engine_finds(tmp_path: Any) -> None:
    def engine(name: str) -> tuple[SchedulerSide, WorkerSide, Storage]:
        config = cache_config(GROUP, 8)
        made = _setup.of(
            "KvferryStorageConnector",
            SimpleNamespace(
                **{
                    **vars(vllm_config(name)),
                    "kv_transfer_config": SimpleNamespace(
                        engine_id=name,
                        kv_role="kv_both",
                        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
                    ),
                }
            ),
            config,
        )
        cache = tensor()
        worker = WorkerSide(made, 0, config, "cpu")
        worker.register({LAYER: cache})
        assert worker.describe() is None
        return SchedulerSide(made), worker, cache.untyped_storage()

    def turn(scheduler: SchedulerSide, worker: WorkerSide, output: Any) -> set[str]:
        plan = Plan(scheduler.build_step(output))
        worker.release(plan.plan)
        worker.begin(plan.plan)
        worker.end()
        results = worker.results()
        assert not results.failed
        if results.report:
            scheduler.on_output(SimpleNamespace(kv_connector_worker_meta=Reports(((0, results.report),))))
        return results.received

    first, first_worker, memory = engine("first")
    assert first.reads_tokens and first.half.best_effort and not first.half.requires_delivery
    prompt, data = list(range(70)), bytes(range(256)) * 64
    for block in (1, 2, 3):
        memory.write(block * len(data) // 2, data[: len(data) // 2])
    asked = request("r1", prompt)
    first.new_request(asked)
    while first.matched_tokens(asked, 0)[0] is None:
        pass
    assert first.matched_tokens(asked, 0) == (0, False)
    first.after_alloc(asked, blocks([1, 2, 3]), 0)
    turn(first, first_worker, step(new={"r1": (([1, 2, 3],), 0, 70)}))
    # Its blocks are held until they are saved; the worker's end waits for that.
    asked.num_computed_tokens, asked.status = 70, SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    first.finished(asked, ([1, 2, 3],))
    turn(first, first_worker, step())
    first_worker.shutdown()
    assert len([file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 8192]) == 2

    second, second_worker, memory = engine("second")
    asked = request("r2", prompt)
    second.new_request(asked)
    while (found := second.matched_tokens(asked, 0))[0] is None:
        pass
    assert found == (64, True)
    second.after_alloc(asked, blocks([5, 6]), 64)
    received = turn(second, second_worker, step())
    while not received:
        received = turn(second, second_worker, step())
    assert received == {"r2"}
    for block in (5, 6):
        assert memory.read(block * 8192, 8192) == data[:8192]
    second_worker.shutdown()
    second.shutdown()
    first.shutdown()


# --- Worker ---


def test_tensors_that_cannot_be_moved_are_refused_with_their_layer() -> None:
    def register(cache: Any, device: str = "cpu") -> None:
        WorkerSide(setup(), 0, cache_config(GROUP, 8), device).register({LAYER: cache})

    with pytest.raises(ConfigurationError, match=f"{LAYER}.*xpu"):
        register(tensor(device="xpu"))
    with pytest.raises(ConfigurationError, match="kv_buffer_device.*'cuda'"):
        register(tensor(), device="cuda")
    # A block's rows are apart by more than a block.
    with pytest.raises(ConfigurationError, match=LAYER):
        register(Tensor(Storage(65536), [8, 4, 32, 16], [16, 4096, 128, 1]))
    with pytest.raises(ConfigurationError, match="model.layers.0"):
        WorkerSide(setup(), 0, cache_config(GROUP, 8), "cpu").register({"other": tensor()})


def test_a_worker_without_tensors_says_so() -> None:
    worker = WorkerSide(setup(), 0, cache_config(GROUP, 8), "cpu")
    with pytest.raises(RuntimeError, match="no tensors were registered"):
        worker.results()
    worker.shutdown()


def test_a_ucx_that_is_not_there_is_named() -> None:
    worker = WorkerSide(setup(ucx="/nonexistent/libucp.so.0"), 0, cache_config(GROUP, 8), "cpu")
    with pytest.raises(EngineError, match="/nonexistent/libucp.so.0"):
        worker.register({LAYER: tensor()})


def test_nothing_can_be_asked_of_a_half_that_was_shut_down() -> None:
    side = SchedulerSide(setup())
    side.shutdown()
    side.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        side.build_step(step())


# --- Ports ---


def test_c112_eight_engines_of_a_host_have_ports_of_their_own_and_a_clash_names_the_address() -> None:
    sides = [SchedulerSide(setup(engine=f"engine-{n}")) for n in range(8)]
    assert len({side.half.address for side in sides}) == 8
    taken = (sides[0].half.address or "").rpartition(":")[2]
    # Each data-parallel rank adds its number to a fixed port.
    config = vllm_config("rank-1", side_channel_port=int(taken) - 1)
    config.parallel_config.data_parallel_index = 1
    with pytest.raises(EngineError, match=f"127.0.0.1:{taken}"):
        SchedulerSide(_setup.of("KvferryConnector", config, cache_config(GROUP, 8)))
    with pytest.raises(EngineError, match=f"127.0.0.1:{taken}"):
        SchedulerSide(setup(engine="another", side_channel_port=int(taken)))
    for side in sides:
        side.shutdown()
    # A half that was shut down listens no more, although somebody still has it.
    again = SchedulerSide(setup(engine="again", side_channel_port=int(taken)))
    again.shutdown()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_nobody_can_connect_to_is_not_told(host: str) -> None:
    with pytest.raises(EngineError, match="advertise_host"):
        SchedulerSide(setup(side_channel_host=host))
    side = SchedulerSide(setup(side_channel_host=host, advertise_host="node-1"))
    side.shutdown()


# --- Under vLLM's MultiConnector ---


def test_pairs_and_orders_that_multi_connector_cannot_serve_are_refused() -> None:
    class Connector:
        pass

    remote, storage = Connector(), Connector()
    _siblings.join(remote, "KvferryConnector", "e", "scheduler")
    _siblings.join(storage, "KvferryStorageConnector", "e", "scheduler", has_directory=True)
    with pytest.raises(ConfigurationError, match="two KvferryConnectors"):
        _siblings.join(Connector(), "KvferryConnector", "e", "scheduler")
    with pytest.raises(ConfigurationError, match="two KvferryStorageConnectors"):
        _siblings.join(Connector(), "KvferryStorageConnector", "e", "scheduler", has_directory=True)
    # Other engines and other halves are nobody's siblings.
    other = Connector()
    _siblings.join(other, "KvferryStorageConnector", "e", "worker 0", has_directory=True)
    with pytest.raises(ConfigurationError, match="must be listed before"):
        _siblings.join(Connector(), "KvferryConnector", "e", "worker 0")
    with pytest.raises(ConfigurationError, match="each block would be kept twice"):
        _siblings.join(Connector(), "KvferryConnector", "e", "worker 0", has_directory=True)
    # What was shut down, or is gone, is not there any more.
    _siblings.leave(other, "e", "worker 0")
    third = Connector()
    _siblings.join(third, "KvferryConnector", "e", "worker 0", has_directory=True)
    with pytest.raises(ConfigurationError, match="each block would be kept twice"):
        _siblings.join(other, "KvferryStorageConnector", "e", "worker 0", has_directory=True)
    del remote, storage
    _siblings.join(third, "KvferryConnector", "e", "scheduler")


def test_a_rank_with_other_settings_is_refused() -> None:
    side = SchedulerSide(setup())
    with pytest.raises(ConfigurationError, match="rank 1 of stage 0 has other settings.*VLLM_RAY_EXTRA"):
        side.publish({(0, 1): Handshake(b"", "another digest")})
    side.shutdown()


def test_settings_of_the_environment_are_part_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = setup().digest
    assert setup().digest == before != setup(lease_duration=5).digest
    monkeypatch.setenv("KVFERRY_LEASE_DURATION", "5")
    assert setup().digest != before


def test_recurrent_state_is_refused_and_a_group_is_named_by_its_members() -> None:
    MambaSpec = type("MambaSpec", (), {"block_size": 32})
    config = cache_config(GROUP, 8)
    config.kv_cache_groups[0].kv_cache_spec = MambaSpec()
    with pytest.raises(ConfigurationError, match="recurrent state .MambaSpec"):
        _setup.of("KvferryConnector", vllm_config("engine"), config)
    MLAAttentionSpec = type("MLAAttentionSpec", (), {"block_size": 32})
    texts = set()
    for spec in (MLAAttentionSpec(), SimpleNamespace(block_size=32, kv_cache_specs={"a": MLAAttentionSpec()})):
        config.kv_cache_groups[0].kv_cache_spec = spec
        texts.add(_setup.of("KvferryConnector", vllm_config("engine"), config).text)
    assert len(texts) == 1 and "MLAAttentionSpec" in texts.pop()


def test_how_far_attention_reaches_is_told_per_group() -> None:
    config = cache_config([*GROUP, *GROUP, *GROUP], 8)
    fields = {"block_size": 32, "sliding_window": 96, "attention_chunk_size": 64}
    for group, name in enumerate(("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")):
        config.kv_cache_groups[group].kv_cache_spec = type(name, (), fields)()
    text = _setup.of("KvferryConnector", vllm_config("engine"), config).text
    assert json.loads(text)["reach"] == ["all", {"window": 96}, {"chunk": 64}]


def test_storage_of_other_shapes_of_ranks_is_another_one() -> None:
    layouts = {
        json.loads(_setup.of("KvferryConnector", vllm_config("e", tp=tp, pp=pp), cache_config(GROUP, 8)).text)["layout"]
        for tp, pp in ((2, 1), (1, 2), (1, 1))
    }
    assert len(layouts) == 3


def test_groups_that_are_no_use_by_their_tokens_are_not_stored() -> None:
    config = cache_config([*GROUP, {"layer_names": ["model.layers.1.x"], "block_size": 32}], 8)
    config.prefix_cacheable_group_ids = (0,)
    store = vllm_config("e")
    store.kv_transfer_config.kv_connector_extra_config = {"shared_storage_path": "/x"}
    made = _setup.of("KvferryStorageConnector", store, config)
    assert made.groups == (0,) and made.select(([1], [2])) == ([1],)
    with pytest.raises(ConfigurationError, match="shared_storage_path.*leave it out"):
        _setup.of("KvferryConnector", vllm_config("e", shared_storage_path="/x"), config)


def test_a_foreign_handshake_is_refused() -> None:
    side = SchedulerSide(setup())
    with pytest.raises(ConfigurationError, match="handshake of another connector.*SimpleNamespace"):
        side.publish({(0, 0): SimpleNamespace()})
    side.shutdown()


# --- Messages ---


def test_messages_are_small_and_survive_pickling() -> None:
    plan = pickle.loads(pickle.dumps(Plan(b"plan")))
    assert plan.plan == b"plan"
    both = Reports(((0, b"a"),)).aggregate(Reports(((1, b"b"),)))
    assert pickle.loads(pickle.dumps(both)).reports == ((0, b"a"), (1, b"b"))
    assert pickle.loads(pickle.dumps(Handshake(b"h", "d"))).description == b"h"
    side = SchedulerSide(setup())
    assert len(side.build_step(step())) < 64
    side.shutdown()


def test_a_report_or_plan_that_is_damaged_is_an_error() -> None:
    side = SchedulerSide(setup())
    with pytest.raises(EngineError, match="report of rank 3"):
        side.on_output(SimpleNamespace(kv_connector_worker_meta=Reports(((3, b"\xc1"),))))
    side.shutdown()
    worker = WorkerSide(setup(), 0, cache_config(GROUP, 8), "cpu")
    worker.register({LAYER: tensor()})
    with pytest.raises(EngineError, match="plan of 1 bytes"):
        worker.begin(b"\xc1")
    worker.shutdown()
