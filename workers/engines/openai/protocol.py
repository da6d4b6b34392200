"""Requests to a server's ``/v1/completions``, and its answers as numbered tokens. Pure."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from penstock.schemas.done import Usage
from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.engine_protocol import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.external.sampling import bias, check_sampling, greedy, seed_of, shape, stop_ids
from penstock.workers.engines.external.sequences import MISSING, Token

TAIL = 8  # tokens before a piece of text that may change how it is written
SEEDS = (1 << 31) - 1  # of the smallest integers that servers take


class ServerAbilities(NamedTuple):
    """What a server was found to do.

    Attributes:
        model: its name there.
        takes_ids: prompts as token ids, which mean there what they mean here.
        sends_ids: the ids of its answer's tokens.
    """

    model: str
    takes_ids: bool
    sends_ids: bool
    max_model_len: int = 0  # that it says; 0: it does not
    takes_salt: bool = False  # ``cache_salt``, which keeps the caches of tenants apart
    refuses: frozenset[str] = frozenset()  # of ``OPTIONAL``, or ``CHAT_OPTIONAL``
    chat: bool = False  # it is asked for chats, not for completions
    limit: str = "max_tokens"  # the name of that in a chat
    named: frozenset[str] = frozenset()  # flags that name a format of the model's, as which its answers are read here
    schemas: bool = False  # an answer that matches a JSON schema
    continues: Mapping[str, bool] | None = None  # fields by which it continues a chat's last message; None: it does not


# Options beyond OpenAI's that models have defaults for, each with a value to ask with. A server that refuses a name is
# not sent it: it would refuse every request of such a model.
OPTIONAL: Mapping[str, Any] = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}


# The same of chats. Some models take no temperature, and some servers refuse what they do not know.
CHAT_OPTIONAL: Mapping[str, Any] = {
    **OPTIONAL,
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "seed": 1,
    "stream_options": {"include_usage": True},
}


class BadAnswer(Exception):
    """An answer that cannot become tokens."""


ABORTED = ("abort", "cancelled", "error")  # finish reasons that do not end the answer: another attempt continues it


def check(request: SequenceRequest, info: EngineInfo, abilities: ServerAbilities) -> None:
    """
    Raises:
        RequestError: it can never run here.
    """
    check_sampling(request, info)
    if request.sampling.prompt_logprobs is not None:
        raise RequestError(Code.unsupported, "this worker's server returns no log-probabilities of prompts")
    if request.sampling.logprobs is not None and not abilities.sends_ids:
        raise RequestError(
            Code.unsupported, "this worker's server sends no token ids, so its log-probabilities have no tokens here"
        )
    if request.media:
        raise RequestError(Code.unsupported, "this worker's server is asked for text only")


def body_of(
    request: SequenceRequest, said: Seq[int], abilities: ServerAbilities, info: EngineInfo, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The body of a request that continues after what was generated.

    Options beyond OpenAI's are named only where a request has them: some servers refuse names that they do not know.
    """
    sampling, stop = request.sampling, request.stop
    tokens = [*request.prompt, *said]
    body: dict[str, Any] = {
        "model": abilities.model,
        "prompt": tokens if abilities.takes_ids else text_of(tokenizer, tokens),
        "max_tokens": stop.max_tokens - len(said),
        "stream": True,
        "seed": seed_of(sampling.seed, request.choice, len(said)) & SEEDS,
    }
    body |= {"temperature": 0.0} if greedy(sampling) else shape(sampling)
    if not body.get("top_k", 1):
        del body["top_k"]
    for name in abilities.refuses & body.keys():
        del body[name]
    if biases := bias(sampling, said):
        body["logit_bias"] = {str(token): value for token, value in biases.items()}
    if stop.ignore_eos:
        body["ignore_eos"] = True
    if stop.token_ids:
        body["stop_token_ids"] = sorted(stop_ids(stop, info.eos_token_ids))
    if request.salt and abilities.takes_salt:
        body["cache_salt"] = request.salt
    if stop.min_tokens > len(said):
        body["min_tokens"] = stop.min_tokens - len(said)
    if abilities.sends_ids:
        body["return_token_ids"] = True
        if sampling.logprobs is not None:
            body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    return body


