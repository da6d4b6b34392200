"""The recipes: files of engine arguments with a header in their leading comment.

A recipe is a plain TensorRT-LLM options file, so it also works with ``trtllm-serve``: its header is YAML after ``#``.
"""

import difflib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from penstock.infra.engine_args.memory_estimate import Shape, UnknownShape, shape_of
from penstock.infra.engine_args.rules.rule import Context, EngineRole
from penstock.infra.engine_args.schema import EngineArgs
from penstock.infra.engine_args.tree import BadArguments, Tree, decode, parse_yaml

FOLDER = Path(__file__).parents[2] / "configs" / "recipes"
GIB = 1 << 30
BLOCK_SIZE = EngineArgs().kv_cache_config.tokens_per_block  # default of files

# Memory as the driver reports it, and whether TensorRT-LLM's Blackwell kernels run.
GPUS: Mapping[str, tuple[float, bool]] = {
    "A100": (79.3, False),
    "L40S": (44.5, False),
    "H100": (79.6, False),
    "H200": (140.4, False),
    "B200": (179.0, True),
    "GB200": (185.0, True),
}


class Header(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a recipe.

    Attributes:
        set: recipes of one set serve together.
        gpus: of this engine, on all ``nodes``.
        devices: indices of the GPUs of this engine, if several engines share a node.
        longest_prompt: longest intended prompt, tokens.
        draft: a separate draft model.
        container: arguments that its container needs.
        rows: of docs/requirements.md.
    """

    title: str
    model: str
    engine: Literal["trtllm", "vllm", "sglang"]
    role: EngineRole
    set: str
    gpus: Annotated[int, Meta(ge=1)]
    gpu: Literal["A100", "L40S", "H100", "H200", "B200", "GB200"]
    use: str
    rows: tuple[str, ...]
    backend: Literal["pytorch", "_autodeploy"] = "pytorch"  # of trtllm
    nodes: Annotated[int, Meta(ge=1)] = 1
    devices: str = ""
    longest_prompt: Annotated[int, Meta(ge=1)] | None = None
    draft: str = ""
    modality: Literal["text", "multimodal"] = "text"
    container: tuple[str, ...] = ()


class RecipeEntry(NamedTuple):
    """A recipe of any engine, as its worker is started. Sizes are in tokens; ``max_len`` 0: not set."""

    name: str
    header: Header
    path: str
    block_size: int
    max_len: int


class Recipe(NamedTuple):
    name: str
    header: Header | None  # None: a user's own file
    tree: Tree
    args: EngineArgs
    text: str

    @property
    def role(self) -> EngineRole:
        return self.header.role if self.header else "aggregated"

    @property
    def model(self) -> str:
        return (self.header.model if self.header else "") or self.args.model or ""


def parse(name: str, text: str) -> Recipe:
    """Parse a recipe, or any file of engine arguments without a header.

    Raises:
        BadArguments: header or arguments are invalid; each problem names its key.
    """
    tree = parse_yaml(text)
    return Recipe(name, header_of(text), tree, decode(tree), text)


def header_of(text: str) -> Header | None:
    """The header in the leading comment; None: there is none.

    Raises:
        BadArguments: the header has invalid keys or values.
    """
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    if not any(line.startswith("engine:") for line in lines):
        return None
    try:
        return msgspec.convert(parse_yaml("\n".join(lines)), Header)
    except msgspec.ValidationError as error:
        raise BadArguments([f"header: {error}"]) from error


def load(folder: Path = FOLDER) -> dict[str, Recipe]:
    """TensorRT-LLM's recipes of a folder by name, sorted.

    Raises:
        BadArguments: one of them is malformed; the problem names it.
    """
    recipes = {}
    for path in sorted(folder.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        try:
            if (header := header_of(text)) is None or header.engine == "trtllm":
                recipes[path.stem] = parse(path.stem, text)
        except BadArguments as error:
            raise BadArguments(f"{path.name}: {problem}" for problem in error.problems) from error
    return recipes


def members(folder: Path = FOLDER) -> dict[str, RecipeEntry]:
    """The recipes of all engines by name, sorted.

    Raises:
        BadArguments: see ``load``.
    """
    members_by_path = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            member = entry_of(path.stem, str(path), path.read_text(encoding="utf-8"))
        except BadArguments as error:
            raise BadArguments(f"{path.name}: {problem}" for problem in error.problems) from error
        if member is not None:
            members_by_path[path.stem] = member
    return members_by_path


@lru_cache(maxsize=256)
def entry_of(name: str, path: str, text: str) -> RecipeEntry | None:
    """A recipe of any engine; None: the file has no header.

    Raises:
        BadArguments: header or YAML are malformed. The arguments are not checked.
    """
    header, tree = header_of(text), parse_yaml(text)
    if header is None:
        return None
    if header.engine == "vllm":
        block, longest = tree.get("block_size"), tree.get("max_model_len")
    elif header.engine == "sglang":
        block, longest = tree.get("page_size"), None  # the context is the worker's --max-model-len
    else:
        block, longest = (tree.get("kv_cache_config") or {}).get("tokens_per_block"), tree.get("max_seq_len")
    return RecipeEntry(name, header, path, block or BLOCK_SIZE, longest or 0)


def entry_at(path: Path) -> RecipeEntry:
    """A user's own recipe.

    Raises:
        BadArguments: the file has no header, or one that is wrong.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    entry = entry_of(path.stem, str(path), path.read_text(encoding="utf-8"))
    if entry is None:
        keys = ", ".join(field.name for field in msgspec.structs.fields(Header) if field.required)
        raise BadArguments([f"{path}: no header, which says what it is for: lines after '# ', with {keys}"])
    return entry


def select(name: str, entries: Mapping[str, RecipeEntry]) -> list[RecipeEntry]:
    """The recipe or the set of this name; ``gpt_oss_120b`` stands for ``gpt-oss-120b``, too.

    Raises:
        BadArguments: there is no such recipe.
    """
    plain = name.lower().replace("_", "-").removesuffix(".yaml")
    selected = [member for member in entries.values() if plain in (member.header.set, member.name)]
    exact = [member for member in selected if member.name == plain]
    if not selected:
        sets = sorted({member.header.set for member in entries.values()})
        near = difflib.get_close_matches(plain, [*sets, *entries], n=1)
        hint = f"did you mean {near[0]}?" if near else f"sets are {', '.join(sets)}"
        raise BadArguments([f"no recipe {name!r}; {hint} (`penstock recipe list`)"])
    return exact or selected


def known_shape(model: str, folder: Path = FOLDER) -> Shape | None:
    """The shape of a model whose config.json comes with the recipes; None: it does not."""
    path = folder / "models" / f"{model.replace('/', '--')}.json"
    if "/" not in model or not path.is_file():
        return None
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return shape_of(config, model=model)


def known_models(folder: Path = FOLDER) -> list[str]:
    """Ids of the models with a ``known_shape``."""
    return sorted(path.stem.replace("--", "/") for path in (folder / "models").glob("*.json"))


def context_of(recipe: Recipe) -> Context:
    """The context that a recipe is written for."""
    header = recipe.header
    if header is None:
        return Context(shape=known_shape(recipe.model))
    memory, blackwell = GPUS[header.gpu]
    return Context(
        role=header.role,
        model_len=recipe.args.max_seq_len,
        longest_prompt=header.longest_prompt,
        gpus=header.gpus,
        nodes=header.nodes,
        gpu_bytes=int(memory * GIB),
        blackwell=blackwell,
        shape=known_shape(header.model),
        draft_bytes=0,
    )


def shape_at(model: str) -> Shape:
    """The shape of a directory with a config.json, or of the model of a recipe.

    Raises:
        UnknownShape: neither a directory with a config.json nor a known model; or a size is missing.
    """
    published = known_shape(model)
    if published is not None:
        return published
    config = Path(model).expanduser() / "config.json"
    try:
        read = msgspec.json.decode(config.read_bytes(), type=dict)
        # ModelOpt's checkpoints say there, and older ones only there, how weights and KV are quantized.
        quantized = config.with_name("hf_quant_config.json")
        if quantized.is_file():
            found = msgspec.json.decode(quantized.read_bytes(), type=dict).get("quantization") or {}
            read["quantization_config"] = found | (read.get("quantization_config") or {})
        return shape_of(read, model=model)
    except OSError as error:
        raise UnknownShape(
            f"{config} cannot be read ({error.strerror}): give a directory with a config.json, or the id of a "
            f"known model: {', '.join(known_models())}"
        ) from error
    except msgspec.DecodeError as error:
        raise UnknownShape(f"{config} is not JSON: {error}") from error
