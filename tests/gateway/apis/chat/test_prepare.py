import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.chat import prompt
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest, prepare_chat, prepare_completion
from penstock.gateway.apis.messages.prepare_message import prepare_message
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.gateway.service.preparation import LARGE_BODY
from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir
from penstock.schemas.block_hashes import chain, root
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority, decode
from penstock.schemas.wire import encode, pack_tokens, unpack_tokens
from tests.properties import examples
from tests.tiny_model import CORPUS, write

NOW = 1_700_000_000 * 10**9


def chat(context: PrepareContext, content: Any = "hi", **options: Any) -> PreparedRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **options}
    return prepare_chat(json.dumps(body).encode(), context, now_ns=NOW, request_id="r")


def text(context: PrepareContext, prompt: Any = "hi", **options: Any) -> PreparedRequest:
    return prepare_completion(
        json.dumps({"model": "tiny", "prompt": prompt, **options}).encode(), context, now_ns=NOW, request_id="r"
    )


def refusal(call: Any, *args: Any, **options: Any) -> ServingError:
    with pytest.raises(ServingError) as caught:
        call(*args, **options)
    return caught.value


def test_a_chat_becomes_template_tokens_and_block_names(context: PrepareContext) -> None:
    done = chat(context, CORPUS[:200], max_tokens=7, cache_salt="tenant")
    request, model = done.request, context.model
    expected = f"<|im_start|>user\n{CORPUS[:200]}<|im_end|>\n<|im_start|>assistant\n"
    ids = model.tokenizer.encode(expected, add_special_tokens=False).ids
    assert list(unpack_tokens(request.prompt)) == ids
    assert ids[0] == 1  # the template's markers are special tokens, not text
    assert done.prompt_tokens == len(ids) > 32
    assert request.digests == chain(pack_tokens(ids), 32, root(model.revision, salt="tenant"))
    assert (request.endpoint, request.stop.max_tokens, request.gateway) == ("chat", 7, "gw1")
    assert decode(encode(request)) == request


def test_text_and_token_ids_give_the_same_request(context: PrepareContext) -> None:
    one = text(context, CORPUS[:100], seed=1).request
    ids = list(unpack_tokens(one.prompt))
    two = text(context, ids, seed=1).request
    assert (one.prompt, one.digests, one.endpoint) == (two.prompt, two.digests, "text")


def test_a_body_names_its_session_as_openai_or_as_vllm_does(context: PrepareContext) -> None:
    assert chat(context, "a", session_id="v").request.session == "v"
    assert chat(context, "a", session_id="v", prompt_cache_key="o").request.session == "o"
    assert text(context, "a").request.session == ""


def test_aliases_are_canonical_in_the_request_and_others_are_not_found(context: PrepareContext) -> None:
    assert chat(context, model="alias").request.model == "tiny"
    error = refusal(chat, context, model="gpt-4")
    assert (error.code, error.code.status, error.param) == (Code.model_not_found, 404, "model")
    assert "'tiny', 'alias'" in error.message


def test_options_reach_the_request(context: PrepareContext) -> None:
    done = chat(
        context,
        temperature=0,
        top_k=-1,
        seed=-1,
        stop=["a", "b", "a"],
        stop_token_ids=[3],
        min_tokens=2,
        max_completion_tokens=9,
        max_tokens=5,
        ignore_eos=True,
        include_stop_str_in_output=True,
        logprobs=True,
        top_logprobs=4,
        logit_bias={"7": 1.5},
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        priority="interactive",
        timeout_s=30,
        worker="w1",
    )
    request = done.request
    sampling, stop = request.sampling, request.stop
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.logprobs) == (0.0, 0, 2**63 - 1, 4)
    assert sampling.logit_bias == {7: 1.5}
    assert (stop.strings, stop.token_ids, stop.min_tokens, stop.max_tokens) == (("a", "b"), (3,), 2, 9)
    assert (stop.ignore_eos, request.stops_shown, request.n, request.user, request.worker) == (True, True, 3, "u", "w1")
    assert (request.priority, request.deadline_ns - NOW) == (Priority.interactive, 30 * 10**9)
    assert (done.stream, done.include_usage) == (True, True)


def test_what_the_client_leaves_open_comes_from_the_model_and_the_gateway(context: PrepareContext) -> None:
    request = chat(context).request
    assert request.sampling.temperature == context.model.sampling.temperature
    assert request.sampling.logprobs is None
    assert request.deadline_ns - NOW == 600 * 10**9
    assert request.created_ns == NOW


