"""Reads trees of engine arguments, merges them, and checks them for unknown keys and invalid values."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

import msgspec
import yaml

from penstock.infra.engine_args import schema
from penstock.infra.engine_args.schema import AutoDeployArgs, EngineArgs, Speculation

Tree = dict[str, Any]
AUTODEPLOY = "_autodeploy"

# Keys of other releases and of outdated pages.
_MOVED = {
    "pytorch_backend_config": "its keys are at the top level now",
    "use_cuda_graph": "use cuda_graph_config: null to switch graphs off",
    "cuda_graph_batch_sizes": "use cuda_graph_config.batch_sizes",
    "cuda_graph_padding_enabled": "use cuda_graph_config.enable_padding",
    "cuda_graph_max_batch_size": "use cuda_graph_config.max_batch_size",
    "enable_overlap_scheduler": "it is on by default; use disable_overlap_scheduler",
    "moe_backend": "use moe_config.backend",
    "moe_load_balancer": "use moe_config.load_balancer",
    "moe_max_num_tokens": "use moe_config.max_num_tokens",
    "kv_cache_dtype": "use kv_cache_config.dtype",
    "use_kv_cache": "the cache cannot be switched off",
    "build_config": "max_batch_size, max_num_tokens, max_seq_len and max_beam_width are at the top level",
    "sleep_config": "1.3; in 1.2.1 use enable_sleep",
    "kv_events_config": "1.3; with 1.2.1 the worker publishes events",
    "batched_logits_processor": "an object, not data; use --logits-processor",
    "checkpoint_loader": "an object, not data; use checkpoint_format",
    "model_kwargs": "only with backend: _autodeploy",
}


class BadArguments(ValueError):
    """Invalid engine arguments. ``problems``: one line each, with its fix."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def parse_yaml(text: str) -> Tree:
    """Parse a YAML mapping; an empty document is an empty mapping.

    Raises:
        BadArguments: not YAML, not a mapping, or a duplicate key.
    """
    try:
        tree = yaml.load(text, Loader=_Strict)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadArguments([f"not YAML: {' '.join(str(error).split())}"]) from error
    return _mapping({} if tree is None else tree)


def parse_json(text: str) -> Tree:
    """Parse a JSON mapping.

    Raises:
        BadArguments: not JSON, or not a mapping.
    """
    try:
        tree = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadArguments([f"not JSON: {error}"]) from error
    return _mapping(tree)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Merge ``over`` into ``base``: mappings at every depth; all other values, including lists, are replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def decode(tree: Mapping[str, Any]) -> EngineArgs:
    """The arguments with the defaults of 1.2.1. The engine gets the tree, since defaults differ between releases.

    Raises:
        BadArguments: unknown keys (all of them, each with the closest known one), or a value of the wrong type or
        range.
    """
    kind = AutoDeployArgs if tree.get("backend") == AUTODEPLOY else EngineArgs
    problems = list(_unknown(tree, kind, ""))
    if problems:
        raise BadArguments(problems)
    if tree.get("backend") not in (None, "pytorch", AUTODEPLOY):
        raise BadArguments([f"backend: {tree['backend']!r} must be pytorch or {AUTODEPLOY}"])
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise BadArguments([f"{path.rstrip('`').lstrip('.') or 'arguments'}: {message}"]) from error


def section_keys(key: str) -> frozenset[str]:
    """The keys of an argument that is a mapping; empty: it is none, or its keys depend on the kind."""
    below = _section(get_type_hints(EngineArgs).get(key), {})
    return frozenset(below.__struct_fields__) if below is not None else frozenset()


def speculation_of(kind: str) -> type[Speculation] | None:
    """The kind of speculation of that name, of which later releases spell some otherwise (``Draft_Target``)."""
    name = {"Eagle3": "Eagle"}.get(kind, kind).replace("_", "").casefold()
    return next((each for each in get_args(schema.AnySpeculation) if _tag(each).casefold() == name), None)


def _tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def _mapping(tree: object) -> Tree:
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise BadArguments([f"must be a mapping of argument names to values, not {type(tree).__name__}"])
    return tree


def _unknown(tree: Mapping[str, Any], kind: type[msgspec.Struct], path: str) -> Iterator[str]:
    """One line per key that ``kind`` does not have, at any depth."""
    hints = get_type_hints(kind)
    tag = kind.__struct_config__.tag_field
    for key, value in tree.items():
        if key == tag:
            continue
        if key not in hints:
            yield f"{path}{key}: no such key{_hint(str(key), [*hints, *([tag] if tag else [])], path)}"
        elif isinstance(value, Mapping) and (below := _section(hints[key], value)) is not None:
            yield from _unknown(value, below, f"{path}{key}.")


def _section(hint: Any, value: Mapping[str, Any]) -> type[msgspec.Struct] | None:
    """The Struct of a mapping; None: free-form, or an unknown kind of speculation."""
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    if len(kinds) > 1:
        return next((kind for kind in kinds if kind.__struct_config__.tag == value.get("decoding_type")), None)
    return kinds[0] if kinds else None


def _hint(key: str, names: Iterable[str], path: str) -> str:
    if key in _MOVED and not path:
        return f"; {_MOVED[key]}"
    if key in _PLACES and _PLACES[key] != path:
        return f"; it belongs to {_PLACES[key].rstrip('.') or 'the top level'}"
    near = difflib.get_close_matches(key, list(names), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(names))}" if path else ""


def _places() -> dict[str, str]:
    """The section of each key that occurs in one section only."""
    places: dict[str, set[str]] = {}
    sections: dict[str, type[msgspec.Struct]] = {
        "": EngineArgs,
        "kv_cache_config.": schema.KvCacheConfig,
        "scheduler_config.": schema.SchedulerConfig,
        "scheduler_config.dynamic_batch_config.": schema.DynamicBatchConfig,
        "cache_transceiver_config.": schema.CacheTransceiverConfig,
        "cuda_graph_config.": schema.CudaGraphConfig,
        "moe_config.": schema.MoeConfig,
        "moe_config.load_balancer.": schema.MoeLoadBalancer,
        "speculative_config.": Speculation,
    }
    for path, kind in sections.items():
        for field in msgspec.structs.fields(kind):
            places.setdefault(field.name, set()).add(path)
    return {key: next(iter(paths)) for key, paths in places.items() if len(paths) == 1}


_PLACES = _places()


class _Strict(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses duplicate keys, of which YAML silently uses the last."""


def _construct(loader: _Strict, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int):
            raise ValueError(f"key {key!r} is neither a string nor a number (line {key_node.start_mark.line + 1})")
        if key in seen:
            raise ValueError(f"key {key!r} is given twice (line {key_node.start_mark.line + 1})")
        seen.add(key)
    mapping: dict[Any, Any] = yaml.SafeLoader.construct_mapping(loader, node, deep=True)
    return mapping


_Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct)
