"""Removes the content of prompts and answers from messages. Pure, except for a random key, which is not stored.

A token becomes a keyed hash of itself and of every token before it in its sequence, below ``vocabulary``. So equal
prefixes stay equal, at the same lengths, and a frequent token has no frequent placeholder. A block's name becomes its
keyed hash, in prompts and KV events alike, so routing decides as before. The names are therefore not those of the
placeholder tokens; a replay has to name the blocks again (``penstock.log_tools.replay`` does).
"""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from blake3 import blake3

from penstock.log_tools.sources.log_line import DECODE, LogLine
from penstock.schemas import jobs, kv, requests, wire
from penstock.schemas.block_hashes import DIGEST_BYTES
from penstock.schemas.done import Done
from penstock.schemas.jobs import Job
from penstock.schemas.requests import GenerateRequest, PackedRequest
from penstock.schemas.subjects import DEFAULT_TENANT, token
from penstock.schemas.tokens import Logprob, TokenBatch, TokenItem
from penstock.schemas.transfer import Encoded, Prefilled, Ticket

FIRST_TOKEN = 16  # ids below may be special
VOCABULARY = 1000
BLOCK_NAMES = "Penstock-Keys"  # a header of earlier builds: hashes of the prompt
MAX_OPEN = 1_000_000  # requests whose prompt is remembered until their tokens come
_LETTERS = bytes(b"abcdefghijklmnopqrstuvwxyz012345"[value & 31] for value in range(256))
_replace = msgspec.structs.replace


