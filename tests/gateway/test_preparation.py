"""Large bodies are not decoded on the event loop, and not at all if they have too many values."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import preparation
from gateway.openai.prepare_context import PrepareContext
from gateway.preparation import COUNT_BYTES, LARGE_BODY, RequestPreparer, check_values
from schemas.errors import Code, ServingError
from schemas.subjects import Subjects


class Fleet:
    def __init__(self, context: PrepareContext) -> None:
        self.prepare_context = context

        self.embedding_models = SimpleNamespace(known={})

    class diffusion_models:
        known: dict[str, Any] = {}


@pytest.fixture
async def preparer(context: PrepareContext) -> Any:
    made = RequestPreparer(Fleet(context), None, None, "gw1", _Settings())  # type: ignore[arg-type]
    yield made
    await made.close()


class _Settings:
    default_deadline_s = 60.0
    always_no_store = False
    strict_options = False
    cell = -1


@pytest.mark.parametrize("endpoint", ["chat", "text", "images"])
@pytest.mark.parametrize("size", [10, 2 * LARGE_BODY])
async def test_only_large_bodies_are_prepared_in_a_thread(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch, endpoint: str, size: int
) -> None:
    threads = []

    prepared = SimpleNamespace(request=SimpleNamespace(), wanted=None)

    def prepare(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return prepared

    for name in ("prepare_chat", "prepare_completion", "prepare_images"):
        monkeypatch.setattr(preparation, name, prepare)
    kind = next(iter(preparation.PATHS)) if endpoint == "images" else endpoint
    assert await preparer.prepare(kind, b'"%b"' % (b"x" * size)) is prepared
    assert [thread is threading.main_thread() for thread in threads] == [size < LARGE_BODY]


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_ids_have_the_cell_of_their_gateway_and_lie_in_all_shards(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(_Settings, "cell", 42)
    body = {"model": "tiny", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    ids = [(await preparer.prepare(kind, json.dumps(body).encode())).request.id for _ in range(8)]
    assert {each.rpartition("-")[2][:3] for each in ids} == {"02a"}
    assert len({Subjects().shard_of(each) for each in ids}) > 1


async def test_a_body_with_far_more_values_than_the_context_has_tokens_is_refused_unread(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    monkeypatch.setattr(preparation, "prepare_completion", lambda *args, **options: decoded.append(1))
    body = json.dumps({"model": "tiny", "prompt": [1] * 400_000}).encode()
    with pytest.raises(ServingError) as refusal:
        await asyncio.wait_for(preparer.prepare("text", body), 10)
    assert refusal.value.code is Code.context_length_exceeded
    assert not decoded


@pytest.mark.parametrize("tokens", [70_000, 300_000])
async def test_lists_of_token_ids_pass_up_to_the_limit_of_embeddings_where_a_worker_makes_them(
    preparer: RequestPreparer, tokens: int
) -> None:
    body = json.dumps({"model": "vectors", "input": [[1] * tokens]}).encode()
    with pytest.raises(ServingError, match="more than 65536 values"):
        await preparer.run_for(body, len, body)
    preparer._fleet.embedding_models.known["vectors"] = object()  # type: ignore[index]
    assert await preparer.run_for(body, len, body) == len(body)
    with pytest.raises(ServingError, match="the most that embeddings take"):
        await preparer.run_for(b"," * 400_000, len, body)


def test_commas_are_counted_across_the_slices() -> None:
    body = b"," * (2 * COUNT_BYTES + 10)
    check_values(body, 2 * COUNT_BYTES + 10)
    with pytest.raises(ServingError, match="values or commas"):
        check_values(body, 2 * COUNT_BYTES + 9)


@pytest.mark.parametrize("by", ["header", "setting"])
async def test_a_background_response_that_must_not_be_stored_is_refused(
    preparer: RequestPreparer, context: PrepareContext, by: str
) -> None:
    """It could never be fetched."""
    if by == "setting":
        preparer._fleet.prepare_context = context._replace(no_store=True)
    with pytest.raises(ServingError, match="X-Penstock-No-Store, or --always-no-store") as caught:
        await preparer.prepare("response", b'{"input": "hi", "background": true}', no_store=by == "header")
    assert (caught.value.code, caught.value.param) == (Code.invalid_request, "background")