def text_of(tokenizer: Tokenizer, tokens: Seq[int]) -> str:
    """A prompt as text. Its first token may stand for the beginning, which servers add."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
    first: str = tokenizer.decode(list(tokens[:1]), skip_special_tokens=False)
    opening = list(tokenizer.encode("").ids)
    return text.removeprefix(first) if opening and list(tokens[: len(opening)]) == opening else text


def tokens_of(tokenizer: Tokenizer, before: Seq[int], text: str) -> list[int]:
    """Tokens that write a piece of text after others.

    Raises:
        BadAnswer: none do.
    """
    tail = list(before[-TAIL:])
    written = tokenizer.decode(tail, skip_special_tokens=False) if tail else ""
    for lead in ("", "\n"):  # some tokenizers begin what they write with a space of their own
        skipped = len(tokenizer.encode(lead, add_special_tokens=False).ids) if lead else 0
        ids: list[int] = list(tokenizer.encode(lead + text, add_special_tokens=False).ids)[skipped:]
        if tokenizer.decode([*tail, *ids], skip_special_tokens=False) == written + text:
            return ids
    raise BadAnswer(f"the tokenizer of the model does not write {text[:80]!r}, which its server sent")


def ended(new: list[Token], reason: str, eos: Seq[int]) -> list[int]:
    """End an answer, whose last tokens are these, for a reason; returns the ids of tokens that this takes.

    The server has not sent the token that ended it, or counts tokens in another way.
    """
    if reason == "length" and new:
        new[-1] = new[-1]._replace(finish="length")
        return []
    end = eos[0] if eos else 0
    new.append(Token(end, "stop", None, end) if reason == "stop" else Token(end, "length"))
    return [end]


class CompletionReader:
    """Chunks of one sequence's answers → its tokens, each once, and its end.

    Args:
        said: tokens that were generated before.

    Attributes:
        said: with those of this answer.
        finished: the sequence has ended.
        aborted: the server's reason if it gave up, after the sent tokens; "": it did not.
        usage: as the server counted; None: tokens are counted here.
        waits: the answer has ended, and what follows its end has not come.
    """

    usage: Usage | None = None
    waits = False

    def __init__(self, request: SequenceRequest, said: Seq[int], abilities: ServerAbilities, info: EngineInfo,
                 tokenizer: Tokenizer) -> None:  # fmt: skip
        self.said = list(said)
        self.finished = False
        self.aborted = ""
        self._request = request
        self._abilities = abilities
        self._eos = info.eos_token_ids
        self._vocab_size = info.vocab_size
        self._stops = stop_ids(request.stop, info.eos_token_ids)
        self._tokenizer = tokenizer

    def take(self, chunk: Mapping[str, Any]) -> list[Token]:
        """
        Raises:
            BadAnswer: its text cannot be written in the model's tokens, its ids are none of the model's, or it ended
                for another reason than others do.
        """
        choices = chunk.get("choices") or ()
        if not choices or self.finished:
            return []
        choice, new = choices[0], list[Token]()
        for at, token in enumerate(self._ids(choice)):
            self.said.append(token)
            logprob = self._logprob(choice, token, at)
            if token in self._stops and len(self.said) > self._request.stop.min_tokens:
                new.append(Token(token, "stop", logprob, token))
            else:
                new.append(Token(token, "length" if len(self.said) >= self._request.stop.max_tokens else "", logprob))
            if new[-1].finish:
                self.finished = True
                return new
        if reason := choice.get("finish_reason"):
            if reason in ABORTED:
                self.aborted = str(reason)
                return new
            if reason not in ("stop", "length"):
                raise BadAnswer(f"the server ended the answer with {str(reason)[:80]!r}")
            self.finished = True
            self.said += ended(new, reason, self._eos)
        return new

    def end(self) -> list[Token]:
        """Nothing follows: what ends the sequence then; empty: it has not ended."""
        return []

    def _ids(self, choice: Mapping[str, Any]) -> list[int]:
        if self._abilities.sends_ids:
            ids = [int(token) for token in choice.get("token_ids") or ()]
            if unknown := [token for token in ids if not 0 <= token < self._vocab_size]:
                raise BadAnswer(
                    f"the server sent token {unknown[0]}, and the model has {self._vocab_size}: is it another one?"
                )
            return ids
        text = choice.get("text") or ""
        return tokens_of(self._tokenizer, [*self._request.prompt[-TAIL:], *self.said[-TAIL:]], text) if text else []

    def _logprob(self, choice: Mapping[str, Any], token: int, at: int) -> Logprob | None:
        top = self._request.sampling.logprobs
        if top is None:
            return None
        found = choice.get("logprobs") or {}
        own, best = found.get("token_logprobs") or (), found.get("top_logprobs") or ()
        if at >= len(own) or own[at] is None:
            return Logprob(MISSING)
        named = (best[at] or {}) if at < len(best) and top else {}
        pairs = [(int(name.removeprefix("token_id:")), float(value)) for name, value in named.items()
                 if name.removeprefix("token_id:").isdigit()]  # fmt: skip
        return Logprob(float(own[at]), tuple(sorted(pairs, key=lambda pair: -pair[1])[:top]))


START = 4  # sequences that a server gets at once before anything is known of it
LATE, LATE_S = 3.0, 0.5  # a first token is late that takes this many times as long as it may, and so much longer
SEEN = 8  # first tokens after which a usual time is known
FORGETS = 0.01  # of the difference, with each first token: how fast a usual time follows a server that got slower
LESS_LATE = 0.8  # of the window are left when first tokens are late; when the server refuses, half


class UsualTimes:
    """How long first tokens take while nothing waits at the server: the least seen, by length of the prompt."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}  # by the prompt's length in bits: how many, and the least

    def late(self, seconds: float, prompt_tokens: int) -> bool:
        """Note a first token. Whether it came so late that it must have waited."""
        size = prompt_tokens.bit_length()
        count, usual = self._seen.get(size, (0, seconds))
        self._seen[size] = (count + 1, min(seconds, usual + FORGETS * (seconds - usual)))
        return count >= SEEN and seconds > max(LATE * usual, usual + LATE_S)