def test_a_seed_is_drawn_when_none_is_given(context: PrepareContext) -> None:
    assert chat(context).request.sampling.seed != chat(context).request.sampling.seed
    assert chat(context, seed=5).request.sampling.seed == 5


def test_priority_0_of_other_servers_names_no_class(context: PrepareContext) -> None:
    assert chat(context, priority=0).request.priority == "standard"
    assert chat(context, priority=0, service_tier="flex").request.priority == "batch"
    assert "use 'interactive', 'standard' or 'batch'" in refusal(chat, context, priority=1).message
    assert "use 'auto'" in refusal(chat, context, service_tier="fast").message


@pytest.mark.parametrize(("tier", "priority"), [("flex", "batch"), ("priority", "interactive"), ("auto", "standard")])
def test_service_tiers_are_priority_classes(context: PrepareContext, tier: str, priority: str) -> None:
    assert chat(context, service_tier=tier).request.priority == priority


def test_an_answer_takes_the_room_that_is_left_unless_it_asks_for_more(context: PrepareContext) -> None:
    ids = [5] * 1900
    assert text(context, ids).request.stop.max_tokens == 148
    assert text(context, ids, max_tokens=148).request.stop.max_tokens == 148
    error = refusal(text, context, ids, max_tokens=149)
    assert (error.code, error.param) == (Code.context_length_exceeded, "max_tokens")
    assert all(number in error.message for number in ("2048", "1900", "149", "148"))
    clamps = context._replace(clamp_max_tokens=True)
    assert [text(clamps, ids, max_tokens=asked).request.stop.max_tokens for asked in (7, 148, 149, 1 << 30)] == [
        *(7, 148, 148, 148)
    ]
    assert chat(clamps, max_completion_tokens=1 << 20, min_tokens=1 << 19).request.stop.min_tokens <= 2048
    assert refusal(text, clamps, [5] * 2048, max_tokens=1).code is Code.context_length_exceeded


def test_without_max_tokens_an_answer_has_the_rest_of_the_context_up_to_the_gateways_bound(
    context: PrepareContext,
) -> None:
    ids = [5] * 48
    assert text(context, ids).request.stop.max_tokens == 2000
    bounded = context._replace(default_max_tokens=512)
    assert text(bounded, ids).request.stop.max_tokens == 512
    assert text(bounded, [5] * 2000).request.stop.max_tokens == 48
    assert text(bounded, ids, max_tokens=1000).request.stop.max_tokens == 1000  # the client's own value is not bounded


def test_what_generation_config_sets_reaches_every_request(context: PrepareContext, tmp_path: Path) -> None:
    path = write(tmp_path)
    file = path / "generation_config.json"
    values = {
        "min_new_tokens": 3,
        "max_new_tokens": 12,
        "stop_strings": ["###"],
        "suppress_tokens": [5],
        "bad_words_ids": [[6]],
    }
    file.write_text(json.dumps(json.loads(file.read_bytes()) | values))
    context = context._replace(model=modeldir.load(path, name="tiny"))
    for ask in (chat, text):
        stop = ask(context).request.stop
        assert (stop.min_tokens, stop.max_tokens, stop.strings) == (3, 12, ("###",))
        request = ask(context, min_tokens=0, max_tokens=40, stop="end", logit_bias={"5": 9, "7": 1}).request
        assert (request.stop.min_tokens, request.stop.max_tokens) == (0, 40)
        assert request.stop.strings == ("end", "###")
        assert request.sampling.logit_bias == {5: -100.0, 6: -100.0, 7: 1.0}
    assert chat(context._replace(default_max_tokens=9)).request.stop.max_tokens == 9


def test_a_fleet_with_a_lower_limit_sets_it(context: PrepareContext) -> None:
    small = context._replace(worker_max_model_len=100)
    assert text(small, [5] * 90).request.stop.max_tokens == 10
    assert "100 tokens" in refusal(text, small, [5] * 100).message


def test_a_prompt_without_room_for_an_answer_is_too_long(context: PrepareContext) -> None:
    error = refusal(text, context, [5] * 2048)
    assert (error.code, error.code.status) == (Code.context_length_exceeded, 400)
    assert "2048" in error.message


def test_text_that_cannot_fit_is_refused_without_tokenising_it_all(context: PrepareContext) -> None:
    longest = context.model.detokenizer.longest_bytes
    error = refusal(chat, context, "x" * (2048 * longest))
    assert error.code is Code.context_length_exceeded
    assert "at least 2049 tokens > 2047" in error.message
    words = "request " * 20_000  # fits by characters alone, not by its start
    assert len(words) > 16 * 2048
    assert "at least" in refusal(chat, context._replace(model=wide(context.model)), words).message


