"""The registry of logits processors from a worker's flags."""

from pathlib import Path
from typing import Any

import msgspec

from penstock.configs.settings import WorkerSettings
from penstock.infra.model import modeldir
from penstock.schemas.requests import LogitsProcessor
from penstock.workers.engines.logits.registry import ModelInfo, ProcessorError, Registry

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


def from_settings(settings: WorkerSettings, path: Path) -> Registry:
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
