"""Which workers `penstock up` starts, with which arguments, on which GPUs: pure, and from the real recipes."""

import contextlib
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.flags import flags_of
from penstock.configs.settings import GatewaySettings, RouterSettings, WorkerSettings
from penstock.configs.up_settings import UpSettings
from penstock.infra.engine_args.tree import BadArguments, parse_yaml
from penstock.infra.process.sockets import CannotListen, listening
from penstock.launch.deployment import read_args
from penstock.launch.gateways import gateway_range
from penstock.launch.groups import PlanError, WorkerFleet, WorkerGroup, assign, fleet_of, gpus_of
from penstock.launch.machine import check_named, gpus, held_run
from penstock.launch.plan import PlannedProcess, passed, plan, sized
from penstock.launch.plan import workers as plan_workers
from penstock.launch.recipes import catalogue
from penstock.launch.state import CellCounts

KNOWN = catalogue.members()


def fleet(**given: Any) -> WorkerFleet:
    up = UpSettings(**given)
    return fleet_of(up, catalogue.select(up.recipe, KNOWN) if up.recipe else (), read_args)


def workers(*, gpus: tuple[str, ...] | None = None, **given: Any) -> dict[str, PlannedProcess]:
    up = sized(UpSettings(**given), fleet(**given), 2)
    children = plan(
        up, fleet(**given), ports=[8000], url=lambda role, cell: "nats://h:1", sys_url=lambda cell: "", cores=8,
        gpus=gpus, metrics_ports=range(9100, 9200),
    )  # fmt: skip
    return {child.name: child for child in children}


def settings_of(child: PlannedProcess, *fields: str) -> list[Any]:
    return [getattr(child.settings, field) for field in fields]


# -- recipes ----------------------------------------------------------------------------------------------------------


def test_a_recipe_brings_engine_model_roles_files_and_gpus() -> None:
    found = workers(engine="trtllm", recipe="gpt_oss_120b", gpus=tuple(map(str, range(8))))
    assert [name for name in found if found[name].role == "worker"] == ["prefill-0", "decode-0"]
    for name, devices in (("prefill-0", ("0", "1", "2", "3")), ("decode-0", ("4", "5", "6", "7"))):
        child = found[name]
        assert child.gpus == devices  # as the recipe's own header has it
        assert settings_of(child, "role", "engine", "model", "max_model_len") == [
            name.partition("-")[0], "trtllm", "openai/gpt-oss-120b", 36864,
        ]  # fmt: skip
        assert Path(settings_of(child, "extra_engine_args")[0]).name == f"gpt-oss-120b-{name.partition('-')[0]}.yaml"
        assert child.environ({})["CUDA_VISIBLE_DEVICES"] == ",".join(devices)
    assert settings_of(found["gateway-0"], "model", "block_size") == [("openai/gpt-oss-120b",), 32]
    assert "CUDA_VISIBLE_DEVICES" not in found["router-0"].environ({})


def test_a_set_with_an_aggregated_recipe_starts_that_and_splits_when_asked() -> None:
    assert [(group.role, group.number) for group in fleet(recipe="llama3").groups] == [("aggregated", 1)]
    split = fleet(recipe="llama3", prefill=2, decode=1)
    assert [(group.role, group.number, group.gpus) for group in split.groups] == [("prefill", 2, 1), ("decode", 1, 1)]
    assert [group.role for group in fleet(recipe="llava16", prefill=1, decode=1, encode=1).groups] == [
        "prefill", "decode", "encode",
    ]  # fmt: skip


