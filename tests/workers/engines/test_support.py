"""The support matrix says what the engines and the workers' checks do."""

from typing import Any, get_args, get_type_hints

import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.workers.engines.support import (
    FEATURES,
    SAMPLERS,
    SUPPORT,
    able,
    fate,
    matrix,
    sampling_notes,
    sampling_table,
)
from penstock.workers.run_worker import check_settings
from penstock.workers.runners.pipeline_runner import build_engine
from tests.workers.engines.contract import ALL, ALTERNATIVES, CONTINUED, MIN_P, PENALTIES, SEEDED_RESUME, SEEDS, Subject

ENGINES = tuple(SUPPORT)


def refused(engine: str, **options: Any) -> bool:
    try:
        check_settings(WorkerSettings(engine=engine, **options))  # type: ignore[arg-type]
    except ValueError:
        return True
    return False


def test_it_has_a_column_for_every_engine_and_a_row_for_every_feature() -> None:
    kind = get_type_hints(WorkerSettings)["engine"]
    assert set(get_args(kind)) == set(ENGINES)
    head, *rows = matrix()
    assert head == ("feature", *ENGINES)
    assert [row[0] for row in rows] == list(FEATURES.values())
    assert all(len(row) == len(head) and all(row) for row in rows)


@pytest.mark.parametrize("subject", ALL, ids=lambda subject: subject.label)
def test_it_agrees_with_the_contract_that_the_engines_are_held_to(subject: Subject) -> None:
    support = SUPPORT[subject.name]
    assert bool(support.resumed_draws) == (SEEDED_RESUME not in subject.lacks)
    assert support.prefill_decode.startswith("blocks") == (subject.handoff == "blocks")
    assert support.kv_events
    assert support.logprobs
    assert support.prompt_logprobs


COLUMNS = {
    "native": "native",
    "trtllm": "TensorRT-LLM 1.2",
    "trtllm-torch-sampler": "1.2, TorchSampler",
    "vllm": "vLLM",
}


@pytest.mark.parametrize("label", COLUMNS)
def test_what_becomes_of_sampling_options_agrees_with_the_contract(label: str) -> None:
    (lacks,) = (subject.lacks for subject in ALL if subject.label == label)
    (sampler,) = (each for each in SAMPLERS if each.title == COLUMNS[label])
    for clause, options in (
        (SEEDS, ["seed"]),
        (MIN_P, ["min_p"]),
        (PENALTIES, ["repetition_penalty", "presence_penalty", "frequency_penalty"]),
        (ALTERNATIVES, ["top_logprobs"]),
    ):
        assert {fate(option, sampler) != "served" for option in options} == {clause in lacks}
    assert CONTINUED not in lacks or "constraint, continued" in sampler.notes


def test_the_table_of_sampling_options_is_whole() -> None:
    head, *rows = sampling_table()
    assert head == ("option", *(sampler.title for sampler in SAMPLERS))
    cells = [cell for row in rows for cell in row[1:]]
    assert {cell.partition(" (")[0] for cell in cells} == {"served", "reported", "refused"}
    marks = {int(cell.partition(" (")[2].rstrip(")")) for cell in cells if "(" in cell}
    assert marks == set(range(1, len(sampling_notes()) + 1))
    assert all(set(sampler.notes) <= {row[0] for row in rows} for sampler in SAMPLERS)


@pytest.mark.parametrize("engine", ENGINES)
def test_workers_refuse_what_it_does_not_name(engine: str) -> None:
    support = SUPPORT[engine]
    assert refused(engine, logits_processor=("a=m:A",)) == (not support.logits_processors)
    assert refused(engine, role="encode") == (not support.encode)
    assert refused(engine, tensor_parallel_size=2) == (support.several_gpus in ("", "the server's"))
    assert not refused(engine, role="prefill") or not support.prefill_decode


def test_an_engine_without_pictures_is_refused_for_them() -> None:
    for engine in set(ENGINES) - set(able("diffusion")):
        with pytest.raises(ValueError, match="--role diffusion runs with --engine native"):
            build_engine(WorkerSettings(engine=engine, role="diffusion", model="x"))  # type: ignore[arg-type]


def test_vllm_has_no_encode_workers_as_it_says() -> None:
    args = pytest.importorskip("penstock.workers.engines.vllm.args")
    wanted = args.VllmSettings(WorkerSettings(engine="vllm", role="encode"), 32)
    with pytest.raises(BadArguments, match="encode workers with --engine native"):
        args.resolve(wanted, {}, ())
    assert SUPPORT["vllm"].encode == "those of native"
