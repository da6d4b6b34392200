"""What a model's generation_config.json sets: for requests that leave it out, and for all of them. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.schemas.requests import Sampling

BARRED = -100.0  # a logit bias after which a token is drawn only where a grammar allows no other
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_WHOLE = ("top_k", "min_new_tokens", "max_new_tokens")
# What changes texts and is not applied here, and the values with which it has no effect.
_IGNORED: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0, 0.0),
    "dola_layers": (),
    "encoder_repetition_penalty": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1, 1.0),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0, 0.0),
    "sequence_bias": ({}, []),
    "top_h": (1, 1.0),
    "typical_p": (1, 1.0),
    "watermarking_config": ({},),
}


class BadDefaults(ValueError):
    """A value has a type that its key cannot have; the text names both."""


class GenerationDefaults(NamedTuple):
    """
    Attributes:
        sampling: for requests that leave an option out.
        min_tokens: likewise.
        max_tokens: likewise; 0: as many as there is room for.
        strings: end every answer.
        barred: tokens that no answer has.
        ignored: keys and values of the file that are not applied.
    """

    sampling: Sampling = Sampling()
    min_tokens: int = 0
    max_tokens: int = 0
    strings: tuple[str, ...] = ()
    barred: tuple[int, ...] = ()
    ignored: tuple[tuple[str, Any], ...] = ()


NONE = GenerationDefaults()


def defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    """
    Args:
        generation: of generation_config.json.
    Raises:
        BadDefaults: see there.
    """
    values = {key: _number(key, value) for key in _SAMPLING if (value := generation.get(key)) is not None}
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    ignored = [
        (key, value)
        for key, neutral in _IGNORED.items()
        if (value := generation.get(key)) is not None and value not in neutral
    ]
    barred = list(ids("suppress_tokens", generation.get("suppress_tokens")))
    longer = []
    for word in _lists("bad_words_ids", generation.get("bad_words_ids")):
        if len(word) == 1:
            barred += word
        elif word:
            longer.append(list(word))
    if longer:
        ignored.append(("bad_words_ids", longer))
    return GenerationDefaults(
        Sampling(**values),
        int(_number("min_new_tokens", generation.get("min_new_tokens") or 0)),
        int(_number("max_new_tokens", generation.get("max_new_tokens") or 0)),
        _strings(generation.get("stop_strings")),
        tuple(dict.fromkeys(barred)),
        tuple(ignored),
    )


def ids(key: str, value: Any) -> tuple[int, ...]:
    """Token ids, which files write as a list or as one; (): none is named.

    Raises:
        BadDefaults: it is no id.
    """
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for each in listed:
        whole = isinstance(each, int) or (isinstance(each, float) and each.is_integer())
        if isinstance(each, bool) or not whole or each < 0:
            raise BadDefaults(f"{key} has {each!r}, which is no token id")
    return tuple(int(each) for each in listed)


def _lists(key: str, value: Any) -> list[tuple[int, ...]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        raise BadDefaults(f"{key} is {value!r}; it must be a list of lists of token ids")
    return [ids(key, each) for each in value]


def _number(key: str, value: Any) -> Any:
    """A number; a whole one, where only such can be meant, also if it is written as 20.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadDefaults(f"{key} is {value!r}; it must be a number")
    if key not in _WHOLE:
        return float(value)
    if value != value or value in (float("inf"), float("-inf")) or value != int(value):
        raise BadDefaults(f"{key} is {value!r}; it must be a whole number")
    return int(value)


def _strings(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise BadDefaults(f"stop_strings is {value!r}; it must be a text or a list of texts")
    return tuple(dict.fromkeys(each for each in listed if each))