def test_one_recipe_by_its_own_name_is_that_file_only() -> None:
    (group,) = fleet(recipe="llama3-agg").groups
    assert Path(group.settings["extra_engine_args"]).stem == "llama3-agg"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"recipe": "gpt-oss-120"}, "did you mean gpt-oss-120b"),
        ({"recipe": "llama3", "engine": "vllm"}, "recipe llama3 is for trtllm; leave --engine out"),
        ({"recipe": "llama3", "block_size": 64}, "--block-size 64: the recipe's files say 32"),
        ({"recipe": "llama4-eagle-gb200"}, "2 nodes.*penstock recipe show llama4-eagle-gb200-decode.*kubernetes"),
        ({"extra_engine_args": "x.yaml"}, "read by trtllm, vllm and sglang, not by native"),
        ({"engine": "trtllm", "extra_engine_args": "/no/such.yaml"}, "No such file"),
        ({"engine": "trtllm", "override_engine_args": "{"}, "--override-engine-args: not JSON"),
        ({"engine": "mock", "tensor_parallel_size": 2}, "only native, trtllm, vllm and sglang share layers, not mock"),
        ({"prefill_engine_args": "x.yaml"}, "--prefill-engine-args: no prefill worker is started; add --prefill N"),
        (
            {"engine": "trtllm", "workers": 1, "decode_engine_args": "x.yaml"},
            "--decode-engine-args: no decode worker is started",
        ),
        ({"diffusion": 1}, "--diffusion needs --diffusion-model"),
        ({"parser_families": "/no/such.toml"}, "--parser-families /no/such.toml: No such file"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(given: dict[str, Any], says: str) -> None:
    with pytest.raises((PlanError, BadArguments), match=says):
        fleet(**given)


@pytest.mark.parametrize("flag", ["reasoning_parser", "tool_call_parser"])
def test_an_unknown_parser_is_refused_with_the_nearest_ones(flag: str) -> None:
    with pytest.raises(PlanError, match=f"--{flag.replace('_', '-')} 'glm46' is not a format of .*nearest: .*glm45"):
        fleet(**{flag: "glm46"})
    fleet(**{flag: "none"})
    fleet(**{flag: "gpt_oss"})


WINDOWS = "kv_cache_config: {max_attention_window: [%s, 8192]}"


@pytest.mark.parametrize(
    ("prefill", "decode", "says"),
    [
        (WINDOWS % 512, WINDOWS % 1024, "kv_cache_config.max_attention_window differs.*use the same value for all"),
        (WINDOWS % 512, "{}", "max_attention_window differs.*512,8192.*None"),
        ("{}", "kv_cache_config: {dtype: fp8}", "kv_cache_config.dtype differs"),
        ("cache_transceiver_config: {backend: UCX}", "{}", "cache_transceiver_config.backend.*UCX.*NIXL"),
        ("max_seq_len: 9000", "max_seq_len: 8000", "max_seq_len.*raise decode's to 9000"),
        (WINDOWS % 512, WINDOWS % 512, ""),
        ("cache_transceiver_config: {backend: DEFAULT}", "cache_transceiver_config: {backend: NIXL}", ""),
        ("max_batch_size: 4", "max_batch_size: 128", ""),
    ],
)
def test_prefill_and_decode_whose_kv_does_not_fit_are_not_started(
    tmp_path: Path, prefill: str, decode: str, says: str
) -> None:
    paths = {role: tmp_path / f"{role}.yaml" for role in ("prefill", "decode")}
    for role, text in (("prefill", prefill), ("decode", decode)):
        paths[role].write_text(text)
    given: dict[str, Any] = {
        "engine": "trtllm", "model": "m", "prefill": 1, "decode": 1,
        "prefill_engine_args": str(paths["prefill"]), "decode_engine_args": str(paths["decode"]),
    }  # fmt: skip
    if not says:
        assert [group.role for group in fleet(**given).groups] == ["prefill", "decode"]
        return
    with pytest.raises(PlanError, match=says):
        fleet(**given)


def test_a_file_of_a_role_goes_before_the_common_one_and_the_recipe(tmp_path: Path) -> None:
    for name, ranks in (("all", 1), ("decode", 4)):
        (tmp_path / f"{name}.yaml").write_text(f"tensor_parallel_size: {ranks}\n")
    common, own = str(tmp_path / "all.yaml"), str(tmp_path / "decode.yaml")
    groups = fleet(
        engine="vllm", prefill=1, decode=1, extra_engine_args=common, decode_engine_args=own, model=("m",)
    ).groups
    assert [(group.settings["extra_engine_args"], group.gpus) for group in groups] == [(common, 1), (own, 4)]
    groups = fleet(recipe="llama3", prefill=1, decode=1, decode_engine_args=own).groups
    assert [(Path(group.settings["extra_engine_args"]).stem, group.gpus) for group in groups] == [
        ("llama3-prefill", 1), ("decode", 4),
    ]  # fmt: skip


# -- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "text", "flag", "count"),
    [
        ("trtllm", "", 0, 1),
        ("trtllm", "", 4, 4),
        ("trtllm", "tensor_parallel_size: 2\npipeline_parallel_size: 4", 8, 8),
        ("trtllm", "backend: _autodeploy\nworld_size: 2", 0, 2),
        ("vllm", "data_parallel_size: 2", 2, 4),
        ("vllm", "tensor_parallel_size: null", 2, 1),
        ("sglang", "dp_size: 2", 2, 4),
    ],
)
def test_gpus_of_an_engine_are_the_product_of_its_parallel_sizes(engine: str, text: str, flag: int, count: int) -> None:
    assert gpus_of(engine, parse_yaml(text), flag) == count


