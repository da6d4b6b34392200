"""A body's prompt as token ids: messages as chat templates expect them, the template, the tokenizer, placeholders of
images. Pure.
"""

import json
import re
from array import array
from collections.abc import Callable, Sequence, Set
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from penstock.gateway.apis.chat.bodies import (
    NO_THINKING,
    ROLES,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    MediaUrl,
    ToolCall,
    thinking_variables,
)
from penstock.gateway.base.request_bodies import (
    PrepareContext,
    invalid,
    prompt_too_long,
    unsupported,
    without_lone_surrogates,
)
from penstock.gateway.media.sources import MediaPart
from penstock.infra.model.modeldir import ModelDir, Vision
from penstock.infra.text.chat_template import ChatTemplate, PromptEnd, TemplateBudgetError, TemplateError
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import Media

Messages = list[dict[str, Any]]

# type of content part -> field with the URL
MEDIA_FIELDS = {
    "image_url": "image_url", "input_image": "image_url", "image_embeds": "image_embeds", "video_url": "video_url"
}  # fmt: skip
# type of content part -> field with the text, for the types that OpenAI's APIs use
TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_KNOWN_PARTS = "use 'text', 'image_url', 'image_embeds' or 'video_url'"


def template_messages(messages: list[ChatMessage], walks_parts: Set[str] = frozenset()) -> list[dict[str, Any]]:
    """Messages for a chat template.

    Content is one string, or a list of ``{"type": "text", "text": ...}``, ``{"type": "image"}`` and
    ``{"type": "video"}``: with media, and where the template walks such lists. Arguments of tool calls are objects;
    those that the model did not write as one are text.

    Args:
        walks_parts: roles in whose messages the template writes each part of a list. Elsewhere texts are joined with a
            line break, so that their words do not merge.
    Raises:
        ServingError: a content part that is not supported.
    """
    return [
        {"role": message.role, "content": message.content}
        if message.content.__class__ is str and message.role == "user" and message.name is None
        else _template_message(f"messages[{number}]", message, message.role in walks_parts)
        for number, message in enumerate(messages)
    ]


def media_parts(messages: list[ChatMessage]) -> list[MediaPart]:
    """Images, embedding files and videos in the order of the messages, which ``template_messages`` has accepted."""
    parts = []
    for number, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for i, part in enumerate(message.content):
            if name := MEDIA_FIELDS.get(part.type):
                value: MediaUrl | str = getattr(part, name)
                url = value if isinstance(value, str) else value.url
                field = f"messages[{number}].content[{i}].{name}"
                parts.append(MediaPart(field, url, name == "image_embeds", name == "video_url"))
    return parts


def _template_message(field: str, message: ChatMessage, walks: bool) -> dict[str, Any]:
    # Clients send our answers back, and those may consist of tool calls or truncated reasoning alone.
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if message.content is None and message.role not in ("assistant", "tool"):  # those may be empty
        raise invalid(f"{field}.content", f"{field}.content is missing")
    out: dict[str, Any] = {"role": message.role, "content": _content(field, message.role, message.content, walks)}
    for key, value in (("name", message.name), ("tool_call_id", message.tool_call_id), ("reasoning_content", thought)):
        if value is not None:
            out[key] = value
    if message.tool_calls:
        out["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return out


def _content(field: str, role: str, content: str | list[ContentPart] | None, walks: bool) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        _check_part(f"{field}.content[{i}]", role, part)
    if walks and content:
        return [*map(_shown, content)]
    if all(part.type in TEXT_FIELDS for part in content):
        return "\n".join(_shown(part)["text"] for part in content)
    parts: list[dict[str, str]] = []
    for is_text, run in groupby(content, lambda part: part.type in TEXT_FIELDS):
        if is_text:  # joined here, since the template might merge their words
            parts.append({"type": "text", "text": "\n".join(_shown(part)["text"] for part in run)})
        else:
            parts += map(_shown, run)
    return parts


def _shown(part: ContentPart) -> dict[str, str]:
    if field := TEXT_FIELDS.get(part.type):
        return {"type": "text", "text": getattr(part, field) or ""}
    return {"type": "video" if part.type == "video_url" else "image"}


def _check_part(field: str, role: str, part: ContentPart) -> None:
    if text := TEXT_FIELDS.get(part.type):
        if getattr(part, text) is None:
            raise invalid(f"{field}.{text}", f"{field}.{text} is missing")
    elif name := MEDIA_FIELDS.get(part.type):
        if getattr(part, name) is None:
            raise invalid(f"{field}.{name}", f"{field}.{name} is missing")
        if role not in ("user", "tool"):
            kind = "videos" if name == "video_url" else "images"
            raise unsupported(
                f"{field}.{name}", f"{kind} are not supported in {role} messages; put them into user messages"
            )
    elif "audio" in part.type[:40]:
        raise unsupported(
            f"{field}.type",
            f"content parts of type {part.type[:40]!r} are not supported: no model here takes audio; {_KNOWN_PARTS}",
        )
    else:
        raise unsupported(
            f"{field}.type", f"content parts of type {part.type[:40]!r} are not supported; {_KNOWN_PARTS}"
        )


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}


