"""The user's engine arguments (YAML file and JSON overrides), and what the installed release accepts."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments, Tree, merge, parse_json, parse_yaml
from penstock.workers.engines.engine_protocol import EngineError

EVENT_STEPS = 10_000  # KV event messages that are kept for replay


def given_arguments(settings: WorkerSettings) -> Tree:
    """The YAML of ``--extra-engine-args``, overridden by the JSON of ``--override-engine-args``.

    Raises:
        BadArguments: one of them cannot be read.
    """
    text = ""
    if settings.extra_engine_args:
        try:
            text = Path(settings.extra_engine_args).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadArguments([f"--extra-engine-args: {error}"]) from error
    tree = _parsed("--extra-engine-args", parse_yaml, text)
    return merge(tree, _parsed("--override-engine-args", parse_json, settings.override_engine_args))


def _parsed(flag: str, parse: Callable[[str], Tree], text: str) -> Tree:
    try:
        return parse(text) if text else {}
    except BadArguments as error:
        raise BadArguments([f"{flag}: {problem}" for problem in error.problems]) from error


def length_limit(settings: WorkerSettings, model_len: int) -> int:
    """The longest sequence in tokens.

    Raises:
        BadArguments: more than the model supports.
    """
    if settings.max_model_len > model_len:
        raise BadArguments([f"max_model_len: {settings.max_model_len} is too long; this model takes {model_len}"])
    return settings.max_model_len or model_len


def event_publisher(settings: WorkerSettings, events: str, replay: str) -> Tree | None:
    """Configuration of an engine's publisher of KV events over ZMQ; None: the worker reads none.

    Args:
        events: endpoint; empty: none are published.
        replay: endpoint of their replays.
    """
    if not (settings.prefix_cache and settings.publish_events_and_metrics and events):
        return None
    return {
        "publisher": "zmq",
        "endpoint": events,
        "replay_endpoint": replay,
        "buffer_steps": EVENT_STEPS,
        "topic": "",
    }


def keeps_weights(settings: WorkerSettings, ranks: int) -> str:
    """Why a worker's weights neither change nor leave the device, whatever its engine could do; "": they may.

    Args:
        ranks: data-parallel ranks.
    """
    if settings.role != "aggregated":
        return f"--role {settings.role}: the other engine of a pair has KV of this one's weights"
    if settings.nodes > 1:
        return "--nodes: the weights of an engine on several machines stay as they are"
    if ranks > 1:
        return "the weights of an engine with data-parallel ranks stay as they are; start a worker for each rank"
    return ""


def check_weights(settings: WorkerSettings, reason: str) -> None:
    """
    Args:
        reason: of ``keeps_weights``, or another of an engine's own.
    Raises:
        BadArguments: flags need what is impossible.
    """
    if reason and (settings.weights_folder or settings.weights_staging or sleeps(settings)):
        raise BadArguments(
            [f"{reason}; leave out --weights-folder, --weights-staging, --sleep-after-s, --share-device"]
        )


def sleeps(settings: WorkerSettings) -> bool:
    """Whether flags have the worker sleep by itself."""
    return bool(settings.sleep_after_s or settings.share_device)


def uneven(ranks: int, nodes: int) -> list[str]:
    """Why ranks cannot be shared by this many machines; empty: they can."""
    return [f"--nodes {nodes}: the engine's {ranks} ranks (TP x PP) cannot be shared evenly by them"] * (
        ranks % nodes > 0
    )


def refused(
    user_args: Mapping[str, Any], reserved: Mapping[str, str], known: Collection[str], aliases: Mapping[str, str] = {}
) -> list[str]:
    """Why keys of the user's cannot be passed on, one line per problem.

    Args:
        reserved: keys that the worker sets itself, and what to use instead.
        known: keys of the installed release.
        aliases: names of other packages, and the engine's own for the same.
    """
    problems = [f"{key}: {reserved[key]}" for key in user_args if key in reserved]
    for key in user_args:
        if key not in known and key not in reserved:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{key}: no such key" + (f"; it is {aliases[key]} here" if key in aliases else hint))
    return problems


def fields_of(kind: Any) -> frozenset[str]:
    """Names of the fields of a dataclass, Struct or pydantic model, or of the parameters of a callable."""
    if dataclasses.is_dataclass(kind):
        return frozenset(field.name for field in dataclasses.fields(kind))
    for names in (getattr(kind, "__struct_fields__", None), getattr(kind, "model_fields", None)):
        if isinstance(names, tuple | Mapping):
            return frozenset(names)
    try:
        return frozenset(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return frozenset()


def check_interface(title: str, needed: Mapping[Any, Collection[str]], install: str) -> None:
    """
    Args:
        title: of the package, with its release.
        needed: class or callable -> names of fields or parameters that it must have.
        install: how to install a release that has them, for the error.

    Raises:
        EngineError: some are missing.
    """
    missing = {name for kind, names in needed.items() for name in set(names) - fields_of(kind)}
    if missing:
        raise EngineError(f"{title} lacks {', '.join(sorted(missing))}; {install}")