def test_the_override_decides_over_file_and_flag() -> None:
    (group,) = fleet(engine="trtllm", tensor_parallel_size=2, override_engine_args='{"tensor_parallel_size": 8}').groups
    assert group.gpus == 8


def test_too_few_gpus_name_what_is_needed_and_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"8 GPUs are needed \(1 x prefill with 4, 1 x decode with 4\), 6 may be used"):
        workers(recipe="gpt-oss-120b", gpus=tuple("012345"))
    with pytest.raises(PlanError, match=r"^1 GPU is needed .*, none is seen here: start it on .*--gpus none"):
        workers(engine="vllm", gpus=())
    with pytest.raises(PlanError, match="lower --tensor-parallel-size"):  # pictures need one of their own
        workers(engine="trtllm", diffusion=1, diffusion_model="d", workers=1, gpus=("0",))


def test_native_workers_share_what_there_is_and_mock_ones_see_none_of_it() -> None:
    found = workers(engine="native", workers=3, gpus=("0", "1"))
    assert [found[f"worker-{i}"].gpus for i in range(3)] == [("0",), ("1",), ("0",)]
    assert workers(engine="mock", workers=1, gpus=("0",))["worker-0"].gpus is None
    assert workers(engine="native", workers=1, gpus=())["worker-0"].gpus is None  # it computes on processors
    assert workers(engine="trtllm", workers=1)["worker-0"].gpus is None  # left to the engine


def test_native_workers_that_share_layers_have_their_gpus_alone_and_compute_on_processors_where_there_are_none() -> (
    None
):
    found = workers(engine="native", workers=2, tensor_parallel_size=2, gpus=tuple("0123"))
    assert [found[f"worker-{i}"].gpus for i in range(2)] == [("0", "1"), ("2", "3")]
    with pytest.raises(PlanError, match=r"4 GPUs are needed .*, 3 may be used .*lower --tensor-parallel-size"):
        workers(engine="native", workers=2, tensor_parallel_size=2, gpus=tuple("012"))
    assert workers(engine="native", workers=1, tensor_parallel_size=2, gpus=())["worker-0"].gpus is None
    assert workers(engine="native", workers=1, tensor_parallel_size=2)["worker-0"].gpus is None