def _arguments(call: ToolCall) -> Any:
    """Arguments as templates take them. A conversation must continue even if a limit cut off the model's call."""
    given = call.function.arguments
    if given is None:
        return {}
    if isinstance(given, list):
        return json.dumps(given, ensure_ascii=False)
    if isinstance(given, dict):
        return given
    try:
        text = without_lone_surrogates(given.encode()).decode() if "\\u" in given else given
        value = json.loads(text or "{}", strict=False)  # strings may hold line breaks
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else {} if value is None else given


def _as_objects(messages: Messages) -> Messages | None:
    """For a template that requires arguments to be objects: other text becomes the value of a single key."""
    found = False
    out = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if isinstance(function["arguments"], str):
                found = True
                function = {**function, "arguments": {"arguments": function["arguments"]}}
            calls.append({**call, "function": function})
        out.append({**message, "tool_calls": calls} if calls else message)
    return out if found else None


def _short_ids(messages: Messages) -> Messages | None:
    """For a template that requires ids of nine letters and digits, as Mistral's does: shorten all other ids."""
    shortened: dict[str, str] = {}

    def short(call_id: Any) -> Any:
        if not isinstance(call_id, str) or _SHORT_ID.fullmatch(call_id):
            return call_id
        return shortened.setdefault(call_id, blake3(call_id.encode()).hexdigest()[:9])

    out = []
    for each in messages:
        if "tool_call_id" in each:
            each = {**each, "tool_call_id": short(each["tool_call_id"])}
        if each.get("tool_calls"):
            each = {**each, "tool_calls": [{**call, "id": short(call["id"])} for call in each["tool_calls"]]}
        out.append(each)
    return out if shortened else None


def _one_by_one(messages: Messages) -> Messages | None:
    """For a template that takes one call per message: give each call its own message, followed by its result."""
    out: Messages = []
    waiting: list[tuple[dict[str, Any], Any]] = []  # messages of further calls, and the calls' ids

    for each in messages:
        if waiting and each["role"] != "tool":
            out += [message for message, _ in waiting]
            waiting = []
        if each["role"] == "tool":
            at = next((at for at, (_, call_id) in enumerate(waiting) if call_id == each.get("tool_call_id")), None)
            if at is not None:
                out.append(waiting.pop(at)[0])
            out.append(each)
        elif len(calls := each.get("tool_calls") or ()) > 1:
            first, *others = ({**(each if at == 0 else _BARE), "tool_calls": [call]} for at, call in enumerate(calls))
            out.append(first)
            waiting = [(message, call["id"]) for message, call in zip(others, calls[1:], strict=True)]
        else:
            out.append(each)
    out += [message for message, _ in waiting]
    return out if len(out) > len(messages) else None


def _alternating(messages: Messages) -> Messages | None:
    """For a template whose roles must alternate: join consecutive messages of a role, with an empty line between."""
    out: Messages = []
    for each in messages:
        if out and each.keys() == out[-1].keys() == {"role", "content"} and each["role"] == out[-1]["role"]:
            out[-1] = {**each, "content": _joined(out[-1]["content"], each["content"])}
        else:
            out.append(each)
    return out if len(out) < len(messages) else None


def _joined(*contents: Any) -> Any:
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(filter(None, contents))
    return [part for content in contents for part in _parts(content)]


def _answered(messages: Messages) -> Messages | None:
    """For a template that refuses a question after a call or its result: insert an answer between them."""
    out: Messages = []
    for each in messages:
        if each["role"] == "user" and out and (out[-1]["role"] == "tool" or out[-1].get("tool_calls")):
            out.append({"role": "assistant", "content": "Done."})
        out.append(each)
    return out if len(out) > len(messages) else None


