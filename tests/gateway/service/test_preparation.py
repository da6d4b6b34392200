"""Large bodies are not decoded on the event loop, and not at all if they have too many values."""

import asyncio
import dataclasses
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.configs.settings import GatewaySettings
from penstock.gateway.access.authentication import Caller, Sight
from penstock.gateway.apis.responses.bodies import ResponsesRequest
from penstock.gateway.base.request_bodies import RESPONSE, PrepareContext
from penstock.gateway.service import preparation
from penstock.gateway.service.conversations import History
from penstock.gateway.service.preparation import COUNT_BYTES, LARGE_BODY, RequestPreparer, check_values
from penstock.infra.text.chat_template import ChatTemplate
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, decode
from penstock.schemas.subjects import Subjects


class Fleet:
    def __init__(self, context: PrepareContext) -> None:
        self.context = context
        self.longest = context.max_model_len
        self.embedding_models = SimpleNamespace(known={})

    def only_context(self) -> PrepareContext:
        return self.context

    def sight(self, caller: Caller) -> Sight:
        return Sight(caller.sees)

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
    template_cpu_s = 1.0
    fallback: tuple[str, ...] = ()
    fallback_after_s = 7.0


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
    kind = next(iter(preparation.IMAGE_PATHS)) if endpoint == "images" else endpoint
    assert await preparer.prepare(kind, b'"%b"' % (b"x" * size)) is prepared
    assert [thread is threading.main_thread() for thread in threads] == [size < LARGE_BODY]