GROUPS = st.lists(
    st.builds(
        WorkerGroup,
        role=st.sampled_from(["aggregated", "prefill", "decode", "encode"]),
        number=st.integers(1, 3),
        settings=st.just({"engine": "trtllm"}),
        arguments=st.just({}),
        gpus=st.integers(1, 4),
        alone=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda group: group.role,
)


@given(GROUPS, st.integers(1, 24))
def test_an_engine_has_its_gpus_alone_and_all_of_them(groups: list[WorkerGroup], count: int) -> None:
    groups = [group if group.alone else group._replace(gpus=1) for group in groups]
    there = tuple(map(str, range(count)))
    alone = sum(group.number * group.gpus for group in groups if group.alone)
    sharing = any(not group.alone for group in groups)
    if alone + sharing > count:
        with pytest.raises(PlanError, match="GPUs are needed"):
            assign(groups, there)
        return
    found = assign(groups, there)
    owned = [gpu for group in groups if group.alone for name in group.names for gpu in found[name]]
    assert owned == list(there[:alone])
    for group in groups:
        for name in group.names:
            assert len(found[name]) == group.gpus
            assert group.alone or found[name][0] in there[alone:]


def test_gpus_come_from_the_flag_the_environment_or_the_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus((), {}, tmp_path) == ("0", "1")
    assert gpus((), {"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}, tmp_path) == ("3", "GPU-ab")
    for nothing in ("", "-1", "NoDevFiles"):
        assert gpus((), {"CUDA_VISIBLE_DEVICES": nothing}, tmp_path) == ()
    assert gpus((), {"CUDA_VISIBLE_DEVICES": "1,MIG-4c60,-1,0"}, tmp_path) == ("1", "MIG-4c60"), "as CUDA does"
    assert gpus(("2",), {"CUDA_VISIBLE_DEVICES": "3"}, tmp_path) == ("2",)
    assert gpus(("none",), {}, tmp_path) is None


def test_gpus_that_are_named_and_not_there_are_refused_instead_of_replaced_by_processors(tmp_path: Path) -> None:
    native, mock = fleet(engine="native", model=("/m",)).groups, fleet(engine="mock", model=("/m",)).groups
    for named in ((), ("none",)):
        check_named(named, native, tmp_path)
    check_named(("0",), mock, tmp_path)
    with pytest.raises(PlanError, match=r"--gpus 0,1: there is no GPU here .* leave --gpus out to serve on processors"):
        check_named(("0", "1"), native, tmp_path)
    (tmp_path / "nvidia4").touch()  # CUDA counts what it sees from 0
    check_named(("0",), native, tmp_path)
    check_named(("GPU-ab", "MIG-4c60"), native, tmp_path)
    with pytest.raises(PlanError, match=r"--gpus 0,4: there is no GPU 4 here, only GPU 0"):
        check_named(("0", "4"), native, tmp_path)
    for before, other in zip(("nvidia4", "dxg", "kfd"), ("dxg", "kfd", "nvhost-gpu"), strict=True):
        (tmp_path / before).rename(tmp_path / other)
        check_named(("1",), native, tmp_path)


def test_a_native_worker_of_a_named_gpu_starts_on_it_or_not_at_all() -> None:
    for named, device in (("0",), "cuda"), ((), None), (("none",), None):
        up = UpSettings(engine="native", model=("/m",), diffusion=1, diffusion_model="/d", gpus=named)
        found = [settings.get("device") for _, settings in plan_workers(up, fleet_of(up, (), read_args), 8)]
        assert found == [device] * 2


# -- pictures, flags, ports -------------------------------------------------------------------------------------------


def test_pictures_come_alone_or_beside_a_language_model() -> None:
    alone = workers(diffusion=2, diffusion_model="/d", diffusion_served_name="painter")
    assert [name for name in alone if alone[name].role == "worker"] == ["diffusion-0", "diffusion-1"]
    assert settings_of(alone["diffusion-1"], "role", "engine", "model", "served_model_name") == [
        "diffusion", "native", "/d", "painter",
    ]  # fmt: skip
    assert settings_of(alone["gateway-0"], "model") == [()]  # nobody asked for a language model
    beside = workers(engine="mock", model=("/m",), diffusion=1, diffusion_model="/d", served_model_name="talker")
    assert {"worker-0", "diffusion-0"} <= set(beside)
    assert settings_of(beside["diffusion-0"], "served_model_name") == [""]
    assert settings_of(beside["worker-0"], "served_model_name") == ["talker"]


def test_logits_processors_reach_the_workers_that_have_logits() -> None:
    found = workers(engine="native", workers=1, encode=1, logits_processor=("a=m:A", "b=m:B"))
    assert settings_of(found["worker-0"], "logits_processor") == [("a=m:A", "b=m:B")]
    assert settings_of(found["encode-0"], "logits_processor") == [()]


@pytest.mark.parametrize("kind", [WorkerSettings, RouterSettings, GatewaySettings])
def test_a_flag_of_up_goes_through_to_every_process_that_has_it(kind: Any) -> None:
    ours = {flag.field: flag for flag in flags_of(UpSettings)}
    theirs = {flag.field: flag for flag in flags_of(kind)}
    names = passed(UpSettings(), kind)
    assert set(theirs) & set(ours) - set(names) <= {
        "model", "served_model_name", "engine", "http_port", "metrics_port", "threads", "nats_url", "cell_nats_urls",
    }  # fmt: skip
    assert {"log_level", "namespace"} <= set(names)
    for name in names:
        assert ours[name].kind == theirs[name].kind, name


def test_each_worker_and_router_gets_a_metrics_port_in_a_row() -> None:
    found = workers(engine="mock", prefill=1, decode=2, routers=2)
    names = ["prefill-0", "decode-0", "decode-1", "router-0", "router-1"]
    assert [found[name].metrics_port for name in names] == [9100, 9101, 9102, 9103, 9104]
    assert found["gateway-0"].metrics_port == 0


def numbers(sockets: list[socket.socket]) -> list[int]:
    return [sock.getsockname()[1] for sock in sockets]


def test_ports_in_a_row_are_free_and_a_taken_one_is_named() -> None:
    with contextlib.ExitStack() as opened:
        held = [opened.enter_context(sock) for sock in held_run(0, 3)]
        ports = numbers(held)
        assert ports == list(range(ports[0], ports[0] + 3))
        held[1].listen()
        with pytest.raises(CannotListen, match=rf"--metrics-port: port {ports[1]} is in use"):
            held_run(ports[0], 3)
    with pytest.raises(PlanError, match="beyond port 65535"):
        held_run(65535, 2)
    assert held_run(0, 0) == []


def test_deployments_that_start_at_once_choose_other_ports_and_their_own_servers_listen_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that chose a port need not listen there yet."""
    with contextlib.ExitStack() as opened:
        free = numbers([opened.enter_context(sock) for sock in held_run(0, 4)])
    tried = iter([free[0], free[0], free[1], free[2]])
    monkeypatch.setattr("random.randrange", lambda *_: next(tried))
    with contextlib.ExitStack() as opened:
        first = [opened.enter_context(sock) for sock in held_run(0, 2)]
        second = [opened.enter_context(sock) for sock in held_run(0, 2)]
        assert numbers(first) + numbers(second) == free
        opened.enter_context(listening("127.0.0.1", free[1]))


def test_an_embedding_model_gets_workers_of_the_role_that_serves_it() -> None:
    def found(**given: Any) -> dict[str, PlannedProcess]:
        up = UpSettings(**given)
        whole = fleet_of(up, makes_vectors=lambda model: model == "/bert")
        up = sized(up, whole, 2)
        children = plan(up, whole, ports=[8000], url=lambda role, cell: "nats://h:1", sys_url=lambda cell: "", cores=8)
        return {child.name: child for child in children}

    alone = found(model=("/bert",), served_model_name="vec", workers=2)
    assert [name for name in alone if alone[name].role == "worker"] == ["embed-0", "embed-1"]
    assert settings_of(alone["embed-1"], "role", "engine", "model", "served_model_name") == [
        "embed", "native", "/bert", "vec",
    ]  # fmt: skip
    assert settings_of(alone["gateway-0"], "model") == [()]
    beside = found(model=("/talker",), embed=1, embed_model="/bert", engine="mock")
    assert settings_of(beside["worker-0"], "role", "model") == ["aggregated", "/talker"]
    assert settings_of(beside["embed-0"], "role", "engine", "model") == ["embed", "mock", "/bert"]
    same = found(model=("/talker",), embed=1)
    assert settings_of(same["embed-0"], "model") == ["/talker"], "a decoder's vectors beside its text"
    assert settings_of(same["gateway-0"], "model") == [("/talker",)]
    only = found(model=("/talker",), embed=1, workers=0)
    assert settings_of(only["gateway-0"], "model") == [()], "a gateway is ready without workers for text"
    with pytest.raises(PlanError, match="--prefill: --model /bert makes embeddings and generates no text"):
        found(model=("/bert",), prefill=1, decode=1)


def test_several_models_have_workers_each_behind_the_same_gateways() -> None:
    found = workers(engine="mock", model=("/models/Llama 3", "small=/models/qwen"), workers=2, gateways="2")
    names = ["llama-3-worker-0", "llama-3-worker-1", "small-worker-0", "small-worker-1"]
    assert [name for name in found if found[name].role == "worker"] == names
    assert settings_of(found["llama-3-worker-1"], "model", "served_model_name") == ["/models/Llama 3", ""]
    assert settings_of(found["small-worker-0"], "model", "served_model_name") == ["/models/qwen", "small"]
    for gateway in ("gateway-0",):
        assert settings_of(found[gateway], "model", "served_model_name", "learn_models") == [
            ("/models/Llama 3", "small=/models/qwen"), "", True,
        ]  # fmt: skip
    pairs = workers(engine="mock", model=("/a", "/b"), prefill=1, decode=1)
    assert [name for name in pairs if pairs[name].role == "worker"] == [
        "a-prefill-0", "a-decode-0", "b-prefill-0", "b-decode-0",
    ]  # fmt: skip


def test_one_model_can_be_named_in_its_flag() -> None:
    named = fleet_of(UpSettings(model=("x=/models/m",), engine="mock"))
    assert named.model == "/models/m"
    with pytest.raises(PlanError, match="leave --served-model-name out"):
        fleet_of(UpSettings(model=("x=/models/m",), served_model_name="y"))


def test_each_of_several_models_gets_gpus_of_its_own_where_its_engine_needs_them() -> None:
    found = workers(engine="vllm", model=("/a", "/b"), tensor_parallel_size=2, gpus=tuple("0123"))
    assert {name: found[name].gpus for name in ("a-worker-0", "b-worker-0")} == {
        "a-worker-0": ("0", "1"), "b-worker-0": ("2", "3"),
    }  # fmt: skip
    with pytest.raises(PlanError, match="4 GPUs are needed"):
        workers(engine="vllm", model=("/a", "/b"), tensor_parallel_size=2, gpus=tuple("012"))


def test_a_model_that_makes_vectors_stands_beside_one_for_text() -> None:
    up = UpSettings(model=("/talker", "vec=/bert"), engine="mock")
    whole = fleet_of(up, makes_vectors=lambda model: model == "/bert")
    assert [group.names for group in whole.groups] == [["talker-worker-0"], ["vec-embed-0"]]
    assert whole.groups[1].settings["served_model_name"] == "vec"
    assert whole.models == ("/talker",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"served_model_name": "x"}, "--served-model-name is for one model, and --model names 2: name each with"),
        ({"recipe": "gpt-oss-120b"}, "--recipe is for one model"),
        ({"chat_template": "/t.jinja"}, "--chat-template is for one model"),
        ({"speculative_model": "ngram"}, "--speculative-model is for one model"),
        ({"embed": 1}, "needs --embed-model"),
        ({"model": ("/x/m", "/y/m")}, "would both be called 'm': name them with --model NAME=FOLDER"),
        ({"model": ("/x/m", "m=/y")}, "would both be called 'm'"),
    ],
)
def test_what_is_said_of_one_model_is_refused_with_several(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        fleet(**({"model": ("/a", "/b"), "engine": "mock"} | given))


# -- numbers of gateways and cells ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "cores", "there", "gateways", "cells"),
    [
        ({"workers": 4}, 16, 0, 8, 1),
        ({"workers": 8}, 16, 0, 8, 4),
        ({"workers": 8}, 8, 0, 4, 2),
        ({"workers": 8}, 128, 0, 16, 4),
        ({"workers": 32}, 32, 0, 16, 8),
        ({"workers": 1}, 16, 0, 2, 1),
        ({"workers": 4}, 2, 0, 1, 1),
        ({"workers": 4}, 1, 0, 1, 1),
        ({"prefill": 2, "decode": 14}, 32, 0, 16, 1),
        ({"prefill": 8, "decode": 8}, 32, 0, 16, 4),
        ({"workers": 4, "gateways": "3"}, 16, 0, 3, 1),
        ({"workers": 4, "cells": 2}, 16, 0, 8, 2),
        ({"workers": 8}, 16, 1, 8, 1),
        ({"workers": 4}, 2, 4, 1, 4),
        ({"workers": 8, "nats_url": "nats://h:4222"}, 16, 0, 8, 1),
    ],
)
def test_gateways_and_cells_suit_the_cores_and_the_workers(
    given: dict[str, Any], cores: int, there: int, gateways: int, cells: int
) -> None:
    up = UpSettings(engine="mock", **given)
    fleet = fleet_of(up)
    chosen = gateway_range(up.gateways, cores, sum(group.number for group in fleet.groups))
    assert (chosen.first, sized(up, fleet, cores, CellCounts(there, there)).cells) == (gateways, cells)


@pytest.mark.parametrize(
    ("given", "there", "cells"), [({"cells": 2}, (4, 4), 4), ({}, (4, 1), 4), ({"cells": 5}, (4, 1), 5)]
)
def test_a_folder_keeps_its_cells_whatever_their_number_is_to_be(
    given: dict[str, Any], there: tuple[int, int], cells: int
) -> None:
    up = UpSettings(engine="mock", workers=5, **given)
    assert sized(up, fleet_of(up), 16, CellCounts(*there)).cells == cells


def test_each_cell_has_workers() -> None:
    up = UpSettings(engine="mock", prefill=1, decode=3, cells=2)
    with pytest.raises(PlanError, match="a role has 1"):
        sized(up, fleet_of(up), 16)


def test_vllm_has_native_encode_workers_without_its_arguments() -> None:
    """Its workers take their embeddings."""
    found = workers(engine="vllm", prefill=1, decode=1, encode=1, override_engine_args="{}", tensor_parallel_size=2)
    assert settings_of(found["encode-0"], "engine", "tensor_parallel_size", "override_engine_args") == ["native", 1, ""]
    assert settings_of(found["decode-0"], "engine", "tensor_parallel_size", "override_engine_args") == ["vllm", 2, "{}"]
