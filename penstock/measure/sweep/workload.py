"""The workload of a sweep: lengths in tokens, shared prefixes, images, and levels of load.

Words that follow a space are split off before merging by nearly all tokenizers, so the tokens of " one two" are those
of " one" and those of " two". Whether that holds is tried once; where it does not, each text is counted and corrected.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field
from tokenizers import Tokenizer

from penstock.measure.load_generator import WORDS
from penstock.measure.simulation.trace import Multipliers

MOST_DATASET_BYTES = 4 << 30


class BadDataset(ValueError):
    """A file of conversations that cannot be used; the text names it."""


class RecordedConversation(NamedTuple):
    """``turns``: what the user says, and the answer to it."""

    turns: tuple[tuple[str, str], ...]
    system: str = ""


class _Turn(Struct):
    speaker: str = field(name="from", default="")
    value: str = ""


class _Recorded(Struct):
    conversations: list[_Turn] = []


_USERS, _ASSISTANTS, _SYSTEMS = ("human", "user"), ("gpt", "chatgpt", "bing", "bard", "assistant"), ("system",)


def read_conversations(path: Path) -> list[RecordedConversation]:
    """Conversations of a file in the form of ShareGPT: a JSON array, or a line each.

    What comes before the user's first message, and a message without an answer, is left out; so is a conversation of
    which nothing is left.

    Raises:
        BadDataset: it cannot be read, or has no conversation.
    """
    try:
        if path.stat().st_size > MOST_DATASET_BYTES:
            raise BadDataset(f"{path}: more than {MOST_DATASET_BYTES >> 30} GiB; cut it into parts")
        data = path.read_bytes()
        if data.lstrip()[:1] == b"[":
            recorded = msgspec.json.decode(data, type=list[_Recorded])
        else:
            recorded = [msgspec.json.decode(line, type=_Recorded) for line in data.splitlines() if line.strip()]
    except OSError as error:
        raise BadDataset(f"{path}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise BadDataset(
            f'{path}: {error}; a conversation is {{"conversations": [{{"from": "human", "value": "…"}}, '
            '{"from": "gpt", "value": "…"}]}, all in a JSON array or a line each'
        ) from None
    found = [each for each in map(_conversation, recorded) if each.turns]
    if not found:
        raise BadDataset(f"{path}: no conversation with a message and its answer")
    return found


def _conversation(recorded: _Recorded) -> RecordedConversation:
    turns: list[tuple[str, str]] = []
    system = asked = ""
    for said in recorded.conversations:
        if said.speaker in _SYSTEMS and not turns:
            system = said.value
        elif said.speaker in _USERS:
            asked = said.value
        elif said.speaker in _ASSISTANTS and asked and said.value:
            turns.append((asked, said.value))
            asked = ""
    return RecordedConversation(tuple(turns), system)


LEVELS = (1, 2, 5, 10, 50, 100, 250)
_REQUESTS_PER_CONNECTION = 3
_FEWEST_REQUESTS = 10

Preset = Literal["none", "shared-prefix", "long-context", "multimodal"]
Kind = Literal["concurrency", "rate", "speed"]
_LETTERS: dict[Kind, str] = {"concurrency": "c", "rate": "r", "speed": "x"}


class Workload(Struct, frozen=True, kw_only=True):
    """Lengths are in tokens: means and standard deviations of normal distributions.

    Attributes:
        isl: of the prompt as the server counts it, chat template included and images not.
        shared_prefix: share of the mean prompt that is one of ``prefixes`` common texts.
        images: per request; each is different and ``image_size`` pixels high and wide.
    """

    isl: int = 2000
    isl_stddev: float = 10.0
    osl: int = 256
    osl_stddev: float = 0.0
    shared_prefix: float = 0.0
    prefixes: int = 1
    images: int = 0
    image_size: int = 512


class PresetValues(Struct, frozen=True):
    """A workload, its levels, and how to start a deployment for it."""

    workload: Workload
    concurrency: tuple[int, ...]
    up: str  # flags of `penstock up`


PRESETS: dict[Preset, PresetValues] = {
    "none": PresetValues(Workload(), LEVELS, ""),
    "shared-prefix": PresetValues(
        Workload(isl=4000, isl_stddev=200.0, osl=128, shared_prefix=0.8, prefixes=8),
        (10, 50, 100, 250, 500),
        "--router-mode kv --max-running 512",
    ),
    "long-context": PresetValues(
        Workload(isl=32_000, isl_stddev=2000.0, osl=256),
        (1, 2, 4, 8, 16),
        "--prefill 1 --decode 1 --max-model-len 40000",
    ),
    "multimodal": PresetValues(
        Workload(isl=200, isl_stddev=20.0, osl=128, images=1),
        (1, 2, 5, 10, 20, 50),
        "--model VISION_MODEL --encode 1 --prefill 1 --decode 1",
    ),
}


class LoadLevel(Struct, frozen=True):
    """One level of load.

    Attributes:
        kind: ``value`` is the requests under way, the requests per second, or the speed-up of a trace.
        requests: how many are sent and measured.
    """

    kind: Kind
    value: float
    requests: int

    @property
    def folder(self) -> str:
        """Name of its folder of a result tree, such as "c10", "r2.5", "x4"."""
        return f"{_LETTERS[self.kind]}{self.value:g}"

    @property
    def title(self) -> str:
        return {"concurrency": f"concurrency {self.value:g}", "rate": f"{self.value:g} req/s"}.get(
            self.kind, f"trace ×{self.value:g}"
        )


def concurrency_level(concurrency: int, requests: int = 0) -> LoadLevel:
    """Three requests per connection and at least ten, unless a number is given."""
    return LoadLevel(
        "concurrency", concurrency, requests or max(_REQUESTS_PER_CONNECTION * concurrency, _FEWEST_REQUESTS)
    )


class WorkloadFlags(Multipliers, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flags that describe the requests; those not given come from the preset."""

    preset: Annotated[Preset, Meta(description="workload and levels to start from; other flags win")] = "none"
    isl: Annotated[
        int, Meta(ge=0, description="mean prompt tokens, chat template included; default: the preset's, else 2000")
    ] = 0
    isl_stddev: Annotated[
        float, Meta(ge=-1, description="standard deviation of --isl; -1: the preset's, else 10")
    ] = -1.0
    osl: Annotated[int, Meta(ge=0, description="mean tokens per answer; default: the preset's, else 256")] = 0
    osl_stddev: Annotated[
        float, Meta(ge=-1, description="standard deviation of --osl; -1: the preset's, else 0")
    ] = -1.0
    shared_prefix: Annotated[
        float, Meta(ge=-1, le=1, description="share of the mean prompt that is common; -1: the preset's, else 0")
    ] = -1.0
    prefixes: Annotated[int, Meta(ge=0, description="different common texts; default: the preset's, else 1")] = 0
    images: Annotated[int, Meta(ge=-1, description="images per request; -1: the preset's, else 0")] = -1
    image_size: Annotated[int, Meta(ge=8, le=4096, description="height and width of an image, pixels")] = 512
    concurrency: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=8192)], ...],
        Meta(description="requests under way, a level each; default: the preset's, else 1,2,5,10,50,100,250"),
    ] = ()
    rate: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        Meta(description="requests per second with Poisson arrivals, instead of --concurrency"),
    ] = ()
    trace: Annotated[str, Meta(description="file in Mooncake's format: its arrivals, lengths and prefixes")] = ""
    dataset: Annotated[
        str, Meta(description="file of conversations in ShareGPT's form, whose turns are sent one after the other")
    ] = ""
    speed: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...], Meta(description="how many times faster than recorded a --trace is")
    ] = (1.0,)
    requests: Annotated[
        int, Meta(ge=0, description="requests per level; 0: 3 per connection, 60 s of a rate, or the whole trace")
    ] = 0


