"""Reads the limits of servers from their metrics: tokens of KV cache, sequences in a batch, length of the context."""

import json
from collections.abc import Iterable

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from penstock.measure.generator.target import ask
from penstock.measure.sweep.endpoints import Endpoint

_PREFIXES = (
    "penstock_worker_kv_capacity_blocks",
    "penstock_worker_kv_block_size_tokens",
    "penstock_worker_max_sequences",
    "penstock_worker_max_model_len",
    "vllm:cache_config_info",
    "sglang:max_total_num_tokens",
)
_DECODES = ("aggregated", "decode")
_TIMEOUT_S = 5.0


class Capacity(Struct, frozen=True):
    """Limits of an endpoint. 0: not reported."""

    max_kv_tokens: int = 0
    max_batch: int = 0
    max_context: int = 0


def read_capacity(pages: Iterable[str]) -> Capacity:
    """Add up the limits on the servers' Prometheus pages. The context length is that of the shortest."""
    kv_tokens = batch = 0
    contexts = []
    for page in pages:
        values: dict[str, float] = {}
        lines = [line for line in page.splitlines() if line.startswith(_PREFIXES)]
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                if sample.labels.get("role", "decode") not in _DECODES:
                    continue
                if sample.name == "vllm:cache_config_info":
                    kv_tokens += _product(sample.labels.get("num_gpu_blocks"), sample.labels.get("block_size"))
                else:
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        blocks, size, sequences, context, tokens = (int(values.get(name, 0)) for name in (*_PREFIXES[:4], _PREFIXES[5]))
        kv_tokens += blocks * size + tokens
        batch += sequences
        contexts += [context] if context else []
    return Capacity(kv_tokens, batch, min(contexts, default=0))


def _product(*numbers: str | None) -> int:
    product = 1
    for number in numbers:
        product *= int(number) if number and number.isdecimal() else 0
    return product


async def capacity_of(endpoint: Endpoint, model: str) -> Capacity:
    """Read the endpoint's metrics pages and its list of models. Pages that do not answer are left out."""
    answers = [await ask(page.target, page.path, timeout_s=_TIMEOUT_S) for page in endpoint.pages]
    capacity = read_capacity([body.decode(errors="replace") for status, body in answers if status == 200])
    if capacity.max_context:
        return capacity
    status, body = await ask(endpoint.target, "/v1/models", timeout_s=_TIMEOUT_S)
    return Capacity(capacity.max_kv_tokens, capacity.max_batch, context_of(body, model) if status == 200 else 0)


def context_of(models: bytes, model: str) -> int:
    """``max_model_len`` of a model in an answer of ``/v1/models``; 0: not reported."""
    try:
        (own,) = [each for each in json.loads(models)["data"] if each["id"] == model]
        return int(own["max_model_len"])
    except (ValueError, LookupError, TypeError):
        return 0