def _with_content(messages: Messages) -> Messages | None:
    """For a template that refuses answers without content: leave out those of earlier turns."""
    out = [
        each
        for each in messages
        if each["role"] != "assistant" or each["content"] or each.keys() != {"role", "content"} or each is messages[-1]
    ]
    return out if len(out) < len(messages) else None


def _one_system(messages: Messages) -> Messages:
    """Join the system messages at the beginning."""
    count = next((at for at, each in enumerate(messages) if each["role"] != "system"), len(messages))
    if count < 2:
        return messages
    return [{**messages[0], "content": _joined(*(each["content"] for each in messages[:count]))}, *messages[count:]]


def suited(messages: Messages, template: ChatTemplate) -> Messages:
    """Rearrange messages so that the template leaves out none of them."""
    if template.first_call:
        messages = _one_by_one(messages) or messages
    if template.joins_system or template.leads_system:
        messages = _one_system(messages)
    if template.leads_system:
        messages = _leading_system(messages) or messages
    return messages


def _leading_system(messages: Messages) -> Messages | None:
    """For a template that takes system messages only at the beginning: turn later ones into user messages."""
    return _users(messages, 1)


def _no_system(messages: Messages) -> Messages | None:
    """For a template without system messages, as Gemma's: turn them into user messages."""
    return _users(messages, 0)


def _users(messages: Messages, first: int) -> Messages | None:
    changed = [
        {**each, "role": "user"} if each["role"] == "system" and at >= first else each
        for at, each in enumerate(messages)
    ]
    return changed if changed != messages else None


def _parts(content: Any) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_BARE: dict[str, Any] = {"role": "assistant", "content": ""}
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
# For templates that refuse what clients send. Each returns equivalent messages; None: there is nothing to change.
_CALLS = (_as_objects, _short_ids, _one_by_one)
_ADAPTATIONS = (*_CALLS, _leading_system, _no_system, _alternating, _answered, _with_content)
_TOGETHER = (*_CALLS, _leading_system, _answered, _with_content, _alternating)  # if no single one helps


def rendered(messages: Messages, render: Callable[[Messages], str]) -> str:
    """Render messages, adapted if their template refuses them.

    Raises:
        TemplateError: the template refuses them, with every adaptation.
        TemplateBudgetError: rendering takes too long.
    """
    try:
        return render(messages)
    except TemplateBudgetError:
        raise
    except TemplateError as refusal:
        return _rendered_adapted(messages, refusal, render)


def _rendered_adapted(messages: Messages, refusal: TemplateError, render: Callable[[Messages], str]) -> str:
    """As ``rendered``, after a refusal, which is raised if no adaptation helps."""
    reason = str(refusal)
    for adapt in _ADAPTATIONS:
        if (adapted := adapt(messages)) is None:
            continue
        try:
            return render(adapted)
        except TemplateBudgetError:
            raise
        except TemplateError as error:
            if str(error) != reason:  # it refuses something else now, so this adaptation helped
                messages, reason = adapted, str(error)
    for adapt in _TOGETHER:
        messages = adapt(messages) or messages
    try:
        return render(messages)
    except TemplateBudgetError:
        raise
    except TemplateError:
        raise refusal from None


_FEW_MESSAGES = 64  # that many are rendered before their length is known
_PROBE_CHARS_PER_TOKEN = 16  # longer texts are first checked by tokenising this many characters per token that fits


class Prompt(NamedTuple):
    """
    Attributes:
        tokens: with one placeholder per medium.
        media: what to load, in the order of their placeholders.
        min_tokens: length once the placeholders are expanded; an embedding file or video may have more than one token.
    """

    tokens: Sequence[int]
    media: Sequence[MediaPart]
    min_tokens: int


