"""Requests and answers of the demo model, for tests of what gateways make of them."""

import msgspec
from hypothesis import strategies as st

from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.model import modeldir
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.requests import GenerateRequest, Parsing, Sampling, Stop
from penstock.schemas.tokens import Finish, Logprob, TokenItem
from penstock.schemas.wire import pack_tokens

NOW = 1_700_000_000 * 10**9
ID = "01932c07-a4b8-7000-8000-0123456789ab"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
STOP, LENGTH = Finish("stop", cached_tokens=1), Finish("length", cached_tokens=1)

CONTEXT = PrepareContext(modeldir.load(modeldir.DEMO), ("demo",), "gw1", parsers=ParserNames("basic", "hermes"))
DETOKENIZER = CONTEXT.model.detokenizer

# What a model may write: thoughts, text, calls, and what looks like them.
PIECES = st.sampled_from(
    [
        "Well. ",
        "</think>",
        "<think>",
        "\n\n",
        " ",
        CALL,
        CALL.replace("Oslo", "Rome"),
        "<tool_call>",
        "{",
        "é☃",
        CALL[:40],
    ]
)
TEXTS = st.builds(
    lambda thoughts, rest: thoughts + "".join(rest),
    st.sampled_from(["", "<think>\nHm.\n</think>\n\n", "<think>"]),
    st.lists(PIECES, max_size=8),
)


def request(endpoint: str, client_body: bytes = b"", **fields: object) -> GenerateRequest:
    made = GenerateRequest(
        ID,
        "demo",
        "gw1",
        pack_tokens([1, 2, 3]),
        Stop(max_tokens=1000),
        NOW,
        NOW + 10**9,
        sampling=Sampling(temperature=0.0),
        endpoint=endpoint,
        client_body=client_body,
        parsing=Parsing("basic", "hermes"),
    )
    return msgspec.structs.replace(made, **fields)


def items(text: str, finish: Finish | None = STOP, *, logprobs: bool = False, size: int = 1) -> list[TokenItem]:
    """``text`` as token items of ``size`` tokens, the last with the finish."""
    ids = CONTEXT.model.tokenizer.encode(text, add_special_tokens=False).ids
    found = []
    for first in range(0, len(ids), size):
        part = ids[first : first + size]
        scores = tuple(Logprob(-0.5, ((part[0], -0.5),)) for _ in part) if logprobs else None
        found.append(TokenItem(ID, 1, 0, first, pack_tokens(part), None, scores))
    if finish is None:
        return found
    if not found:
        return [TokenItem(ID, 1, 0, 0, b"", finish)]
    return [*found[:-1], msgspec.structs.replace(found[-1], finish=finish)]
