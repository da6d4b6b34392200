"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM's server has them.

The first two are pure: a body in, tokens or text out. The third reads a file of the model's folder.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.apis.chat.bodies import MAX_MESSAGES, ChatCompletionRequest, ChatMessage, TokenId, check_chat
from penstock.gateway.apis.chat.prompt import chat_prompt, encode
from penstock.gateway.base.request_bodies import PrepareContext, decode_body, invalid
from penstock.infra.model.modeldir import read_json

MAX_TOKENS = 1 << 20  # of one body of /detokenize
ModelName = Annotated[str, Meta(min_length=1, max_length=512)]


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /tokenize: a text, or the messages of a chat."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: (
        Annotated[bool, Meta(description="of a text: what the tokenizer puts around it, such as BOS; default: true")]
        | None
    ) = None
    return_token_strs: bool | None = None


class Tokenized(Struct, frozen=True):
    """``max_model_len``: prompt and answer together, in tokens. ``token_strs``: as the vocabulary writes them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: ModelName | None = None


class Detokenized(Struct, frozen=True):
    prompt: str


_decode_tokenize = msgspec.json.Decoder(TokenizeRequest).decode
_decode_detokenize = msgspec.json.Decoder(DetokenizeRequest).decode


def tokenize(data: bytes, context: PrepareContext) -> Tokenized:
    """
    Raises:
        ServingError: the body cannot be served, or is longer than the model's context.
    """
    body: TokenizeRequest = decode_body(_decode_tokenize, data)
    _check_model(body.model, context)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if body.prompt is not None:
        tokens = [*encode(body.prompt, context, special=body.add_special_tokens is not False)]
    else:
        tokens = _chat_tokens(body, body.messages or [], context)
    name_of = context.model.tokenizer.id_to_token
    names = [name_of(token) or "" for token in tokens] if body.return_token_strs else None
    return Tokenized(len(tokens), context.max_model_len, tokens, names)


def detokenize(data: bytes, context: PrepareContext) -> Detokenized:
    """
    Raises:
        ServingError: the body cannot be served, or an id is outside the vocabulary.
    """
    body: DetokenizeRequest = decode_body(_decode_detokenize, data)
    _check_model(body.model, context)
    size = context.model.vocab_size
    if max(body.tokens, default=0) >= size:
        raise invalid("tokens", f"tokens has id {max(body.tokens)}; ids must be below {size}")
    return Detokenized(context.model.tokenizer.decode(body.tokens, skip_special_tokens=False))


_OF_HOST = ("_file", "_path", "_dir", "_or_path", "_commit_hash")  # what fields with names of files end with


def tokenizer_info(context: PrepareContext) -> dict[str, Any]:
    """What tokenizer_config.json says, and the chat template in use. Fields that name files or folders are left out.

    Reads the file, so call it in a thread.
    """
    model = context.model
    found = read_json(model.path / "tokenizer_config.json")
    info = {name: value for name, value in found.items() if not name.endswith(_OF_HOST) and not _is_path(value)}
    info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    info.pop("chat_template", None)
    if model.template is not None:
        info["chat_template"] = model.template.suited(tools=False).source
    return info


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("/", "~/")) and value.count("/") > 1


def _chat_tokens(body: TokenizeRequest, messages: list[ChatMessage], context: PrepareContext) -> list[int]:
    """The prompt of a chat; an image has as many placeholders as it takes tokens."""
    chat = ChatCompletionRequest(
        model=context.names[0],
        messages=messages,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    check_chat(chat)
    prompt, vision = chat_prompt(chat, context), context.model.vision
    if vision is None or not prompt.media:
        return [*prompt.tokens]
    sizes = iter([1 if part.embedding or part.video else vision.image_tokens for part in prompt.media])
    tokens: list[int] = []
    for token in prompt.tokens:
        tokens += [token] * (next(sizes) if token in vision.placeholders else 1)
    return tokens


def _check_model(name: str | None, context: PrepareContext) -> None:
    context.check_model(name)