def chat_prompt(body: ChatCompletionRequest, context: PrepareContext) -> Prompt:
    """The prompt that the model's chat template makes of the messages.

    Raises:
        ServingError: the model or its template does not accept the messages, or the prompt is too long.
    """
    if len(body.messages) > context.max_messages:
        raise invalid(
            "messages",
            f"messages has {len(body.messages)} entries; the limit is {context.max_messages} (--max-messages)",
        )
    template = _template_for(body, context.model)
    given = body.messages if context.model.vision is not None else list(map(_without_media, body.messages))
    messages, media = template_messages(given, template.walks_parts), media_parts(given)
    if len(messages) > _FEW_MESSAGES and template.keeps_texts:
        _check_texts(messages, context)
    vision = context.model.vision
    _check_media(media, vision, context)
    only_media = not context.special_tokens_as_text
    try:
        if context.model.plain.found(messages, _given(body), body.chat_template_kwargs, only_media=only_media):
            tokens = _escaped_template_tokens(body, messages, context)
        else:
            tokens = encode(_render_template(body, messages, context), context, special=False)
    except RecursionError:
        raise invalid("messages", "tools, arguments or variables are nested too deeply") from None
    if vision is None:
        return Prompt(tokens, (), len(tokens))
    wanted = [vision.video_token_id if part.video else vision.image_token_id for part in media]
    found = sum(map(tokens.count, vision.placeholders))
    if found != len(media) or [token for token in tokens if token in vision.placeholders] != wanted:
        one, kind = ("image or video", "images and videos") if vision.video_token else ("image", "images")
        raise invalid(
            media[0].field if media else "messages",
            f"the model's chat template writes {found} {one} placeholders for {len(media)} {kind}"
            f"{'' if found != len(media) else ', in another order'}; put {kind} into user messages, or start the "
            "gateway with another --chat-template",
        )
    expanded = sum(1 if part.embedding or part.video else vision.image_tokens for part in media)
    return Prompt(tokens, media, len(tokens) - len(media) + expanded)


def _without_media(message: ChatMessage) -> ChatMessage:
    """A tool's result with a line in place of each image and video. Agents look at files, and send each result with
    every later request: if it was refused, their conversation would be over."""
    if message.role != "tool" or not isinstance(message.content, list):
        return message
    parts = [
        ContentPart("text", f"[The {'video' if 'video' in part.type else 'image'} cannot be shown to this model.]")
        if part.type in MEDIA_FIELDS
        else part
        for part in message.content
    ]
    return msgspec.structs.replace(message, content=parts)


def _check_media(media: Sequence[MediaPart], vision: Vision | None, context: PrepareContext) -> None:
    """
    Raises:
        ServingError: the model does not take them, or they are too many.
    """
    videos = [part for part in media if part.video]
    images = [part for part in media if not part.video]
    if vision is None and media:
        kind = "videos" if media[0].video else "images"
        # Claude Code knows these words: it leaves the images out, tells the model so, and continues.
        raise unsupported(media[0].field, f"could not process {kind}: {context.model.no_vision}")
    if vision is not None and videos and not vision.video_token:
        raise unsupported(videos[0].field, "videos are not supported: this model takes images only")
    if vision is not None and vision.patches is not None:
        for part in images:
            if part.embedding:
                raise unsupported(part.field, "embedding files are not supported by this model; send the image")
    for kind, parts, limit in (("images", images, context.max_images), ("videos", videos, context.max_videos)):
        if len(parts) > limit:
            raise invalid(
                parts[limit].field, f"the request has {len(parts)} {kind}; the limit is {limit} (--max-{kind})"
            )


def completion_prompt(body: CompletionRequest, context: PrepareContext) -> Prompt:
    """The one prompt of a completion: text that is tokenised, or token ids as they are.

    Raises:
        ServingError: several prompts, an id outside the vocabulary, an image token, or too long.
    """
    prompt, model = single_prompt(body), context.model
    tokens: Sequence[int]
    if isinstance(prompt, str):
        tokens = encode(prompt, context, special=True)
    elif max(prompt, default=0) >= model.vocab_size:
        raise invalid("prompt", f"prompt has token id {max(prompt)}; ids must be below {model.vocab_size}")
    else:
        tokens = prompt
    for token, text in model.vision.placeholders.items() if model.vision is not None else ():
        if token in tokens:
            kind = "video" if token == model.vision.video_token_id else "image"  # type: ignore[union-attr]
            raise invalid("prompt", f"prompt contains the {kind} token {text!r}; send {kind}s to /v1/chat/completions")
    return Prompt(tokens, (), len(tokens))