class Redactor:
    """Redacts one export. Pass it the messages of a stream in order, REQUESTS first.

    Args:
        vocabulary: placeholders are below it, so that the model can run them.
        key: 32 bytes; None: random.
    """

    def __init__(self, vocabulary: int = VOCABULARY, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key
        self._span = max(1, vocabulary - FIRST_TOKEN)
        self._start = self._hash(b"")
        self._prompts: OrderedDict[str, bytes] = OrderedDict()  # by request: the hash of its whole prompt
        self._choices: OrderedDict[tuple[str, int], list[bytes]] = OrderedDict()  # the hash up to each position

    def record(self, record: LogLine) -> LogLine | None:
        """The message without content. None: it cannot be decoded, so its content is unknown."""
        decode = DECODE.get(record.stream)
        if decode is None or not record.data:
            return None
        try:
            message = decode(record.data)
        except msgspec.MsgspecError:
            return None
        subject = record.subject
        if isinstance(message, Done):
            subject = self._done_subject(subject)
        headers = {name: value for name, value in record.headers.items() if name != BLOCK_NAMES}
        return record._replace(subject=subject, headers=headers, data=wire.encode(self._message(message)))

    def _message(self, message: Any) -> Any:
        if isinstance(message, GenerateRequest | PackedRequest):
            return self._stored(wire.encode(message))
        if isinstance(message, Job | Encoded | Prefilled):
            return self._work(message)
        if isinstance(message, TokenBatch):
            return _replace(message, items=tuple(self._item(item) for item in message.items))
        if isinstance(message, Done):
            return self._done(message)
        if isinstance(message, kv.KvBatch):
            return _replace(message, events=tuple(self._kv_event(event) for event in message.events))
        return message  # Revoke, Returned, Handoffs: no content

    def _hash(self, *parts: bytes) -> bytes:
        return blake3(b"".join(parts), key=self._key).digest(length=DIGEST_BYTES)

    def text(self, text: str) -> str:
        """Placeholder text of the same length."""
        return blake3(text.encode(), key=self._key).digest(length=len(text)).translate(_LETTERS).decode()

    def _named(self, name: str) -> str:
        return self.text(name)[:12] if name else ""

    def _tenant(self, name: str) -> str:
        return name if name == DEFAULT_TENANT else f"t-{self.text(name)[:8]:a<8}"

    def _done_subject(self, subject: str) -> str:
        parts = subject.split(".")
        if len(parts) == 5 and parts[2] != token(DEFAULT_TENANT):
            parts[2] = self._tenant(parts[2])
        return ".".join(parts)

    def _digests(self, packed: bytes) -> bytes:
        size = DIGEST_BYTES
        return b"".join(self._hash(b"block", packed[at : at + size]) for at in range(0, len(packed), size))

    def _tokens(self, packed: bytes, state: bytes) -> tuple[bytes, list[bytes]]:
        """Placeholders for tokens that follow ``state``, and the state after each."""
        key, span, states, out = self._key, self._span, [], []
        for at in range(0, len(packed), 4):
            state = blake3(state + packed[at : at + 4], key=key).digest(length=DIGEST_BYTES)
            states.append(state)
            out.append(int.from_bytes(state[:8], "little") % span + FIRST_TOKEN)
        return wire.pack_tokens(out), states

    def _logprobs(self, logprobs: Sequence[Logprob], states: Sequence[bytes]) -> tuple[Logprob, ...]:
        """``states``: the state before each token."""

        def other(state: bytes, each: int) -> int:
            return wire.unpack_tokens(self._tokens(each.to_bytes(4, "little"), state)[0])[0]

        return tuple(
            Logprob(logprob.logprob, tuple((other(state, each), value) for each, value in logprob.top), logprob.rank)
            for logprob, state in zip(logprobs, states, strict=False)
        )

    def request(self, request: GenerateRequest) -> GenerateRequest:
        prompt, states = self._tokens(request.prompt, self._start)
        if states or request.id not in self._prompts:  # a record lacks the prompt, which REQUESTS had
            self._remember(request.id, states[-1] if states else self._start)
        drawn, stop, trace = request.diffusion, request.stop, request.trace
        if drawn is not None:
            drawn = _replace(drawn, prompt=self.text(drawn.prompt), negative=self.text(drawn.negative))
        embedded = request.embedding
        if embedded is not None:
            texts, queries = (tuple(map(self.text, each)) for each in (embedded.texts, embedded.queries))
            embedded = _replace(embedded, texts=texts, queries=queries)
        return _replace(
            request,
            prompt=prompt,
            digests=self._digests(request.digests),
            stop=_replace(stop, strings=tuple(map(self.text, stop.strings))),
            sampling=_replace(request.sampling, logit_bias={}, logits_processors=()),
            user=self._named(request.user),
            client_request_id=self._named(request.client_request_id),
            salt=self._named(request.salt),
            session=self._named(request.session),
            client_body=b"",
            chat=b"",
            tenant=self._tenant(request.tenant),
            media=tuple(_replace(each, digest=self._hash(each.digest) * 2) for each in request.media),
            diffusion=drawn,
            embedding=embedded,
            parsing=None if request.parsing is None else _replace(request.parsing, texts={}, functions=()),
            trace=None if trace is None else _replace(trace, state=""),
            constraint=None,
            fallbacks=(),
        )

    def _stored(self, data: bytes) -> GenerateRequest | PackedRequest:
        """A stored request, packed as it was."""
        request = self.request(requests.decode(data))
        return requests.packed(request) if requests.is_packed(data) else request

    def _remember(self, request: str, state: bytes) -> None:
        self._prompts[request] = state
        if len(self._prompts) > MAX_OPEN:
            self._prompts.popitem(last=False)

    def _work(self, message: Job | Encoded | Prefilled) -> Job | Encoded | Prefilled:
        if not isinstance(message, Job):
            job = wire.encode(self._work(jobs.decode_job(message.job)))
            return _replace(message, job=msgspec.Raw(job), ticket=_anonymous(message.ticket))
        request = self._stored(bytes(message.request))
        state = self._prompts[request.id if isinstance(request, GenerateRequest) else request.request.id]
        resumed = [self._tokens(part, state) for part in message.resume]
        logprobs = tuple(
            self._logprobs(part, [state, *states]) for part, (_, states) in zip(message.logprobs, resumed, strict=False)
        )
        return _replace(
            message,
            request=msgspec.Raw(wire.encode(request)),
            resume=tuple(part for part, _ in resumed),
            logprobs=logprobs,
            scores=tuple(_replace(each, top=()) for each in message.scores),
        )

    def _item(self, item: TokenItem) -> TokenItem:
        finish = item.finish
        if finish is not None and isinstance(finish.stop, str):
            finish = _replace(finish, stop=self.text(finish.stop))
        if item.choice < 0:
            scores = None if item.logprobs is None else tuple(_replace(each, top=()) for each in item.logprobs)
            return _replace(item, finish=finish, logprobs=scores)
        states = self._states(item)
        before = states[item.first]
        tokens, after = self._tokens(item.tokens, before)
        states[item.first + 1 :] = after
        logprobs = None if item.logprobs is None else self._logprobs(item.logprobs, [before, *after])
        return _replace(item, tokens=tokens, finish=finish, logprobs=logprobs)

    def _states(self, item: TokenItem) -> list[bytes]:
        """The states of a choice, at least up to the item's first position. States of unknown tokens are invented."""
        name = (item.request, item.choice)
        if name not in self._choices:
            self._choices[name] = [self._prompts.get(item.request, self._hash(item.request.encode()))]
            if len(self._choices) > MAX_OPEN:
                self._choices.popitem(last=False)
        states = self._choices[name]
        while len(states) <= item.first:
            states.append(self._hash(states[-1]))
        if item.finish is not None:  # a late repeat gets other placeholders, as if nothing were known
            del self._choices[name]
        return states

    def _done(self, message: Done) -> Done:
        submitted, state = message.submitted, self._prompts.get(message.request, self._start)
        if submitted:
            request = self.request(requests.decode(submitted))
            submitted, state = wire.encode(request), self._prompts[request.id]
        choices = []
        for choice in message.choices:
            tokens, states = self._tokens(choice.tokens, state)
            stop = self.text(choice.stop) if isinstance(choice.stop, str) else choice.stop
            logprobs = self._logprobs(choice.logprobs, [state, *states])
            choices.append(_replace(choice, tokens=tokens, stop=stop, logprobs=logprobs))
        scores = tuple(_replace(each, top=()) for each in message.scores)
        user = self._named(message.user)
        return _replace(message, submitted=submitted, choices=tuple(choices), scores=scores, user=user)

    def _kv_event(self, event: kv.KvEvent) -> kv.KvEvent:
        if isinstance(event, kv.Cleared):
            return event
        changed = _replace(event, digests=self._digests(event.digests))
        if isinstance(changed, kv.Stored) and changed.parent:
            return _replace(changed, parent=self._digests(changed.parent))
        return changed


def _anonymous(ticket: Ticket) -> Ticket:
    return _replace(ticket, endpoint=_replace(ticket.endpoint, metadata=b"", address=""))
