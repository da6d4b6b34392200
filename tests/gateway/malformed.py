"""Bodies that are nearly right: valid ones in which something was replaced, removed, repeated or cut off."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from penstock.gateway.apis.chat.prepare_chat import (
    PendingMediaRequest,
    PreparedRequest,
    prepare_chat,
    prepare_completion,
)
from penstock.gateway.apis.chat.tokenization import detokenize, tokenize
from penstock.gateway.apis.embeddings import prepare_embedding
from penstock.gateway.apis.messages.prepare_message import count_message, prepare_message
from penstock.gateway.apis.ollama.prepare_ollama import prepare_ollama
from penstock.gateway.apis.responses.bodies import parse_compaction, parse_response
from penstock.gateway.apis.responses.chat import encode_summary
from penstock.gateway.apis.responses.prepare_response import count_prompt_of, encode_kept, prepare_response
from penstock.gateway.apis.responses.record import encode_stored, input_items, read_stored
from penstock.gateway.base.request_bodies import OLLAMA_CHAT, OLLAMA_GENERATE
from penstock.infra.constraints import constraint_grammar
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Embedder
from penstock.schemas.requests import EMBEDDING, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, RERANK, SCORE
from tests.gateway.answers import CONTEXT, NOW

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 1e308, -0.5, "", "a", "\x00", "é☃", "\ud800", "x" * 5000, [], {},
    [[]], [{}], [None], {"": None}, {"type": "text"}, {"type": 7}, [1, "a", None], "auto", "data:image/png;base64,AAAA",
    {"type": "function"}, [{"type": "function", "name": "a b"}], "http://", {"a": {"a": {"a": {}}}},
)  # fmt: skip


def malformed(valid: list[dict[str, Any]], count: int, seed: int) -> Iterator[bytes]:
    """``count`` bodies; some of them may be valid still."""
    rng = random.Random(seed)
    for _ in range(count):
        body = copy.deepcopy(rng.choice(valid))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _change(body, rng)
        data = json.dumps(body).encode("utf-8", "surrogatepass")
        match rng.randrange(12):
            case 0:
                yield data[: rng.randrange(len(data))]
            case 1:
                at = rng.randrange(len(data))
                yield data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case _:
                yield data


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _change(body: dict[str, Any], rng: random.Random) -> None:
    places = list(_places(body))
    if not places:
        return  # nothing is left
    container, key = rng.choice(places)
    match rng.randrange(4):
        case 0 | 1:
            container[key] = copy.deepcopy(rng.choice(JUNK))
        case 2:
            del container[key]
        case 3 if isinstance(container, list):
            container += copy.deepcopy([container[key]] * rng.choice((1, 50)))
        case _:
            container[rng.choice(("type", "role", "content", "name", "id"))] = copy.deepcopy(rng.choice(JUNK))


FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
RESPONSES: list[dict[str, Any]] = [
    {"model": "tiny", "max_output_tokens": 1, "include": ["reasoning.encrypted_content"], "input": [
        {"type": "additional_tools", "role": "developer", "tools": [
            {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "exec"}]}]},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "encrypted_content": encode_summary("t")},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c", "tools": [
            {"type": "namespace", "name": "m", "tools": [{"type": "function", "name": "f"}]}]},
        {"type": "web_search_call", "id": "ws_1"}]},
    {"model": "tiny", "input": "hi", "max_output_tokens": 1, "temperature": 0.5, "metadata": {"a": "b"}, "store": True,
     "instructions": "Be brief.", "top_logprobs": 2, "include": ["message.output_text.logprobs"], "truncation": "auto",
     "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"}},
    {"model": "tiny", "max_output_tokens": 1, "tools": [FUNCTION], "tool_choice": "auto", "parallel_tool_calls": False,
     "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "https://a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
     ]},
    {"model": "tiny", "input": "hi", "max_output_tokens": 1, "previous_response_id": "resp_1", "stream": True,
     "tools": [{"type": "web_search"}, {"type": "namespace", "name": "s", "tools": [FUNCTION]}, FUNCTION],
     "stream_options": {"include_obfuscation": False}, "text": {"format": {
         "type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}}}},
]  # fmt: skip
OLLAMA_CHATS: list[dict[str, Any]] = [
    {"model": "tiny", "stream": False, "options": {"num_predict": 1, "temperature": 0.5, "stop": ["x"], "seed": 1},
     "think": True, "keep_alive": "5m", "messages": [
        {"role": "user", "content": "a", "images": ["iVBORw0KGgo="]},
        {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "d", "tool_name": "f"}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    {"model": "tiny:latest", "messages": [{"role": "user", "content": "hi"}], "think": "low", "stream": False,
     "options": {"num_predict": 1, "top_p": 0.5, "repeat_penalty": 1.5}, "format": {"type": "object"}},
]  # fmt: skip
OLLAMA_PROMPTS: list[dict[str, Any]] = [
    {"model": "tiny", "prompt": "hi", "system": "s", "stream": False, "options": {"num_predict": 1, "min_p": 0.5}},
    {"model": "tiny", "prompt": "hi", "stream": False, "format": "json", "think": False, "raw": False,
     "options": {"num_predict": 1, "stop": "x", "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_k": 5}},
    {"model": "tiny", "prompt": "hi", "images": ["iVBORw0KGgo="], "options": {"seed": 1, "stop": ["x", "y"]}},
]  # fmt: skip
COMPACTIONS: list[dict[str, Any]] = [
    {"model": "tiny", "input": "hi", "instructions": "i", "max_output_tokens": 1, "prompt_cache_key": "k"},
    {
        "model": "tiny",
        "temperature": 0.5,
        "reasoning": {"effort": "low"},
        "store": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "compaction", "id": "cmp_1", "encrypted_content": encode_summary("s")},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        ],
    },
]
MESSAGES: list[dict[str, Any]] = [
    {"model": "tiny", "max_tokens": 1, "tools": [
        {"type": "tool_search_tool_regex_20251119", "name": "s"}, {"name": "f", "input_schema": {"type": "object"}}],
     "messages": [
        {"role": "user", "content": [
            {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "x"}]}]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "c", "name": "s", "input": {}}, {"type": "compaction", "content": "d"},
            {"type": "web_search_tool_result", "tool_use_id": "c", "content": {"error_code": "e"}}]},
        {"role": "user", "content": "hi"}]},
    {"model": "tiny", "max_tokens": 1, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"], "top_k": 5,
     "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "metadata": {"user_id": "u"},
     "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
    {"model": "tiny", "max_tokens": 1, "stream": True,
     "tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}],
     "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
     "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
     "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url", "url": "https://a"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [
                {"type": "text", "text": "d"}, {"type": "tool_reference", "tool_name": "f"}]}]},
     ]},
]  # fmt: skip

CHATS: list[dict[str, Any]] = [
    {"model": "tiny", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}, "stop": ["x"],
     "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
     "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {
         "type": "object", "properties": {"a": {"type": "array", "items": {"enum": ["b", 1]}, "maxItems": 3}},
         "required": ["a"], "additionalProperties": False}}}},
    {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], "n": 2, "logprobs": True,
     "structured_outputs": {"regex": "[a-z]{2,5}"}, "logit_bias": {"5": 1}, "top_logprobs": 2},
    {"model": "tiny", "max_completion_tokens": 1, "messages": [{"role": "developer", "content": "d"},
        {"role": "user", "content": "hi"}], "guided_choice": ["a", "b"], "seed": 1, "reasoning_effort": "low"},
    {"model": "tiny", "max_tokens": 1, "parallel_tool_calls": False, "tools": [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}],
     "tool_choice": {"type": "function", "function": {"name": "f"}}, "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "d"}]},
]  # fmt: skip
COMPLETIONS: list[dict[str, Any]] = [
    {"model": "tiny", "max_tokens": 1, "prompt": "hi", "stop": "x", "guided_regex": "[ab]+", "logprobs": 2},
    {"model": "tiny", "max_tokens": 1, "prompt": [5, 6], "structured_outputs": {"grammar": 'start: "a" | "b"'}},
    {"model": "tiny", "max_tokens": 1, "prompt": "hi", "guided_json": {"type": "object"}, "echo": False, "n": 2},
]
TOKENIZE: list[dict[str, Any]] = [
    {"model": "tiny", "prompt": "hi", "add_special_tokens": False, "return_token_strs": True},
    {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True,
     "tools": [{"type": "function", "function": {"name": "f"}}], "chat_template_kwargs": {"a": 1}},
]  # fmt: skip
DETOKENIZE: list[dict[str, Any]] = [{"model": "tiny", "tokens": [5, 6, 7]}]
RANKINGS: list[dict[str, Any]] = [
    {"model": "tiny", "query": "hello", "documents": ["hello there", "goodbye"]},
    {
        "query": "hello",
        "documents": [{"text": "hello there"}, "goodbye"],
        "top_n": 1,
        "return_documents": True,
        "max_tokens_per_doc": 512,
        "truncation": True,
        "truncate_prompt_tokens": -1,
    },
]
SCORES: list[dict[str, Any]] = [
    {"model": "tiny", "text_1": "hello", "text_2": ["hello there", "goodbye"]},
    {"queries": ["hello", "goodbye"], "documents": ["hello there", "bye"], "truncate_prompt_tokens": 8},
]
EMBEDDINGS: list[dict[str, Any]] = [
    {"model": "tiny", "input": "hi", "encoding_format": "base64", "dimensions": 8, "user": "u"},
    {"model": "tiny", "input": ["hi", "there"], "truncate_prompt_tokens": -1, "priority": "batch"},
    {"model": "tiny", "input": [[1, 2], [3]], "encoding_format": "float", "timeout_s": 5},
]

OLLAMA_TEXTS: list[dict[str, Any]] = [
    {"model": "tiny", "input": ["hi", "there"], "truncate": False, "dimensions": 8, "priority": "batch"},
    {"model": "tiny:latest", "input": ["hi"], "user": "u", "timeout_s": 5, "worker": "w1", "service_tier": "flex"},
]

_CONTEXT = CONTEXT._replace(names=("tiny",))


def _response(data: bytes) -> None:
    body = parse_response(data)
    prepare_response(body, (), _CONTEXT, now_ns=NOW, request_id="r")
    assert read_stored(encode_stored(body)).body.model == body.model
    input_items("resp_1", body.input or ())


def _compaction(data: bytes) -> None:
    body = parse_compaction(data)
    prepare_response(body, (), _CONTEXT, now_ns=NOW, request_id="r", compacts=True)
    encode_kept(body, (), "r")


def _embedding(data: bytes, endpoint: str = EMBEDDING) -> None:
    models = {"tiny": Embedder(64, max_tokens=100, vocab_size=1000, scores=endpoint in (RERANK, SCORE))}
    prepare_embedding(data, models, endpoint=endpoint, gateway="g", default_deadline_s=60, now_ns=NOW, request_id="r")


def _check_constraint(prepared: PreparedRequest | PendingMediaRequest) -> None:
    if isinstance(prepared, PendingMediaRequest) or prepared.request.constraint is None:
        return
    try:
        constraint_grammar.check(prepared.request.constraint)
    except constraint_grammar.ConstraintError as error:  # as ``constraint_check``, without its thread
        raise ServingError(Code.invalid_request, str(error)) from None


def _generation(data: bytes, prepare: Callable[..., Any]) -> None:
    prepared = prepare(data, _CONTEXT, now_ns=NOW, request_id="r")
    _check_constraint(prepared)


def _ollama(endpoint: str, data: bytes) -> None:
    prepared = prepare_ollama(endpoint, data, _CONTEXT, now_ns=NOW, request_id="r").prepared
    _check_constraint(prepared)


# For each route valid bodies, and what a gateway does with a body before it asks the log or a worker.
ROUTES: dict[str, tuple[list[dict[str, Any]], Callable[[bytes], object]]] = {
    "/v1/chat/completions": (CHATS, lambda data: _generation(data, prepare_chat)),
    "/v1/completions": (COMPLETIONS, lambda data: _generation(data, prepare_completion)),
    "/v1/embeddings": (EMBEDDINGS, _embedding),
    "/v1/rerank": (RANKINGS, lambda data: _embedding(data, RERANK)),
    "/v1/score": (SCORES, lambda data: _embedding(data, SCORE)),
    "/tokenize": (TOKENIZE, lambda data: tokenize(data, _CONTEXT)),
    "/detokenize": (DETOKENIZE, lambda data: detokenize(data, _CONTEXT)),
    "/v1/responses": (RESPONSES, _response),
    "/v1/responses/compact": (COMPACTIONS, _compaction),
    "/v1/responses/input_tokens": (RESPONSES, lambda data: count_prompt_of(parse_response(data), (), _CONTEXT)),
    "/v1/messages": (MESSAGES, lambda data: prepare_message(data, _CONTEXT, now_ns=NOW, request_id="r")),
    "/v1/messages/count_tokens": (MESSAGES, lambda data: count_message(data, _CONTEXT)),
    "/api/chat": (OLLAMA_CHATS, lambda data: _ollama(OLLAMA_CHAT, data)),
    "/api/embed": (OLLAMA_TEXTS, lambda data: _embedding(data, OLLAMA_EMBED)),
    "/api/embeddings": (
        [{"model": "tiny", "prompt": "hi", "timeout_s": 5, "worker": "w1", "priority": "batch"}],
        lambda data: _embedding(data, OLLAMA_EMBEDDINGS),
    ),
    "/api/generate": (OLLAMA_PROMPTS, lambda data: _ollama(OLLAMA_GENERATE, data)),
}


def refusal(prepare: Callable[[bytes], object], body: bytes) -> ServingError | None:
    """Why a body is refused; None: it is served. Any other exception is a fault."""
    try:
        prepare(body)
    except ServingError as error:
        return error
    return None