def workload_of(flags: WorkloadFlags) -> Workload:
    base = PRESETS[flags.preset].workload
    return Workload(
        isl=flags.isl or base.isl,
        isl_stddev=_scaled(base.isl_stddev, flags.isl, base.isl) if flags.isl_stddev < 0 else flags.isl_stddev,
        osl=flags.osl or base.osl,
        osl_stddev=_scaled(base.osl_stddev, flags.osl, base.osl) if flags.osl_stddev < 0 else flags.osl_stddev,
        shared_prefix=base.shared_prefix if flags.shared_prefix < 0 else flags.shared_prefix,
        prefixes=flags.prefixes or base.prefixes,
        images=base.images if flags.images < 0 else flags.images,
        image_size=flags.image_size,
    )


def _scaled(stddev: float, asked: int, mean: int) -> float:
    """A preset's deviation for a mean that is less than its own: as large a part of it."""
    return stddev * asked / mean if 0 < asked < mean else stddev


def described(workload: Workload) -> str:
    """What is asked for, in words."""
    text = f"prompts of {workload.isl:,} ± {workload.isl_stddev:g} tokens"
    if workload.shared_prefix:
        texts = f"one of {workload.prefixes:,} common texts" if workload.prefixes > 1 else "common to all"
        text += f", {workload.shared_prefix:.0%} of them {texts}"
    else:
        text += ", nothing of them common"
    text += f", {workload.images} images" if workload.images else ""
    return f"{text}; answers of {workload.osl:,} ± {workload.osl_stddev:g} tokens"


