"""Requests to a server's ``/v1/chat/completions``, and its answers as numbered tokens. Pure.

Such a server makes the prompt, and parses the answer: thoughts and tool calls come in fields of their own. They become
text again, with the marks of the family ``PARSED``, and that becomes tokens of the folder's tokenizer, so that what
streams is tokens here, too. The marks have a control character, which is taken out of what the server sends.
"""

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
from tokenizers import Tokenizer

from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.text.parsers.families import PARSED, TABLE
from penstock.schemas.done import Usage
from penstock.schemas.errors import Code
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.external.sampling import check_sampling, seed_of
from penstock.workers.engines.external.sequences import Token
from penstock.workers.engines.openai.protocol import ABORTED, SEEDS, TAIL, BadAnswer, ServerAbilities, ended, tokens_of

_THOUGHTS, _CALLS = TABLE.thoughts(PARSED), TABLE.calls(PARSED)
assert _THOUGHTS is not None
assert _CALLS is not None
THINK, THOUGHT = _THOUGHTS.opening[0], _THOUGHTS.closing[0]
CALL, CALLED = _CALLS.section
HEAD = _CALLS.head
CONTROL = "\x10"  # part of every mark
assert all(CONTROL in mark for mark in (THINK, THOUGHT, CALL, CALLED, HEAD))

MOST_COUNT = 1 << 31  # tokens that a server may say it counted
# An answer ends here when it has this many times the requested tokens, and these: a server that keeps the limit
# has a tokenizer of its own, whose tokens may be longer.
TIMES, BESIDE = 16, 4096

LOST = "the server was lost when {} tokens had been sent. It cannot continue such an answer; send the request again"
ENDS = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}


BY_FLAGS: Mapping[str, bool] = {"continue_final_message": True, "add_generation_prompt": False}


def continues(answer: int, continued: int, again: int) -> Mapping[str, bool] | None:
    """The fields by which a server continues the message "1" of a chat; None: it does not, or this is unknown.

    Args:
        answer: tokens of a prompt that ends with a question.
        continued: with "1" as the answer's beginning, and ``BY_FLAGS``; 0: it was refused.
        again: the same without flags; 0: it was refused.
    """
    if continued > 0 and (not again or continued < again):
        return BY_FLAGS
    return {} if answer > 0 and again == answer + 1 else None  # a closed message takes some tokens more


class _Format(msgspec.Struct):
    type: str = ""


class _Asked(msgspec.Struct):
    """What of a chat not every server does."""

    response_format: _Format | None = None
    continue_final_message: bool = False


def check_chat(request: SequenceRequest, info: EngineInfo, abilities: ServerAbilities, tokenizer: Tokenizer) -> None:
    """
    Raises:
        RequestError: it can never run here.
    """
    check_sampling(request, info)
    if not request.chat:
        raise RequestError(Code.unsupported, "this worker's server takes chats only, and the request has none")
    for name, asked in (("logprobs", request.sampling.logprobs), ("prompt_logprobs", request.sampling.prompt_logprobs)):
        if asked is not None:
            raise RequestError(
                Code.unsupported, f"{name}: this worker's server has chats only, whose tokens are its own"
            )
    if request.generated and not can_continue(request.generated, abilities, tokenizer):
        raise RequestError(Code.worker_lost, LOST.format(len(request.generated)))
    chat = msgspec.json.decode(request.chat, type=_Asked)
    if chat.response_format is not None and chat.response_format.type == "json_schema" and not abilities.schemas:
        raise RequestError(Code.unsupported, "response_format: this worker's server applies no JSON schemas")
    if chat.continue_final_message and abilities.continues != BY_FLAGS:
        raise RequestError(Code.unsupported, "continue_final_message: this worker's server does not continue messages")