def truncated(prompt: Prompt, body: ChatCompletionRequest | CompletionRequest, context: PrepareContext) -> Prompt:
    """The prompt's last tokens, or its first ones, if the body says how many to keep.

    Raises:
        ServingError: more than the context has, or images would lose their places.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    limit = context.max_model_len
    if keep > limit:
        raise invalid(
            "truncate_prompt_tokens", f"truncate_prompt_tokens is {keep}; the model's context length is {limit}"
        )
    if keep < 0:
        chat = isinstance(body, ChatCompletionRequest)
        wanted = (body.max_completion_tokens if chat else None) or body.max_tokens or 1  # type: ignore[union-attr]
        keep = max(1, limit - wanted)
    if prompt.min_tokens <= keep:
        return prompt
    if prompt.media:
        raise unsupported("truncate_prompt_tokens", "truncate_prompt_tokens is not supported with images or videos")
    kept = prompt.tokens[:keep] if body.truncation_side == "right" else prompt.tokens[-keep:]
    return Prompt(kept, (), keep)


def single_prompt(body: CompletionRequest) -> str | list[int]:
    """
    Raises:
        ServingError: no prompt, several, or a mixture of texts and token ids.
    """
    prompt = body.prompt
    if isinstance(prompt, list):
        kinds = {entry.__class__ for entry in prompt}
        if kinds == {int}:
            return prompt  # type: ignore[return-value]
        if len(prompt) != 1:
            given = f"{len(prompt)} prompts" if len(kinds) == 1 else "a mixture" if kinds else "an empty list"
            raise invalid("prompt", f"prompt is {given}; the limit is 1 prompt per request")
        prompt = prompt[0]  # type: ignore[assignment]
    return prompt  # type: ignore[return-value]


def expand_media(prompt: Prompt, media: Sequence[Media], vision: Vision) -> tuple[list[int], tuple[Media, ...]]:
    """Replace each placeholder by as many as its medium has tokens; returns the tokens and the media in place."""
    tokens: list[int] = []
    placed = []
    start = 0
    for medium in media:
        token = vision.video_token_id if medium.kind.startswith("video/") else vision.image_token_id
        at = prompt.tokens.index(token, start)
        tokens += prompt.tokens[start:at]
        placed.append(msgspec.structs.replace(medium, position=len(tokens)))
        tokens += [token] * medium.tokens
        start = at + 1
    return [*tokens, *prompt.tokens[start:]], tuple(placed)


def encode(text: str, context: PrepareContext, *, special: bool) -> "array[int]":
    """Token ids; text that cannot fit is refused before all of it is tokenised.

    Args:
        special: add the tokens that the tokenizer puts around a text, such as BOS.
    Raises:
        ServingError: too long.
    """
    _check_length(text, context, special=special)
    return context.model.encoder.encode(text, special=special)


def _escaped_template_tokens(
    body: ChatCompletionRequest, messages: list[dict[str, Any]], context: PrepareContext
) -> Sequence[int]:
    """Of messages with the text of special tokens, which must not become those tokens.

    A mark put into such text survives the template and keeps the tokenizer from seeing a special token.
    """
    plain, only_media = context.model.plain, not context.special_tokens_as_text
    text, mark = "", ""
    for mark in plain.marks(messages, _given(body), body.chat_template_kwargs):
        inert = plain.marked(messages, mark, only_media=only_media)
        tools = plain.marked_value(body.tools, mark, only_media=only_media)
        documents = plain.marked_value(body.documents, mark, only_media=only_media)
        variables = plain.marked_value(body.chat_template_kwargs, mark, only_media=True)
        if plain.found(inert, (tools, documents), variables, only_media=only_media):
            break  # the tokenizer's normaliser still makes a special token of it
        marked = msgspec.structs.replace(body, tools=tools, documents=documents, chat_template_kwargs=variables)
        text = _render_template(marked, inert, context)
        _check_length(text, context, special=False)
        tokens = plain.encode(text, mark)
        if tokens is not None:
            return tokens
    if not text:
        raise invalid("messages", "the messages contain the text of a special token that this tokenizer cannot escape")
    # This tokenizer merges marks with their neighbours: tokenise the text between them piece by piece.
    return [token for piece in text.split(mark) for token in encode(piece, context, special=False)]


def _given(body: ChatCompletionRequest) -> Any:
    """What clients write beside the messages, all of it text that must stay text."""
    return body.tools if body.documents is None else (body.tools, body.documents)


def _offered_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as the model sees them, without ``strict``, which affects decoding only."""
    return [_offered_tool(tool, tool.get("function")) for tool in tools]


def _offered_tool(tool: dict[str, Any], function: Any) -> dict[str, Any]:
    if not isinstance(function, dict) or "strict" not in function:
        return tool
    return {**tool, "function": {key: value for key, value in function.items() if key != "strict"}}


