"""Which processors a worker has, and what a request's choice of them becomes. Imports code the worker's flags name.

Does without torch: an engine without processors has an empty registry.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from schemas.errors import Code
from schemas.requests import LogitsProcessor
from workers.engines.base import RequestError, SequenceRequest
from workers.engines.logits.base import BaseLogitsProcessor
from workers.engines.logits.error_counter import Faults

if TYPE_CHECKING:
    from workers.engines.logits.apply import Chain

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ARGS: Callable[[bytes], dict[str, Any]] = msgspec.json.Decoder(dict[str, Any]).decode


class ProcessorError(ValueError):
    """The worker's flags name a processor that cannot be used; the text says what to change."""


class Facts(NamedTuple):
    """Of the model; what a constructor names of these it gets."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Any = None  # tokenizers.Tokenizer


_NO_MODEL = Facts(0, ())


class _Entry(NamedTuple):
    make: Callable[..., BaseLogitsProcessor]
    signature: inspect.Signature
    wants: frozenset[str]


_GIVEN = frozenset({*Facts._fields, "prompt_len"})


class Registry:
    """Processors by name.

    Args:
        specs: "name=module:Class" or "module:Class", which is then called by its class.
        always: for every request, in front of those that it chooses.

    Raises:
        ProcessorError: a class cannot be imported, is no processor, or needs what is not there; a name is taken.
    """

    def __init__(
        self,
        specs: Iterable[str] = (),
        facts: Facts = _NO_MODEL,
        always: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.faults = Faults()
        self._facts = facts
        self._entries: dict[str, _Entry] = {}
        for spec in specs:
            name, entry = _entry(spec, facts)
            if name in self._entries:
                raise ProcessorError(f"--logits-processor {spec}: there is another {name!r}; choose another name")
            self._entries[name] = entry
        self._always = tuple(always)
        try:  # what is wrong with it is wrong with every request
            self._made(self._always, prompt_len=1)
        except RequestError as error:
            raise ProcessorError(f"--default-logits-processors: {error.message}") from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))

    def chain(self, request: SequenceRequest) -> "Chain | None":
        """New processors for one sequence; None: it has none.

        Raises:
            RequestError: a name is not registered, or a constructor refuses its arguments.
        """
        chosen = self._always + request.sampling.logits_processors
        if not chosen:
            return None
        from workers.engines.logits.apply import Chain

        made = self._made(chosen, prompt_len=len(request.prompt))
        return Chain(tuple(each.name for each in chosen), tuple(made), self.faults)

    def _made(self, chosen: Sequence[LogitsProcessor], *, prompt_len: int) -> list[BaseLogitsProcessor]:
        given = self._facts._asdict() | {"prompt_len": prompt_len}
        return [self._make(each, given) for each in chosen]

    def _make(self, chosen: LogitsProcessor, given: Mapping[str, Any]) -> BaseLogitsProcessor:
        entry = self._entries.get(chosen.name)
        if entry is None:
            known = ", ".join(self.names) or "none"
            raise _refusal(f"{chosen.name!r} is not registered on this worker; registered: {known}")
        try:
            args = _ARGS(chosen.args or b"{}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _refusal(f"{chosen.name}: args are not a JSON object: {error}") from error
        if taken := sorted(_GIVEN & args.keys()):
            raise _refusal(f"{chosen.name}: args cannot set {', '.join(taken)}")
        arguments = args | {name: given[name] for name in entry.wants}
        try:
            entry.signature.bind(**arguments)
            return entry.make(**arguments)
        except Exception as error:
            text = str(error) if isinstance(error, ValueError | TypeError) else repr(error)
            raise _refusal(f"{chosen.name}: {text[:300]}") from error


def _entry(spec: str, facts: Facts) -> tuple[str, _Entry]:
    name, _, where = spec.rpartition("=")
    module, _, attribute = where.partition(":")
    name = name or attribute
    if not (module and attribute and _NAME.fullmatch(name)):
        raise ProcessorError(f"--logits-processor {spec}: write name=module:Class, name of letters, digits and _ . -")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # somebody else's code
        raise ProcessorError(
            f"--logits-processor {spec}: cannot be imported ({error!r}); is its folder in PYTHONPATH?"
        ) from error
    if not isinstance(made, type) or not _takes_two(made):
        raise ProcessorError(
            f"--logits-processor {spec}: not a class with __call__(self, input_ids, logits); see BaseLogitsProcessor"
        )
    signature = inspect.signature(made)
    wants = frozenset(
        name
        for name, parameter in signature.parameters.items()
        if name in _GIVEN and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    )
    if "tokenizer" in wants and facts.tokenizer is None:
        raise ProcessorError(f"--logits-processor {spec}: it needs the model's tokenizer, and there is none here")
    return name, _Entry(made, signature, wants)


def _takes_two(kind: type) -> bool:
    """Whether instances can be called with two positional arguments."""
    call = getattr(kind, "__call__", None)  # noqa: B004 - its signature
    if not inspect.isfunction(call):
        return False
    try:
        inspect.signature(call).bind(None, None, None)
    except TypeError:
        return False
    return True


def _refusal(message: str) -> RequestError:
    return RequestError(Code.invalid_request, f"logits_processors: {message}")