def check_marks(tokenizer: Tokenizer) -> None:
    """
    Raises:
        BadArguments: the tokenizer cannot write the marks, so that thoughts and calls would be lost.
    """
    try:
        tokens_of(tokenizer, (), f"a{THINK}b{THOUGHT}{CALL}{HEAD}{{}}{CALLED}")
    except BadAnswer as error:
        raise BadArguments(
            ["--model: its tokenizer drops control characters, which mark thoughts and calls; name another folder"]
        ) from error


def can_continue(said: Seq[int], abilities: ServerAbilities, tokenizer: Tokenizer) -> bool:
    """Whether the server can continue after these tokens: after content, not within thoughts or calls."""
    return abilities.continues is not None and CONTROL not in tokenizer.decode(list(said), skip_special_tokens=False)


def chat_body_of(
    request: SequenceRequest, said: Seq[int], abilities: ServerAbilities, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The body of a request that continues after what was generated: what the client said, and little more."""
    body: dict[str, Any] = msgspec.json.decode(request.chat)
    limit = body.pop("max_tokens", None)
    if said:
        text, messages = tokenizer.decode(list(said), skip_special_tokens=False), body["messages"]
        if body.get("continue_final_message"):
            messages[-1]["content"] = _joined(messages[-1].get("content"), text)
        else:
            messages.append({"role": "assistant", "content": text})
        body |= abilities.continues or {}
    body |= {"seed": seed_of(request.sampling.seed, request.choice, len(said)) & SEEDS}
    if request.salt and abilities.takes_salt:
        body["cache_salt"] = request.salt
    body["stream_options"] = {"include_usage": True}
    for name in abilities.refuses & body.keys():
        del body[name]
    if limit is not None:
        body[abilities.limit] = max(1, limit - len(said))
    return body | {"model": abilities.model, "stream": True}


def _joined(content: Any, text: str) -> Any:
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text


class AnswerText:
    """Deltas of an answer → its text, with marks around thoughts and calls.

    Args:
        named: as in ``ServerAbilities``.
        continued: it continues content. Servers that expect an answer to begin with thoughts take it for one.

    Attributes:
        thought: there were thoughts.
    """

    def __init__(self, named: Set[str] = frozenset(), *, continued: bool = False) -> None:
        self._named = named
        self._continued = continued
        self.thought = False
        self._within = ""  # THINK or CALL
        self._begun = False  # there is more than thoughts
        self._call: tuple[Any, Any] = (None, None)  # index and id of the one that is open
        self._arguments = False  # it has some

    def take(self, delta: Mapping[str, Any]) -> str:
        """
        Raises:
            BadAnswer: a call has no name, or continues after another one; or the answer is parsed against a flag.
        """
        out: list[str] = []
        thought = _plain(delta.get("reasoning_content") or delta.get("reasoning"))
        if thought and self._continued:
            thought, out = "", [thought]
        if thought:
            self.thought = True
            self._check("--reasoning-parser", "reasoning")
        if thought and not self._begun:  # what is thought after the beginning of the answer has no place in it
            if self._within != THINK:
                self._within = THINK
                out.append(THINK)
            out.append(thought)
        if content := _plain(delta.get("content")) or _plain(delta.get("refusal")):
            out += [self.close(), content]
            self._begun = True
        for call in delta.get("tool_calls") or ():
            out += self._tool_call(call)
        return "".join(out)

    def close(self) -> str:
        """The mark after what is open."""
        within, self._within = self._within, ""
        if within == CALL:
            return ("" if self._arguments else "{}") + CALLED
        return THOUGHT if within else ""

    def _tool_call(self, call: Mapping[str, Any]) -> list[str]:
        self._check("--tool-call-parser", "tool calls")
        function, which = call.get("function") or {}, (call.get("index"), call.get("id"))
        out = []
        if self._within != CALL or not self._is_open(which):
            name = _plain(function.get("name"))
            if not name:
                raise BadAnswer("the server sent a part of a tool call whose name it has not sent")
            out += [self.close(), CALL, HEAD.replace("{name}", name)]
            self._within, self._begun, self._call, self._arguments = CALL, True, which, False
        arguments = function.get("arguments")
        if arguments and not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        if arguments := _plain(arguments):
            self._arguments = True
            out.append(arguments)
        return out

    def _check(self, flag: str, what: str) -> None:
        if flag in self._named:
            raise BadAnswer(f"the server parses {what} itself; start this worker without {flag}")

    def _is_open(self, which: tuple[Any, Any]) -> bool:
        """Whether a part belongs to the call that is open: by its id if it has one, else by its index."""
        (index, name), (at, known) = which, self._call
        return (name == known or not known) if name else index == at


def _plain(text: Any) -> str:
    return text.replace(CONTROL, "") if isinstance(text, str) else ""


def _counts_in(usage: Mapping[str, Any], *, thought: bool) -> Usage | None:
    """A server's counts; None: they are none, such as the -1 or null of one that did not count."""
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not (isinstance(prompt, int) and isinstance(completion, int)):
        return None
    if not (0 <= prompt < MOST_COUNT and 0 <= completion < MOST_COUNT):
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return Usage(
        prompt,
        completion,
        min(max(0, int(cached)), prompt),
        -int(thought) if reasoning is None else min(max(0, int(reasoning)), completion),
        foreign=True,
    )


class ChatReader:
    """As ``CompletionReader``, of chunks of a chat. The server's counts come after the end, which waits for them.

    Attributes:
        waits: the answer has ended, and the counts have not come.
        usage: as the server counted this answer; None: it has not, or the answer began before.
    """

    def __init__(
        self, request: SequenceRequest, said: Seq[int], abilities: ServerAbilities, info: EngineInfo,
        tokenizer: Tokenizer,
    ) -> None:  # fmt: skip
        self.said = list(said)
        self.finished = False
        self.aborted = ""
        self.usage: Usage | None = None
        self._prompt = request.prompt[-TAIL:]
        self._most = TIMES * request.stop.max_tokens + BESIDE
        self._counts = not said
        self._counted = "stream_options" not in abilities.refuses  # at the end
        self._eos = info.eos_token_ids
        self._tokenizer = tokenizer
        self._text = AnswerText(abilities.named, continued=bool(said))
        self._reason = ""

    def take(self, chunk: Mapping[str, Any]) -> list[Token]:
        """
        Raises:
            BadAnswer: its text cannot be written in tokens, its calls cannot be read, or it ended for another reason
                than others do.
        """
        if self._counts and (usage := chunk.get("usage")):
            self.usage = _counts_in(usage, thought=self._text.thought)
            self._counted &= self.usage is not None
        new = list[Token]()
        if (choices := chunk.get("choices") or ()) and not self._reason:
            new = self._written(self._text.take(choices[0].get("delta") or {}))
            if reason := choices[0].get("finish_reason"):
                if reason in ABORTED:
                    self.aborted = str(reason)
                    return new
                if reason not in ENDS:
                    raise BadAnswer(f"the server ended the answer with {str(reason)[:80]!r}")
                self._reason = ENDS[reason]
            elif len(self.said) > self._most:  # the server does not keep the limit
                self._reason = "length"
                return new + self.end()
        return new + self.end() if self._reason and (self.usage is not None or not self._counted) else new

    @property
    def waits(self) -> bool:
        return bool(self._reason) and not self.finished

    def end(self) -> list[Token]:
        """Nothing follows: what ends the sequence then; empty: it has not ended, or did so before."""
        if not self._reason or self.finished:
            return []
        self.finished = True
        new = self._written(self._text.close())
        self.said += ended(new, self._reason, self._eos)
        return new

    def _written(self, text: str) -> list[Token]:
        ids = tokens_of(self._tokenizer, [*self._prompt, *self.said[-TAIL:]], text) if text else []
        self.said += ids
        return list(map(Token, ids))
