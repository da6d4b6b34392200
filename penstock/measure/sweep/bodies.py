"""The requests of a level as bytes: the same for the same seed, made before the load begins.

Prompts have the length that the server counts: what its chat template adds is known from the smoke request. Levels
and repetitions differ in their prompts, so that none finds the last one's in a prefix cache; common texts stay.
"""

import base64
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from penstock.measure.load_generator import HttpTarget
from penstock.measure.simulation.trace import RequestTrace
from penstock.measure.sweep.smoke import PATHS, Abilities, Api
from penstock.measure.sweep.workload import LoadLevel, RecordedConversation, TokenText, Workload

_MOST_BYTES = 4 << 30  # of one level's requests, in memory
_CACHED_UNITS = 4096


class LevelTooLarge(ValueError):
    """The requests of a level do not fit into memory."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send, ``at_s`` seconds after the first one. None: as soon as another one has ended.

    ``follows``: when the one before it, the turn before of the same conversation, has ended.
    """

    request: bytes
    isl: int
    osl: int
    at_s: float | None = None
    follows: bool = False


class Bodies:
    """Makes requests for one endpoint.

    Args:
        extra: further fields of each body, which override others.
    """

    def __init__(
        self,
        target: HttpTarget,
        model: str,
        api: Api,
        abilities: Abilities,
        texts: TokenText,
        *,
        stream: bool = True,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._head = target.head(PATHS[api])
        self._api = api
        self._overhead = abilities.overhead_tokens
        self._texts = texts
        self._common = abilities.body(model, stream=stream) | (extra or {})
        self._abilities = abilities

    def synthetic(self, workload: Workload, level: LoadLevel, seed: int, run: int) -> list[PlannedRequest]:
        """The requests of a level.

        Raises:
            LevelTooLarge: they do not fit into memory.
        """
        own = Random(f"{seed} {level.folder} {run}")
        arrivals = poisson(own, level.value, level.requests) if level.kind == "rate" else None
        prefix_tokens = round(max(0, workload.isl - self._overhead) * workload.shared_prefix)
        prefixes = [
            self._texts.text(Random(f"{seed} prefix {number}"), prefix_tokens) for number in range(workload.prefixes)
        ]
        planned = []
        size = 0
        for number in range(level.requests):
            least = self._overhead + prefix_tokens + 1
            isl = max(least, round(own.gauss(workload.isl, workload.isl_stddev)))
            osl = max(1, round(own.gauss(workload.osl, workload.osl_stddev)))
            prompt = self._texts.after(own.choice(prefixes), own, prefix_tokens, isl - self._overhead)
            images = [png(own, workload.image_size) for _ in range(workload.images)]
            request = self.request(prompt, osl, images)
            size = _checked(size + len(request), level)
            planned.append(PlannedRequest(request, isl, osl, arrivals[number] if arrivals else None))
        return planned

    def of_trace(self, trace: RequestTrace, level: LoadLevel, seed: int, run: int) -> list[PlannedRequest]:
        """The requests of a trace, ``level.value`` times faster. Equal units are equal text within a run only.

        Raises:
            LevelTooLarge: they do not fit into memory.
        """

        own = f"{seed} {level.folder} {run}"

        @lru_cache(_CACHED_UNITS)
        def unit(number: int) -> str:
            return self._texts.text(Random(f"{own} unit {number}"), trace.block_tokens)

        planned = []
        size = 0
        start = trace.rows[0].timestamp
        for turn, row in enumerate(trace.rows):
            tokens = max(1, row.input_length - self._overhead)
            whole = min(tokens // trace.block_tokens, len(row.hash_ids))
            prefix = "".join(map(unit, row.hash_ids[:whole]))
            prompt = self._texts.after(prefix, Random(f"{own} request {turn}"), whole * trace.block_tokens, tokens)
            request = self.request(prompt, row.output_length)
            size = _checked(size + len(request), level)
            at_s = (row.timestamp - start) / 1e3 / level.value
            planned.append(PlannedRequest(request, tokens + self._overhead, row.output_length, at_s))
        return planned

    def of_dataset(
        self, conversations: Sequence[RecordedConversation], level: LoadLevel, seed: int, run: int
    ) -> list[PlannedRequest]:
        """The turns of conversations, drawn for each level and run, as many as the level has requests.

        Each turn has the recorded answers of those before it, so that all servers get the same requests, and asks for
        as many tokens as the recorded one has. A conversation begins with a mark of its level, run and number: what
        an earlier one has left in a cache does not count.

        Raises:
            LevelTooLarge: they do not fit into memory.
        """
        own = Random(f"{seed} {level.folder} {run}")
        planned: list[PlannedRequest] = []
        size = drawn = 0
        order: list[RecordedConversation] = []
        while len(planned) < level.requests:
            if not order:
                order = own.sample(conversations, len(conversations))
            conversation = order.pop()
            drawn += 1
            mark = f"[{own.randrange(1 << 32):08x} {drawn}] "
            messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
            tokens = self._overhead + self._texts.count(conversation.system)
            for number, (asked, answer) in enumerate(conversation.turns):
                text = asked if number else mark + asked
                messages.append({"role": "user", "content": text})
                tokens += self._texts.count(text)
                osl = max(1, self._texts.count(answer))
                request = self._body(self._abilities.length(osl) | self._common | {"messages": messages})
                size = _checked(size + len(request), level)
                planned.append(PlannedRequest(request, tokens, osl, follows=number > 0))
                messages.append({"role": "assistant", "content": answer})
                tokens += osl
                if len(planned) == level.requests:
                    break
        return planned

    def request(self, prompt: str, osl: int, images: Sequence[bytes] = ()) -> bytes:
        body = self._abilities.length(osl) | self._common
        if self._api == "completions":
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": _content(prompt, images)}]
        return self._body(body)

    def _body(self, body: dict[str, Any]) -> bytes:
        encoded = json.dumps(body, separators=(",", ":"))
        return f"{self._head}{len(encoded)}\r\n\r\n{encoded}".encode()


def poisson(rng: Random, rate: float, count: int) -> list[float]:
    """The times of ``count`` Poisson arrivals in seconds; the first is at 0."""
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def png(rng: Random, size: int) -> bytes:
    """A picture of one colour with a random first row: small to send, and unique."""
    row = rng.randbytes(3) * size
    first = rng.randbytes(3 * size)
    lines = b"\0" + first + (b"\0" + row) * (size - 1)
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunks(header, zlib.compress(lines, 1)))


def _chunks(header: bytes, data: bytes) -> Iterator[bytes]:
    for kind, content in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        yield struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _content(prompt: str, images: Sequence[bytes]) -> Any:
    if not images:
        return prompt
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"type": "text", "text": prompt}, *parts]


def _checked(size: int, level: LoadLevel) -> int:
    if size > _MOST_BYTES:
        raise LevelTooLarge(
            f"{level.title}: {level.requests} requests take more than {_MOST_BYTES >> 30} GiB; "
            "ask for fewer (--requests)"
        )
    return size