def levels_of(flags: WorkloadFlags, trace_rows: int = 0) -> list[LoadLevel]:
    """The levels in ascending order, each once."""
    if flags.trace:
        return [LoadLevel("speed", speed, trace_rows) for speed in sorted(set(flags.speed))]
    if flags.rate:
        return [
            LoadLevel("rate", rate, flags.requests or max(_FEWEST_REQUESTS, math.ceil(60 * rate)))
            for rate in sorted(set(flags.rate))
        ]
    concurrency = flags.concurrency or PRESETS[flags.preset].concurrency
    return [concurrency_level(each, flags.requests) for each in sorted(set(concurrency))]


_TRIES = 8
_TRIED_WORDS = 200
# Beside words, letters and digits: what is one token for small vocabularies, too.
_SHORT = [*"abcdefghijklmnopqrstuvwxyz0123456789"]


class NoShortWord(ValueError):
    """No word is a single token, so that lengths cannot be met."""


class TokenText:
    """
    Raises:
        NoShortWord: the tokenizer splits every word and letter.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        alone = self.count(f" {WORDS[0]}")
        lengths = {word: self.count(f" {WORDS[0]} {word}") - alone for word in (*WORDS, *_SHORT)}
        self._fillers = [f" {word}" for word in (*WORDS, *_SHORT) if lengths[word] == 1]
        if not self._fillers:
            raise NoShortWord("no word or letter is one token of this tokenizer; prompts cannot be made to length")
        self._words = [(f" {word}", lengths[word]) for word in WORDS]
        self._adds_up = self._tried()

    def count(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, rng: Random, tokens: int) -> str:
        """Random words of this many tokens, each after a space."""
        text = "".join(self._drawn(rng, tokens))
        return text if self._adds_up else self.corrected("", text, tokens, rng)

    def after(self, prefix: str, rng: Random, prefix_tokens: int, tokens: int) -> str:
        """A text that begins with ``prefix``, of this many tokens in all."""
        text = "".join(self._drawn(rng, tokens - prefix_tokens))
        return prefix + text if self._adds_up else self.corrected(prefix, text, tokens, rng)

    def corrected(self, prefix: str, text: str, tokens: int, rng: Random) -> str:
        """``prefix + text`` with words added or taken off at its end until it has this many tokens, or nearly."""
        for _ in range(_TRIES):
            missing = tokens - self.count(prefix + text)
            if missing == 0:
                break
            if missing > 0:
                text += "".join(rng.choices(self._fillers, k=missing))
            else:
                text = text.rsplit(" ", max(1, -missing // 2))[0]
        return prefix + text

    def _drawn(self, rng: Random, tokens: int) -> Sequence[str]:
        parts, left = [], tokens
        while left > 0:
            word, length = rng.choice(self._words)
            if length > left:
                word, length = rng.choice(self._fillers), 1
            parts.append(word)
            left -= length
        return parts

    def _tried(self) -> bool:
        rng = Random(0)
        return all(self.count("".join(self._drawn(rng, _TRIED_WORDS))) == _TRIED_WORDS for _ in range(_TRIES))
