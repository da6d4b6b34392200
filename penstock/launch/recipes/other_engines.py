"""Engine arguments of vLLM and SGLang: which engine a file is for, and which of its keys a worker would refuse.

Names are those of the releases that workers were run with (``configs/recipes/arguments.json``): the engines need not be
installed here. What values mean, the engine itself checks when the worker starts.
"""

from functools import cache
from pathlib import Path
from typing import Literal, get_args

import msgspec

from penstock.infra.engine_args.schema import EngineArgs
from penstock.infra.engine_args.tree import Tree, parse_yaml
from penstock.launch.recipes.catalogue import FOLDER, header_of
from penstock.workers.engines.external.arguments import refused
from penstock.workers.engines.sglang import args as sglang
from penstock.workers.engines.vllm import args as vllm

Engine = Literal["trtllm", "vllm", "sglang"]
TITLES = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}
_OTHER = ("vllm", "sglang")


class Arguments(msgspec.Struct, frozen=True):
    """Names of one release's arguments."""

    release: str
    names: tuple[str, ...]


@cache
def known(path: Path = FOLDER / "arguments.json") -> dict[str, Arguments]:
    """By engine."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Arguments])


def engine_of(text: str) -> Engine:
    """Whose arguments a file has: its header says so, else the engine that knows most of its keys.

    Raises:
        BadArguments: the file is not YAML, or its header is wrong.
    """
    header = header_of(text)
    if header is not None:
        return header.engine
    keys = parse_yaml(text).keys()
    names: dict[Engine, frozenset[str]] = {"trtllm": frozenset(EngineArgs.__struct_fields__)}
    for engine, arguments in known().items():
        names[msgspec.convert(engine, Engine)] = frozenset(arguments.names)
    return max(get_args(Engine), key=lambda engine: len(keys & names[engine]))  # of equal ones, the first


def problems_of(engine: Engine, tree: Tree) -> list[str]:
    """Why a worker would refuse a file of vLLM's or SGLang's, one line per key."""
    assert engine in _OTHER
    names = frozenset(known()[engine].names)
    if engine == "vllm":
        return refused(tree, vllm.RESERVED, names)
    return refused(tree, sglang.RESERVED, names, sglang.ALIASES)


def lines(name: str, engine: Engine, problems: list[str]) -> list[str]:
    """What ``penstock recipe check`` says of such a file."""
    found = [f"  error    {problem}" for problem in problems] or ["  no key that a worker would refuse"]
    title, release = TITLES[engine], known()[engine].release
    return [
        name,
        f"  for {title}: its keys are checked against those of {release}, its values by the engine when it starts; "
        "rules and memory estimates are TensorRT-LLM's",
        *found,
    ]
