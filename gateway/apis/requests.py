"""The body of POST /v1/embeddings: its fields and limits. Knows no model."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.base.common import CommonOptions
from penstock.gateway.base.errors import decode_body, invalid, unsupported

MAX_INPUTS = 2048  # as in OpenAI's API
MAX_TOKENS = 300_000  # of all inputs that are given as token ids, as in OpenAI's API
MAX_VALUES = MAX_TOKENS + MAX_INPUTS  # in a body; so many are decoded in about 12 ms

TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
TokenIds = list[TokenId]
Cut = Annotated[
    int, Meta(ge=-1, description="cut longer inputs to so many tokens; -1: to the model's limit; default: refuse them")
]


class EmbeddingRequest(CommonOptions, frozen=True, kw_only=True):
    """POST /v1/embeddings. ``input``: a text, several, token ids, or several lists of token ids."""

    input: str | list[str | TokenId | TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: (
        Annotated[int, Meta(ge=1, le=1 << 20, description="shorten the vectors and scale them to length 1 again")]
        | None
    ) = None
    truncate_dim: Annotated[int, Meta(ge=1, le=1 << 20, description="another name for dimensions")] | None = None
    truncate_prompt_tokens: Cut | None = None
    input_type: (
        Annotated[
            str,
            Meta(
                max_length=128,
                description="what the texts are: query, document (or search_query, search_document, passage), or the "
                "name of another prompt of the model's, which is put before each text; default: the model's default",
            ),
        ]
        | None
    ) = None


class Inputs(Struct, frozen=True):
    """The inputs of a body in their order: either texts or token ids."""

    texts: Sequence[str] = ()
    tokens: Sequence[TokenIds] = ()

    def __len__(self) -> int:
        return len(self.texts) or len(self.tokens)


_decode = msgspec.json.Decoder(EmbeddingRequest).decode


def parse_embedding(data: bytes) -> tuple[EmbeddingRequest, Inputs]:
    """
    Raises:
        ServingError: invalid_request or unsupported, with the field and the limit.
    """
    body: EmbeddingRequest = decode_body(_decode, data)
    if body.stream:
        raise unsupported("stream", "embeddings are not streamed: leave stream out")
    if body.truncate_prompt_tokens == 0:
        raise invalid(
            "truncate_prompt_tokens", "truncate_prompt_tokens is 0; use 1 or more, or -1 for the model's limit"
        )
    if body.dimensions and body.truncate_dim and body.dimensions != body.truncate_dim:
        raise invalid("truncate_dim", "truncate_dim and dimensions mean the same and differ; give one of them")
    return body, _inputs(body.input)


def _inputs(given: str | list[str | int | list[int]]) -> Inputs:
    if isinstance(given, str):
        given = [given]
    elif given and isinstance(given[0], int):
        ids = [each for each in given if isinstance(each, int)]
        if len(ids) < len(given):
            raise invalid("input", "input begins with a token id; then every entry must be one")
        given = [ids]
    if not given:
        raise invalid("input", "input is empty; give at least one text or list of token ids")
    if len(given) > MAX_INPUTS:
        raise invalid("input", f"input has {len(given)} entries; the limit is {MAX_INPUTS}: send several requests")
    for at, each in enumerate(given):
        if not each and each != 0:
            raise invalid("input", f"input[{at}] is empty")
    texts = [each for each in given if isinstance(each, str)]
    tokens = [each for each in given if isinstance(each, list)]
    if len(given) not in (len(texts), len(tokens)):
        raise invalid("input", "input mixes kinds: give texts only, or lists of token ids only")
    if (total := sum(map(len, tokens))) > MAX_TOKENS:
        raise invalid("input", f"input has {total} token ids; the limit is {MAX_TOKENS}: send several requests")
    return Inputs(texts, tokens)
