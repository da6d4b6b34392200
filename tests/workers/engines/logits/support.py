"""Registries and chains for tests."""

import json
from typing import Any

from penstock.schemas.requests import LogitsProcessor, Sampling, Stop
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.logits import ModelInfo, Registry
from penstock.workers.engines.logits.registry import Chain

OWN = "tests.workers.engines.logits.own"
VOCAB = 32
FACTS = ModelInfo(VOCAB, ())


def chosen(name: str, **args: Any) -> LogitsProcessor:
    return LogitsProcessor(name, json.dumps(args).encode())


def own(*classes: str, model: ModelInfo = FACTS) -> Registry:
    """The named classes of ``own`` under their own names."""
    return Registry([f"{OWN}:{name}" for name in classes], model)


def asking(*processors: LogitsProcessor, prompt: int = 3) -> SequenceRequest:
    sampling = Sampling(temperature=0, logits_processors=processors)
    return SequenceRequest(key="a", prompt=range(prompt), sampling=sampling, stop=Stop(9))


def chain(registry: Registry, *processors: LogitsProcessor) -> Chain:
    made = registry.chain(asking(*processors))
    assert made is not None
    return made
