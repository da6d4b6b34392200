"""The form in which TensorRT-LLM calls processors: its shapes, its stream, one request, one beam."""

import contextlib
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import structlog
import torch
from torch import Tensor

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.logits import ProcessorError, Registry
from penstock.workers.engines.trtllm.logits_processors import TrtllmProcessor, TrtllmProcessors, from_settings
from tests.workers.engines.logits.own import Plus
from tests.workers.engines.logits.support import OWN, VOCAB, asking, chosen, own


def form(*processors: Any, classes: tuple[str, ...] = ("Plus", "RaisesHalfway", "Returns")) -> TrtllmProcessor:
    made = TrtllmProcessors(own(*classes))(asking(*processors))
    assert made is not None
    return made


def rows(beams: int = 1, steps: int = 1) -> Tensor:
    return torch.zeros(beams, steps, VOCAB)


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens to streams, which a machine without CUDA does not have."""
    seen: list[Any] = []

    @contextlib.contextmanager
    def within(stream: Any) -> Iterator[None]:
        seen.append(("in", stream))
        yield
        seen.append("out")

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer: f"stream {pointer}")
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(Plus, "__call__", lambda self, ids, logits: seen.append("edit"))
    return seen


def test_it_has_the_signature_that_tensorrt_llm_asks_for() -> None:
    made = form(chosen("Plus", token=1))
    assert list(inspect.signature(made).parameters) == ["req_id", "logits", "token_ids", "stream_ptr", "client_id"]


def test_the_logits_of_the_request_are_edited_in_place_knowing_all_its_tokens() -> None:
    made = form(chosen("Plus", token=2, by=5.0))
    logits = rows()
    made(7, logits, [[1, 2, 3, 4]], None, None)
    assert logits[0, 0, 2] == 5
    assert logits.count_nonzero() == 1
    assert made._chain.processors[0].seen == [[1, 2, 3, 4]]  # type: ignore[attr-defined]


def test_it_works_in_the_stream_that_it_is_given(streams: list[Any]) -> None:
    form(chosen("Plus", token=1))(1, rows(), [[1]], 4711, None)
    assert streams == [("in", "stream 4711"), "edit", "out"]


def test_without_a_stream_it_works_in_the_current_one(streams: list[Any]) -> None:
    form(chosen("Plus", token=1))(1, rows(), [[1]], None)
    assert streams == ["edit"]


@pytest.mark.parametrize(
    ("req_id", "logits", "ids", "words"),
    [
        ([1, 2], rows(2), [[1], [1]], "2 requests"),
        (1, rows(2), [[1], [1]], "2 beams"),
        (1, rows(1), [[1], [1]], "2 beams"),
        (1, rows(1, 2), [[1]], "shape (1, 2, 32)"),
        (1, torch.zeros(VOCAB), [[1]], "shape (32,)"),
    ],
)
def test_anything_but_one_request_with_one_beam_is_logged_and_left_alone(
    req_id: Any, logits: Tensor, ids: Any, words: str, logged: list[Any]
) -> None:
    made = form(chosen("Plus", token=1))
    for _ in range(3):
        made(req_id, logits, ids, None, None)
    assert not logits.any()
    assert [line["processor"] for line in logged] == ["Plus"]
    assert words in logged[0]["error"]


def test_an_error_after_a_partial_write_leaves_the_logits_as_they_were(logged: list[Any]) -> None:
    made = form(chosen("RaisesHalfway"), chosen("Plus", token=1), chosen("Returns"))
    logits = rows()
    made(1, logits, [[1]], None, None)
    expected = rows()
    expected[0, 0, 1] = 1
    assert torch.equal(logits, expected)
    assert [line["processor"] for line in logged] == ["RaisesHalfway"]


def test_half_precision_is_edited_too() -> None:
    logits = rows().bfloat16()
    form(chosen("Plus", token=1))(1, logits, [[1]], None, None)
    assert logits[0, 0, 1] == 1


def test_it_travels_to_the_engines_processes() -> None:
    made = pickle.loads(pickle.dumps(form(chosen("Plus", token=3, by=2.0))))
    logits = rows()
    made([9], logits, [[1]], None, None)
    assert logits[0, 0, 3] == 2


def test_requests_without_processors_get_none_and_unknown_names_are_refused() -> None:
    processors = TrtllmProcessors(own("Plus"))
    assert processors.names == ("Plus",)
    assert processors(asking()) is None
    with pytest.raises(RequestError, match="registered: Plus"):
        processors(asking(chosen("other")))
    with pytest.raises(RequestError, match="registered: none"):
        TrtllmProcessors(Registry())(asking(chosen("Plus", token=1)))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_where_tensorrt_llm_has_none_the_flags_are_refused_and_so_are_requests(role: Any) -> None:
    apart = WorkerSettings(engine="trtllm", role=role)
    processors = from_settings(apart, modeldir.DEMO)
    assert processors.names == ()
    with pytest.raises(RequestError, match="registered: none"):
        processors(asking(chosen("temperature", temperature=1)))
    for flag in ({"logits_processor": (f"{OWN}:Plus",)}, {"default_logits_processors": '[{"name": "temperature"}]'}):
        with pytest.raises(ProcessorError):
            from_settings(msgspec.structs.replace(apart, **flag), modeldir.DEMO)
    whole = msgspec.structs.replace(apart, role="aggregated", logits_processor=(f"{OWN}:Plus",))
    made = from_settings(whole, modeldir.DEMO)
    with pytest.raises(ProcessorError, match="speculative"):
        made.without("with speculative decoding")