class ConcurrencyWindow:
    """How many sequences a server gets at once, as its answers teach: additive increase, multiplicative decrease.

    It doubles until the server is overloaded for the first time, then grows by one per this many first tokens. Only
    a full window grows: what is not used shows nothing. It shrinks when the server refuses (to half), and when first
    tokens are late (to ``LESS_LATE``), once for all that was on its way by then.

    Args:
        most: never more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = float(min(START, most))
        self._slow_start = True
        self._usual = UsualTimes()
        self._until = 0.0  # monotonic; what tells of an overload before is known already
        self._closed_until = 0.0  # monotonic; the server takes nothing before

    @property
    def size(self) -> int:
        return int(self._size)

    def first_token(self, seconds: float, prompt_tokens: int, running: int, now: float) -> None:
        """An answer has begun.

        Args:
            seconds: since it was asked for.
            running: sequences that the server has.
            now: monotonic.
        """
        if self._usual.late(seconds, prompt_tokens):
            if now - seconds >= self._until and running > 1:
                self._shrink(running, LESS_LATE)
                self._until = now
        elif running >= self.size and now - seconds >= self._until:
            self._size = min(self._most, self._size + (1.0 if self._slow_start else 1.0 / self._size))

    def overloaded(self, running: int, now: float, wait_s: float) -> None:
        """The server refuses further ones.

        Args:
            running: that it has.
            now: monotonic. Refusals of one overload count once.
            wait_s: for so long it wants to be asked nothing.
        """
        if now >= self._until:
            self._shrink(running, 0.5)
            self._until = now + wait_s
        self._closed_until = max(self._closed_until, now + wait_s)

    def pause_s(self, now: float) -> float:
        """How long to wait before the server is asked again."""
        return max(0.0, self._closed_until - now)

    def _shrink(self, running: int, left: float) -> None:
        self._slow_start = False
        self._size = max(1.0, min(self._size, running) * left)