def wide(model: ModelDir) -> ModelDir:
    """As if the vocabulary had one very long token, so that the first check lets everything pass."""
    import copy
    import dataclasses

    detokenizer = copy.copy(model.detokenizer)
    detokenizer.longest_bytes = 1 << 20
    return dataclasses.replace(model, detokenizer=detokenizer)


def test_long_text_of_few_tokens_is_served(tmp_path_factory: pytest.TempPathFactory, context: PrepareContext) -> None:
    from tokenizers import AddedToken, Tokenizer

    from penstock.infra.model.modeldir import load
    from tests.tiny_model import byte_level_json

    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.add_tokens([AddedToken("=" * 64, special=False)])
    path = write(tmp_path_factory.mktemp("m"), tokenizer=tokenizer.to_str())
    done = text(context._replace(model=load(path)), "=" * 64 * 1000)
    assert done.prompt_tokens == 1000


def test_ids_outside_the_vocabulary_are_refused(context: PrepareContext) -> None:
    assert refusal(text, context, [640]).param == "prompt"
    assert refusal(chat, context, stop_token_ids=[640]).param == "stop_token_ids"
    assert refusal(chat, context, logit_bias={"640": 1}).param == "logit_bias"
    assert "below 640" in refusal(chat, context, logit_bias={"640": 1}).message


def test_an_empty_text_prompt_is_refused(context: PrepareContext) -> None:
    assert "at least 1 token" in refusal(text, context, "").message


def test_a_model_without_a_template_serves_text_only(
    tmp_path_factory: pytest.TempPathFactory, context: PrepareContext
) -> None:
    from penstock.infra.model.modeldir import load

    bare = context._replace(model=load(write(tmp_path_factory.mktemp("m"), template=None)))
    assert text(bare).request.endpoint == "text"
    assert refusal(chat, bare).code is Code.unsupported


def test_what_a_template_refuses_is_the_clients_error(
    tmp_path_factory: pytest.TempPathFactory, context: PrepareContext
) -> None:
    from penstock.infra.model.modeldir import load

    source = (
        "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}{{ messages[0].content }}"
    )
    strict = context._replace(model=load(write(tmp_path_factory.mktemp("m"), template=source)))
    body = {"model": "tiny", "messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}
    error = refusal(prepare_chat, json.dumps(body).encode(), strict, now_ns=NOW, request_id="r")
    assert error.code is Code.invalid_request
    assert "roles must alternate" in error.message


def test_arguments_that_are_nested_too_deeply_for_the_template_are_named() -> None:
    call = {"function": {"name": "f", "arguments": '{"a":' + "[" * 900 + "]" * 900 + "}"}}
    body = {"model": "demo", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(ServingError, match="arguments or variables are nested too deeply"):
        prepare_chat(
            json.dumps(body).encode(),
            PrepareContext(modeldir.load(modeldir.DEMO), ("demo",), "gw1"),
            now_ns=NOW,
            request_id="r",
        )


def test_template_variables_cannot_replace_the_messages(context: PrepareContext) -> None:
    assert refusal(chat, context, chat_template_kwargs={"messages": []}).param == "chat_template_kwargs"
    assert chat(context, chat_template_kwargs={"enable_thinking": False}).prompt_tokens


def test_workers_revision_names_the_blocks(context: PrepareContext) -> None:
    request = text(context._replace(revision="abc"), [5] * 64).request
    assert request.digests == chain(request.prompt, 32, root("abc"))


@examples(200)
@given(st.text(max_size=200))
def test_any_text_is_prepared_or_refused(context: PrepareContext, content: str) -> None:
    assert chat(context, content).prompt_tokens > 0
    assert text(context, content + ".").prompt_tokens > 0


def test_all_but_the_tokenisation_of_a_long_prompt_is_fast(
    long_context: PrepareContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = CORPUS * 450
    spent = 0.0
    real = prompt.encode

    def timed(*args: Any, **options: Any) -> list[int]:
        nonlocal spent
        start = time.thread_time()
        ids = real(*args, **options)
        spent += time.thread_time() - start
        return ids

    monkeypatch.setattr("penstock.gateway.apis.chat.prompt.encode", timed)
    data = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]}).encode()
    best = 1.0
    for _ in range(5):
        spent, start = 0.0, time.thread_time()
        done = prepare_chat(data, long_context, now_ns=NOW, request_id="r")
        best = min(best, time.thread_time() - start - spent)
    assert done.prompt_tokens > 100_000
    assert best < 0.02


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, 600), ({"timeout_s": 3000}, 3000), ({"deadline_s": 5}, 5), ({"timeout_s": 9, "deadline_s": 3000}, 9)],
)
def test_a_deadline_is_what_the_client_names_or_the_default(
    context: PrepareContext, asked: dict[str, float], expected: int
) -> None:
    assert chat(context, **asked).request.deadline_ns - NOW == expected * 10**9