def _described(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools with the description and properties that some templates require."""
    described = []
    for tool in tools:
        given = {key: value for key, value in tool["function"].items() if value is not None}
        parameters = {"type": "object", "properties": {}, **given.get("parameters", {})}
        described.append({**tool, "function": {"description": "", **given, "parameters": parameters}})
    return described


def _template_for(body: ChatCompletionRequest, model: ModelDir) -> ChatTemplate:
    """The model's template for this chat: of several, one is for tools.

    Raises:
        ServingError: unsupported: it has none.
    """
    if model.template is None:
        raise unsupported(
            "messages",
            f"model {model.name!r} has no chat template, so chat completions are not supported; use /v1/completions, "
            "or start the gateway with --chat-template",
        )
    return model.template.suited(body.tools if body.tool_choice != "none" else None, body.documents)


def _render_template(body: ChatCompletionRequest, messages: list[dict[str, Any]], context: PrepareContext) -> str:
    template = _template_for(body, context.model)
    for number, each in enumerate(messages):
        if each["role"] not in ROLES and not template.names(each["role"]):
            at = f"messages[{number}].role"
            known = ", ".join(ROLES)
            raise invalid(at, f"{at} {each['role']!r} is not known to the model's chat template; use {known}")
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort, **variables}
    if body.verbosity is not None:
        variables = {"verbosity": body.verbosity, **variables}
    switch = body.thinking or (NO_THINKING if body.reasoning_effort == "none" else None)
    if (thinks := thinking_variables(switch)) is not None and variables.keys().isdisjoint(thinks):
        variables = {**thinks, **variables}
    if reserved := template.own_variables & variables.keys():
        raise invalid("chat_template_kwargs", f"chat_template_kwargs must not set {', '.join(sorted(reserved))}")
    tools = _offered_tools(body.tools) if body.tools and body.tool_choice != "none" else None
    if not template.writes_developer:
        messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    ends = PromptEnd.generation if body.add_generation_prompt is not False else PromptEnd.last_message
    if body.continue_final_message:
        ends = PromptEnd.last_text
    refusal: TemplateError | None = None
    messages = suited(messages, template)
    for offered in (tools, _described(tools)) if tools else (tools,):
        try:
            try:  # without the frames of ``rendered``: most templates refuse nothing
                return template.render(messages, offered, ends, body.documents, **variables)
            except TemplateBudgetError:
                raise
            except TemplateError as error:
                return _rendered_adapted(
                    messages,
                    error,
                    lambda each, offered=offered: template.render(each, offered, ends, body.documents, **variables),  # type: ignore[misc]
                )
        except TemplateBudgetError as error:
            raise _too_costly(error) from None
        except TemplateError as error:
            refusal = refusal or error
    message = f"the model's chat template rejects these messages: {str(refusal)[:300]}"
    raise invalid("messages", message)


def _too_costly(error: TemplateBudgetError) -> ServingError:
    setting = " (--template-cpu-s of the gateway)" if error.cpu_s else ""
    return invalid(
        "messages", f"the model's chat template cannot be applied to these messages: {error}{setting}; send fewer"
    )


def _check_texts(messages: list[dict[str, Any]], context: PrepareContext) -> None:
    """Before they are rendered.

    Raises:
        ServingError: the messages' texts alone have more tokens than fit.
    """
    size = sum(len(text) for each in messages if (text := each["content"]).__class__ is str)
    if size > context.max_model_len * context.model.detokenizer.longest_bytes:
        raise prompt_too_long(size // context.model.detokenizer.longest_bytes, context.max_model_len, at_least=True)


def _check_length(text: str, context: PrepareContext, *, special: bool) -> None:
    """
    Raises:
        ServingError: by its length and its beginning, the text has more tokens than fit.
    """
    limit = context.max_model_len
    if len(text) <= limit * _PROBE_CHARS_PER_TOKEN:
        return
    longest = context.model.detokenizer.longest_bytes
    if len(text) > limit * longest:
        raise prompt_too_long(len(text) // longest, limit, at_least=True)
    # Cut anywhere: only the last word may be split differently, so the count can only be slightly too high.
    start = len(context.model.encoder.encode(text[: limit * _PROBE_CHARS_PER_TOKEN], special=special))
    if start > limit + _PROBE_CHARS_PER_TOKEN:
        raise prompt_too_long(start, limit, at_least=True)
