"""What a logits processor is; those of a worker by name, and their instances for a request.

Imports the classes in the flags, but not torch: an engine without processors has an empty registry.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.errors import Code
from penstock.schemas.requests import LogitsProcessor
from penstock.workers.engines.engine_protocol import RequestError, SequenceRequest
from penstock.workers.engines.support import is_of_an_extra

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger("engine")


@runtime_checkable
class BaseLogitsProcessor(Protocol):
    """Edits the logits of one sequence, in place. One instance per sequence.

    The constructor gets the request's ``args`` by keyword. It also gets those of the following that it has as
    parameters; requests cannot set them:

    - ``tokenizer``: the model's tokenizers.Tokenizer. Use it in the constructor, do not keep it (see below);
    - ``prompt_len``: how many tokens of ``input_ids`` are the prompt;
    - ``vocab_size``: width of the logits;
    - ``eos_token_ids``: the tokens that end an answer of this model.

    It runs in the engine thread, so it must be fast. For invalid arguments it raises ValueError or TypeError, and the
    request is refused with that message.

    An instance may keep what it derives from its arguments, but its edits must depend on ``input_ids`` only: a sequence
    that continues on another worker gets a new instance in the middle of its output. TensorRT-LLM pickles it, so its
    class must be importable there, without locks, sockets or device tensors before the first call. Each rank of a
    tensor-parallel group runs a copy.
    """

    def __call__(self, input_ids: Sequence[int], logits: "Tensor") -> None:
        """
        Args:
            input_ids: the prompt and all generated tokens; read-only.
            logits: (vocab,) of the next token, a view that is edited in place. Return values are ignored.
        """


class ErrorCounter:
    """The failures of one engine. ``count``: calls that were undone."""

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[tuple[str, str]] = set()

    def add(self, name: str, kind: str, error: str) -> None:
        """Count a failure. ``kind`` decides whether it is logged, since the text may contain changing numbers."""
        self.count += 1
        if (name, kind) not in self._logged:
            self._logged.add((name, kind))
            log.error("logits_processor_failed", processor=name, error=error, action="logits left as they were")


class Chain(NamedTuple):
    """The processors of one sequence, in order."""

    names: tuple[str, ...]
    processors: tuple[BaseLogitsProcessor, ...]
    errors: ErrorCounter


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ARGS: Callable[[bytes], dict[str, Any]] = msgspec.json.Decoder(dict[str, Any]).decode


class ProcessorError(ValueError):
    """A processor in the worker's flags cannot be used; the message says what to change."""