def test_a_body_that_is_prepared_on_the_event_loop_does_not_stall_it(long_context: PrepareContext) -> None:
    content = (CORPUS * 10).encode()[: LARGE_BODY - 100].decode("utf-8", "ignore")
    data = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": content}]}, ensure_ascii=False
    ).encode()
    assert LARGE_BODY - 200 < len(data) <= LARGE_BODY
    best = 1.0
    for _ in range(10):
        start = time.thread_time()
        prepare_chat(data, long_context, now_ns=NOW, request_id="r")
        best = min(best, time.thread_time() - start)
    assert best < 0.005


def test_a_prompt_is_cut_to_its_last_tokens_or_its_first_where_the_body_says_so(context: PrepareContext) -> None:
    whole = unpack_tokens(text(context, CORPUS).request.prompt)
    limit = context.max_model_len
    for keep in (1, 7, len(whole), len(whole) + 1):
        cut = text(context, CORPUS, truncate_prompt_tokens=keep)
        assert unpack_tokens(cut.request.prompt) == whole[-keep:]
        assert cut.prompt_tokens == min(keep, len(whole))
        begun = text(context, CORPUS, truncate_prompt_tokens=keep, truncation_side="right")
        assert unpack_tokens(begun.request.prompt) == whole[:keep]
    long = [5] * (limit + 100)
    assert refusal(text, context, long).code is Code.context_length_exceeded
    fitting = text(context, long, truncate_prompt_tokens=-1, max_tokens=10)
    assert fitting.prompt_tokens == limit - 10
    asked = chat(context, CORPUS, truncate_prompt_tokens=5)
    assert unpack_tokens(asked.request.prompt) == unpack_tokens(chat(context, CORPUS).request.prompt)[-5:]
    for wrong, says in ((0, "use 1 or more"), (limit + 1, f"context length is {limit}"), (-2, ">= -1")):
        error = refusal(text, context, truncate_prompt_tokens=wrong)
        assert (error.param, says in error.message) == ("truncate_prompt_tokens", True)


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": ""}])
def test_a_model_that_is_not_named_is_the_one_that_is_served(context: PrepareContext, given: dict[str, object]) -> None:
    said = {"messages": [{"role": "user", "content": "hi"}]}
    chat = prepare_chat(json.dumps(said | given).encode(), context, now_ns=NOW, request_id="r")
    assert isinstance(chat, PreparedRequest)
    text = prepare_completion(json.dumps({"prompt": "hi"} | given).encode(), context, now_ns=NOW, request_id="r")
    message = prepare_message(
        json.dumps(said | {"max_tokens": 5} | given).encode(), context, now_ns=NOW, request_id="r"
    ).prepared
    assert isinstance(message, PreparedRequest)
    assert {each.request.model for each in (chat, text, message)} == {"tiny"}
    for refused in (context._replace(names=()), context._replace(allowed=frozenset({"other"}))):
        with pytest.raises(ServingError, match="model is missing") as caught:
            prepare_completion(json.dumps({"prompt": "hi"} | given).encode(), refused, now_ns=NOW, request_id="r")
        assert (caught.value.code, caught.value.param) == (Code.model_not_found, "model")


def test_a_role_that_the_template_knows_is_taken_and_another_is_named(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'ipython' %}out: {% endif %}{{ m.content }}{% endfor %}"
    context = PrepareContext(modeldir.load(write(tmp_path / "m", template=template)), ("tiny",), "gw1")

    def tokens(role: str) -> bytes:
        body = {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]}
        prepared = prepare_chat(json.dumps(body).encode(), context, now_ns=NOW, request_id="r")
        assert isinstance(prepared, PreparedRequest)
        return prepared.request.prompt

    assert tokens("ipython") != tokens("tool")
    with pytest.raises(ServingError, match="'critic' is not known") as caught:
        tokens("critic")
    assert caught.value.param == "messages[1].role"