@pytest.mark.parametrize("named_bytes", [0, 2 * LARGE_BODY])
async def test_items_that_a_small_body_names_are_prepared_in_a_thread_if_they_are_large(
    context: PrepareContext, monkeypatch: pytest.MonkeyPatch, named_bytes: int
) -> None:
    threads = []

    class Stored:
        async def history(self, previous: str | None, sight: Any) -> History:
            return History()

        async def without_references(self, body: ResponsesRequest, sight: Any) -> tuple[ResponsesRequest, int]:
            return body, named_bytes

    def prepare(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())

    def encode(*args: Any) -> Any:
        threads.append(threading.current_thread())
        raise ServingError(Code.invalid_request, "no")

    monkeypatch.setattr(preparation, "prepare_response", prepare)
    monkeypatch.setattr(preparation, "encode_stored", encode)
    made = RequestPreparer(Fleet(context), None, Stored(), "gw1", _Settings())  # type: ignore[arg-type]
    with pytest.raises(ServingError, match="no"):
        await made.prepare(RESPONSE, b'{"input": "a"}')
    await made.close()
    assert [thread is threading.main_thread() for thread in threads] == [not named_bytes] * 2


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_ids_have_the_cell_of_their_gateway_and_lie_in_all_shards(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(preparer, "_cell", lambda: 42)
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
    preparer.fleet.embedding_models.known["vectors"] = object()  # type: ignore[index]
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
        preparer.fleet.context = context._replace(no_store=True)
    with pytest.raises(ServingError, match="X-Penstock-No-Store, or --always-no-store") as caught:
        await preparer.prepare("response", b'{"input": "hi", "background": true}', no_store=by == "header")
    assert (caught.value.code, caught.value.param) == (Code.invalid_request, "background")


SLOW = "{% for m in messages %}{% for n in messages %}{% for o in messages %}{% endfor %}{% endfor %}{% endfor %}"


def chat(count: int) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a"}] * count}).encode()


def with_template(preparer: RequestPreparer, source: str) -> None:
    context = preparer.fleet.context
    model = dataclasses.replace(context.model, template=ChatTemplate(source, {}))
    preparer.fleet.context = context._replace(model=model)  # type: ignore[misc]


@pytest.mark.parametrize("count", [200, 3_001], ids=["on the event loop", "in a thread"])
async def test_a_template_that_takes_too_long_is_ended(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The small body is tried on the event loop first, and then in a thread, where it may take longer."""
    monkeypatch.setattr(_Settings, "template_cpu_s", 0.05)
    with_template(preparer, SLOW + "{{ messages[0].content }}")
    with pytest.raises(ServingError, match=r"more than 0\.05 s of CPU time \(--template-cpu-s") as caught:
        await preparer.prepare("chat", chat(count))
    assert (caught.value.code, caught.value.param) == (Code.invalid_request, "messages")


async def test_a_small_body_whose_template_takes_long_is_prepared_in_a_thread(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(preparer, SLOW + "{{ messages[0].content }}")
    monkeypatch.setattr(_Settings, "template_cpu_s", 60.0)
    monkeypatch.setattr(preparation, "INLINE_CPU_S", 0.0)
    threads = []
    original = preparation.prepare_chat

    def prepare(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return original(*args, **options)

    monkeypatch.setattr(preparation, "prepare_chat", prepare)
    prepared = await preparer.prepare("chat", chat(40))
    assert prepared.prompt_tokens > 0
    assert threads == [True, False]


async def test_other_tenants_are_served_while_one_holds_all_threads_that_it_may(preparer: RequestPreparer) -> None:
    release, begun = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        begun.release()
        release.wait(30)

    held = [asyncio.create_task(preparer._in_thread("many", 1, hold)) for _ in range(5)]
    try:
        for _ in range(preparation.PER_TENANT):
            await asyncio.to_thread(begun.acquire)
        caller = Caller("few", None)
        large = chat(2) + b" " * LARGE_BODY
        assert (await asyncio.wait_for(preparer.prepare("chat", large, caller=caller), 30)).prompt_tokens
        assert not any(task.done() for task in held)
    finally:
        release.set()
    await asyncio.gather(*held)


async def test_a_chat_with_too_many_messages_is_refused_before_it_is_rendered(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTemplate, "render", None)
    context = preparer.fleet.context
    preparer.fleet.context = context._replace(max_messages=100)  # type: ignore[misc]
    with pytest.raises(ServingError, match=r"messages has 101 entries; the limit is 100 \(--max-messages\)"):
        await preparer.prepare("chat", chat(101))


async def test_messages_that_cannot_fit_are_refused_before_they_are_rendered(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = preparer.fleet.context
    assert context.model.template is not None
    assert context.model.template.keeps_texts
    monkeypatch.setattr(ChatTemplate, "render", None)
    size = context.max_model_len * context.model.detokenizer.longest_bytes // 99
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a" * size}] * 100}
    with pytest.raises(ServingError, match=r"the prompt is too long: at least \d+ tokens > \d+\.") as caught:
        await preparer.prepare("chat", json.dumps(body).encode())
    assert caught.value.code is Code.context_length_exceeded


class _TwoModels(Fleet):
    """Models tiny and small, of which a caller may name what its key says."""

    names = ("tiny", "alias", "small")

    def __init__(self, context: PrepareContext, *, lacks: str = "") -> None:
        super().__init__(context)
        small = context._replace(names=("small",), worker_max_model_len=64)
        self.contexts = {"tiny": context, "alias": context, "small": small}
        self.contexts.pop(lacks, None)

    async def context_for(self, name: str, caller: Caller) -> PrepareContext:
        if name not in self.contexts or not caller.may_name(name):
            raise ServingError(Code.model_not_found, f"no {name}", param="model")
        return self.contexts[name]


async def with_fallback(fleet: Fleet, given: tuple[str, ...], body: dict[str, Any], caller: Caller) -> GenerateRequest:
    settings = _Settings()
    settings.fallback = given
    made = RequestPreparer(fleet, None, None, "gw1", settings)  # type: ignore[arg-type]
    try:
        return (await made.prepare("chat", json.dumps(body).encode(), caller=caller)).request
    finally:
        await made.close()


HELLO = {"model": "alias", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
ALL = Caller("acme", "acme")


async def test_a_request_is_prepared_for_its_fallbacks_too_as_far_as_its_key_may_name_them(
    context: PrepareContext,
) -> None:
    fleet = _TwoModels(context)
    asked = await with_fallback(fleet, ("alias=absent", "small"), HELLO, ALL)
    assert (asked.model, asked.asked, asked.fallback_after_s) == ("tiny", "", 7.0)
    (other,) = asked.fallbacks
    small = decode(other.request)
    assert (other.model, small.model, small.id, small.tenant) == ("small", "small", asked.id, "acme")
    assert not (await with_fallback(fleet, ("tiny=small",), HELLO, Caller("a", "a", models=["alias"]))).fallbacks
    assert (await with_fallback(fleet, ("tiny=small",), HELLO, Caller("a", "a", models=["alias", "small"]))).fallbacks
    assert not (await with_fallback(fleet, ("small=tiny",), HELLO, ALL)).fallbacks, "others have them"
    assert not (await with_fallback(fleet, ("tiny=small",), HELLO | {"worker": "w"}, ALL)).fallbacks


async def test_a_fallback_that_cannot_take_a_request_is_left_out(context: PrepareContext) -> None:
    long = HELLO | {"messages": [{"role": "user", "content": "hello " * 200}]}
    assert not (await with_fallback(_TwoModels(context), ("tiny=small",), long, ALL)).fallbacks


async def test_a_model_that_is_not_known_is_answered_by_its_fallback_from_the_start(context: PrepareContext) -> None:
    fleet = _TwoModels(context, lacks="small")
    asked = await with_fallback(fleet, ("small=tiny",), HELLO | {"model": "small"}, ALL)
    assert (asked.model, asked.asked, asked.fallbacks) == ("tiny", "small", ())
    with pytest.raises(ServingError, match="no small"):
        await with_fallback(fleet, ("small=tiny",), HELLO | {"model": "small"}, Caller("a", "a", models=["small"]))
    with pytest.raises(ServingError, match="no small"):
        await with_fallback(fleet, ("small=tiny",), HELLO | {"model": "small"}, Caller("a", "a", models=["tiny"]))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://169.254.169.254/latest/meta-data", "private, local or reserved"),
        ("https://inside.example/a.png", "private, local or reserved"),
        ("http://0x7f.1/a.png", "private, local or reserved"),
        ("http://public.example:4222/", "only 80 and 443"),
        ("https://nowhere.example/a.png", "address is not found"),
        ("https://public.example/a.png", ""),
    ],
)
async def test_no_server_of_chats_is_sent_where_a_client_may_not_have_the_gateway_look(
    url: str, words: str, private: bool, context: PrepareContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        if host == "nowhere.example":
            raise OSError("unknown")
        found = {"inside.example": ["8.8.8.8", "10.0.0.7"], "public.example": ["8.8.8.8"], "0x7f.1": ["127.0.0.1"]}
        return found.get(host, [host])

    monkeypatch.setattr("penstock.gateway.media.download.resolve", resolve)
    settings = GatewaySettings(allow_private_media_addresses=private)
    made = RequestPreparer(Fleet(context._replace(carries_chat=True)), None, None, "gw1", settings)  # type: ignore[arg-type]
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    try:
        if words and not private:
            with pytest.raises(ServingError, match=words) as found:
                await made.prepare("chat", body)
            assert found.value.param == "messages[0].content[1].image_url"
        else:
            assert url.encode() in (await made.prepare("chat", body)).request.chat
    finally:
        await made.close()