class ModelInfo(NamedTuple):
    """Properties of the model; a constructor gets those that it has as parameters."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Any = None  # tokenizers.Tokenizer


_NO_MODEL = ModelInfo(0, ())


class _Entry(NamedTuple):
    make: Callable[..., BaseLogitsProcessor]
    signature: inspect.Signature
    wants: frozenset[str]


_GIVEN = frozenset({*ModelInfo._fields, "prompt_len"})


class Registry:
    """Processors by name.

    Args:
        specs: "name=module:Class", or "module:Class" with the class as its name.
        defaults: processors of every request, before those that it selects.

    Raises:
        ProcessorError: a class cannot be imported, is not a processor, or needs a tokenizer that is missing; or a name
            is used twice.
    """

    def __init__(
        self, specs: Iterable[str] = (), model: ModelInfo = _NO_MODEL, defaults: Sequence[LogitsProcessor] = ()
    ) -> None:
        self.errors = ErrorCounter()
        self._model = model
        self._entries: dict[str, _Entry] = {}
        for spec in specs:
            name, entry = _entry(spec, model)
            if name in self._entries:
                raise ProcessorError(f"--logits-processor {spec}: the name {name!r} is used twice; choose another")
            self._entries[name] = entry
        self.defaults = tuple(defaults)
        try:  # an invalid default would fail every request
            self._instances(self.defaults, prompt_len=1)
        except RequestError as error:
            raise ProcessorError(f"--default-logits-processors: {error.message}") from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))

    def chain(self, request: SequenceRequest) -> Chain | None:
        """New instances for one sequence; None: it has no processors.

        Raises:
            RequestError: a name is not registered, or a constructor refuses its arguments.
        """
        selected = self.selected(request)
        return self.chain_of(selected, prompt_len=len(request.prompt)) if selected else None

    def selected(self, request: SequenceRequest) -> tuple[LogitsProcessor, ...]:
        """The processors of a request, those of every request first."""
        return self.defaults + request.sampling.logits_processors

    def chain_of(self, selected: Sequence[LogitsProcessor], *, prompt_len: int) -> Chain:
        """New instances.

        Raises:
            RequestError: as ``chain``.
        """
        instances = self._instances(selected, prompt_len=prompt_len)
        return Chain(tuple(each.name for each in selected), tuple(instances), self.errors)

    def _instances(self, chosen: Sequence[LogitsProcessor], *, prompt_len: int) -> list[BaseLogitsProcessor]:
        arguments = self._model._asdict() | {"prompt_len": prompt_len}
        return [self._make(each, arguments) for each in chosen]

    def _make(self, chosen: LogitsProcessor, context: Mapping[str, Any]) -> BaseLogitsProcessor:
        entry = self._entries.get(chosen.name)
        if entry is None:
            names = ", ".join(self.names) or "none"
            raise _refusal(f"{chosen.name!r} is not registered on this worker; registered: {names}")
        try:
            args = _ARGS(chosen.args or b"{}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _refusal(f"{chosen.name}: args are not a JSON object: {error}") from error
        if taken := sorted(_GIVEN & args.keys()):
            raise _refusal(f"{chosen.name}: args cannot set {', '.join(taken)}")
        arguments = args | {name: context[name] for name in entry.wants}
        try:
            entry.signature.bind(**arguments)
            return entry.make(**arguments)
        except Exception as error:
            text = str(error) if isinstance(error, ValueError | TypeError) else repr(error)
            raise _refusal(f"{chosen.name}: {text[:300]}") from error


def _entry(spec: str, model: ModelInfo) -> tuple[str, _Entry]:
    name, _, where = spec.rpartition("=")
    module, _, attribute = where.partition(":")
    name = name or attribute
    if not (module and attribute and _NAME.fullmatch(name)):
        raise ProcessorError(
            f"--logits-processor {spec}: write name=module:Class, with letters, digits and _.- as name"
        )
    try:
        processor = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # arbitrary user code
        if isinstance(error, ModuleNotFoundError) and is_of_an_extra(error):
            raise  # the worker says how to install it
        raise ProcessorError(
            f"--logits-processor {spec}: cannot be imported ({error!r}); check that its folder is in PYTHONPATH"
        ) from error
    if not isinstance(processor, type) or not _takes_two(processor):
        raise ProcessorError(
            f"--logits-processor {spec}: not a class with __call__(self, input_ids, logits); see BaseLogitsProcessor"
        )
    signature = inspect.signature(processor)
    wants = frozenset(
        name
        for name, parameter in signature.parameters.items()
        if name in _GIVEN and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    )
    if "tokenizer" in wants and model.tokenizer is None:
        raise ProcessorError(f"--logits-processor {spec}: it needs the model's tokenizer, which is not available")
    return name, _Entry(processor, signature, wants)


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


_EXAMPLES = "penstock.workers.engines.logits.examples"
EXAMPLES = (
    f"temperature={_EXAMPLES}:Temperature",
    f"forced_text={_EXAMPLES}:ForcedText",
    f"allowed_tokens={_EXAMPLES}:AllowedTokens",
)


class ProcessorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One processor in ``--default-logits-processors``, in the form of a request's."""

    name: str
    args: dict[str, Any] = {}


def registry_from_settings(settings: WorkerSettings, path: Path) -> Registry:
    """The examples and the processors in the flags, for the model in ``path``.

    Raises:
        ProcessorError: see ``Registry``.
        modeldir.ModelError: the directory cannot be used.
    """
    model = modeldir.load(path)
    facts = ModelInfo(model.vocab_size, model.eos_token_ids, model.tokenizer)
    return Registry((*EXAMPLES, *settings.logits_processor), facts, _defaults(settings.default_logits_processors))


def _defaults(text: str) -> tuple[LogitsProcessor, ...]:
    try:
        specs = msgspec.json.decode(text, type=list[ProcessorSpec]) if text else []
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProcessorError(
            f'--default-logits-processors: {error}; write [{{"name": "temperature", "args": {{"temperature": 0.7}}}}]'
        ) from error
    return tuple(LogitsProcessor(each.name, msgspec.json.encode(each.args)) for each in specs)
