"""The workers of a deployment: the number of each role, their settings, and the GPUs of each.

Pure: what a recipe and a file of engine arguments say comes in as values.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from penstock.configs.settings import WorkerSettings, served_names
from penstock.configs.up_settings import UpSettings
from penstock.infra.engine_args.tree import BadArguments, Tree, decode, merge, parse_json
from penstock.infra.model import modeldir
from penstock.infra.text.parsers import families
from penstock.infra.text.parsers.families import TABLE, Table
from penstock.launch.recipes import advice
from penstock.launch.recipes.catalogue import RecipeEntry

BLOCK_SIZE: int = UpSettings().block_size
EXTERNAL = ("trtllm", "vllm", "sglang")  # engines with arguments of their own, whose GPUs are theirs alone
_EXTERNAL_NAMES = f"{', '.join(EXTERNAL[:-1])} and {EXTERNAL[-1]}"
_ENCODER: dict[str, Any] = {"logits_processor": (), "default_logits_processors": ""}  # it samples nothing
_FILES = {"prefill": "prefill_engine_args", "decode": "decode_engine_args", "encode": "encode_engine_args"}
_PARALLEL = {
    "trtllm": ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "world_size"),
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    "sglang": ("tp_size", "pp_size", "dp_size"),
}


class PlanError(ValueError):
    """The flags contradict each other or the machine; the text names the flag and the fix."""


class WorkerGroup(NamedTuple):
    """Workers with the same settings.

    Attributes:
        settings: of ``WorkerSettings``, laid over what goes through from ``penstock up``.
        gpus: of each worker.
        alone: no other worker uses them; else one is shared when there are not enough.
        arguments: of the engine, as its file and the override say.
        prefix: of its workers' names, where there are several models.
    """

    role: str
    number: int
    settings: Mapping[str, Any]
    gpus: int = 0
    alone: bool = False
    arguments: Mapping[str, Any] = MappingProxyType({})
    prefix: str = ""

    @property
    def engine(self) -> str:
        return str(self.settings["engine"])

    @property
    def names(self) -> list[str]:
        stem = "worker" if self.role == "aggregated" else self.role
        return [f"{self.prefix}{stem}-{index}" for index in range(self.number)]


class WorkerFleet(NamedTuple):
    """All workers, and what gateways have in common with those of the language model.

    Attributes:
        model: "": no language model is served.
        models: all of them as FOLDER or NAME=FOLDER, where there are several.
    """

    groups: tuple[WorkerGroup, ...]
    engine: str
    model: str
    block_size: int
    models: tuple[str, ...] = ()

    @property
    def slow(self) -> bool:
        """Whether it may take long to load."""
        return any(group.engine in EXTERNAL for group in self.groups)


def fleet_of(
    up: UpSettings,
    members: Sequence[RecipeEntry] = (),
    read: Callable[[str], Tree] = lambda path: {},
    makes_vectors: Callable[[str], bool] = lambda model: False,
) -> WorkerFleet:
    """
    Args:
        members: the files of the recipe that was asked for.
        read: a file of engine arguments, as a tree.
        makes_vectors: whether a model is for embeddings only.
    Raises:
        PlanError, BadArguments: flags that contradict each other or the recipe.
    """
    try:
        known = Table(TABLE.rows)
        families.prepare(up.parser_families, up.reasoning_parser, up.tool_call_parser, known)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if len(up.model) > 1:
        return _several(up, members, read, makes_vectors)
    up = with_name(up)
    if up.model and not members and makes_vectors(up.model[0]):
        up = _as_embedding(up)
    recipe: dict[str, RecipeEntry] = {member.header.role: member for member in members}
    first = members[0].header if members else None
    engine = _engine(up, first.engine if first else "")
    roles = roles_of(up, recipe)
    for role, name in _FILES.items():
        if getattr(up, name) and not roles[role]:
            raise PlanError(
                f"--{name.replace('_', '-')}: no {role} worker is started; add --{role} N, or leave the file out"
            )
    blocks = {member.block_size for member in members} or {up.block_size}
    if up.block_size not in blocks | {BLOCK_SIZE}:
        raise PlanError(f"--block-size {up.block_size}: the recipe's files say {min(blocks)}; leave it out")
    block_size = min(blocks)
    # The mock engine needs no weights, but a long context.
    model = "".join(up.model) or (first.model if first else str(modeldir.TINY if engine == "mock" else modeldir.DEMO))
    groups = [
        _group(up, role, count, engine, model, block_size, recipe.get(role), read)
        for role, count in roles.items()
        if count
    ]
    if engine == "trtllm":
        _agree(groups, block_size)
    if up.diffusion:
        groups.append(_diffusion(up))
    if up.embed:
        groups.append(_embedding(up, engine, model))
    # Without workers for text, a model that embed workers have makes vectors only.
    alone = not sum(roles.values()) and (
        bool(up.embed and not up.embed_model) or (not up.model and bool(up.diffusion or up.embed_model))
    )
    return WorkerFleet(tuple(groups), engine, "" if alone else model, block_size)


def with_name(up: UpSettings) -> UpSettings:
    """``--model NAME=FOLDER`` of one model as its folder and ``--served-model-name``.

    Raises:
        PlanError: it has both.
    """
    if len(up.model) != 1 or not (named := modeldir.split_name(up.model[0]))[0]:
        return up
    name, folder = named
    if up.served_model_name:
        raise PlanError(f"--model {up.model[0]} names the model already; leave --served-model-name out")
    return msgspec.structs.replace(up, model=(folder,), served_model_name=name)


_OF_ONE = ("served_model_name", "recipe", "chat_template", "speculative_model", "lora", "lora_folder", *_FILES.values())
_SLUG = re.compile(r"[^a-z0-9]+")


def _several(
    up: UpSettings, members: Sequence[RecipeEntry], read: Callable[[str], Tree], makes_vectors: Callable[[str], bool]
) -> WorkerFleet:
    """Workers for several models, each as if it were alone."""
    for field in _OF_ONE:
        if getattr(up, field):
            fix = "name each with --model NAME=FOLDER" if field == "served_model_name" else "leave it out"
            raise PlanError(f"--{field.replace('_', '-')} is for one model, and --model names {len(up.model)}: {fix}")
    if up.embed and not up.embed_model:
        raise PlanError("--embed with several models needs --embed-model, the one that computes vectors")
    named = [modeldir.split_name(each) for each in up.model]
    names = [(*served_names(name), modeldir.name_of(Path(folder).expanduser()))[0] for name, folder in named]
    stems = [_SLUG.sub("-", name.rpartition("/")[2].lower()).strip("-") or "model" for name in names]
    for each in names, stems:
        if twice := next((index for index, one in enumerate(each) if one in each[:index]), 0):
            first = up.model[each.index(each[twice])]
            raise PlanError(
                f"--model {first} and --model {up.model[twice]} would both be called {each[twice]!r}: name them with "
                "--model NAME=FOLDER"
            )
    groups: list[WorkerGroup] = []
    engine, block_size, texts = "", up.block_size, []
    for stem, (name, folder), given in zip(stems, named, up.model, strict=True):
        # Workers for images and vectors that have a model of their own are not part of any of these.
        alone = {"diffusion": 0, "embed": 0, "embed_model": "", "embed_served_name": ""}
        one = msgspec.structs.replace(up, model=(folder,), served_model_name=name, **alone)
        fleet = fleet_of(one, members, read, makes_vectors)
        served = {"served_model_name": name}
        groups += [each._replace(prefix=f"{stem}-", settings={**served, **each.settings}) for each in fleet.groups]
        engine, block_size = fleet.engine, fleet.block_size
        texts += [given] if fleet.model else []
    if up.diffusion:
        groups.append(_diffusion(up))
    if up.embed:
        groups.append(_embedding(up, engine, up.embed_model))
    return WorkerFleet(
        tuple(groups), engine, modeldir.split_name(texts[0])[1] if texts else "", block_size, tuple(texts)
    )


def roles_of(up: UpSettings, recipe: Mapping[str, RecipeEntry] = {}) -> dict[str, int]:
    """How many workers of each role compute the language model."""
    counts = {"prefill": up.prefill, "decode": up.decode, "encode": up.encode}
    whole = up.workers
    if whole < 0:
        split = up.prefill + up.decode > 0
        if recipe and not split and "aggregated" not in recipe:
            counts |= {role: 1 for role in counts if role in recipe}
            whole = 0
        else:
            apart = bool(up.diffusion or (up.embed and up.embed_model))
            whole = int(not split and not (apart and not up.model and not recipe))
    return {"aggregated": whole, **counts}


def assign(groups: Sequence[WorkerGroup], gpus: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Which GPUs each worker sees, by its name: in the order of the groups. Workers without a GPU are left out.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES writes them; None: whatever there is, each engine sees all of it.
    Raises:
        PlanError: there are too few.
    """
    if gpus is None:
        return {}
    unassigned = list(gpus)
    assigned: dict[str, tuple[str, ...]] = {}
    exclusive = [group for group in groups if group.alone and (gpus or group.engine != "native")]  # else on CPUs
    for group in exclusive:
        for name in group.names:
            assigned[name], unassigned = tuple(unassigned[: group.gpus]), unassigned[group.gpus :]
    sharing = [name for group in groups if group.gpus and not group.alone for name in group.names]
    short = any(len(assigned[name]) < group.gpus for group in exclusive for name in group.names)
    if short or (gpus and sharing and not unassigned):
        needs = [f"{group.number} x {group.role} with {group.gpus}" for group in groups if group.gpus]
        total = sum(group.number * group.gpus for group in groups)
        fix = (
            "start fewer workers, lower --tensor-parallel-size, or start some on other machines with `penstock worker`"
            if gpus
            else "start it on a machine that has them, or add --gpus none if the engine was built for CPUs"
        )
        available = f"{len(gpus)} may be used ({','.join(gpus)})" if gpus else "none is seen here"
        raise PlanError(
            f"{total} GPU{' is' if total == 1 else 's are'} needed ({', '.join(needs)}), {available}: {fix}"
        )
    return assigned | {name: (unassigned[index % len(unassigned)],) for index, name in enumerate(sharing) if unassigned}


def _engine(up: UpSettings, recipe: str) -> str:
    if up.engine == "auto":
        return recipe or "native"
    if recipe and recipe != up.engine:
        raise PlanError(f"--engine {up.engine}: recipe {up.recipe} is for {recipe}; leave --engine out")
    return up.engine


def _group(
    up: UpSettings,
    role: str,
    count: int,
    engine: str,
    model: str,
    block_size: int,
    member: RecipeEntry | None,
    read: Callable[[str], Tree],
) -> WorkerGroup:
    if role == "encode" and engine == "vllm" and not up.encode_engine_args:
        # vLLM's workers take the embeddings of native ones. The arguments are for vLLM.
        own = {"tensor_parallel_size": 1, "extra_engine_args": "", "override_engine_args": ""} | _ENCODER
        return WorkerGroup(role, count, {"role": role, "engine": "native", "model": model} | own, gpus=1)
    settings: dict[str, Any] = {"role": role, "engine": engine, "model": model, "block_size": block_size}
    path = (getattr(up, _FILES[role]) if role in _FILES else "") or up.extra_engine_args
    if not path and member is not None:
        _one_machine(member)
        path = member.path
        if not up.max_model_len and member.max_len:
            settings["max_model_len"] = member.max_len
    settings["extra_engine_args"] = path
    if role == "encode":
        settings |= _ENCODER
    if engine not in EXTERNAL:
        if path or up.override_engine_args:
            raise PlanError(f"engine arguments are read by {_EXTERNAL_NAMES}, not by {engine}: name --engine")
        size = up.tensor_parallel_size or 1
        if size > 1 and engine != "native":
            raise PlanError(
                f"--tensor-parallel-size {size}: only native, {_EXTERNAL_NAMES} share layers, not {engine}: name "
                "--engine, or start more workers instead"
            )
        if role == "encode" and size > 1:  # a vision tower is not split
            settings["tensor_parallel_size"] = size = 1
        return WorkerGroup(role, count, settings, gpus=0 if engine == "mock" else size, alone=size > 1)
    tree = read(path) if path else {}
    if up.override_engine_args:
        try:
            tree = merge(tree, parse_json(up.override_engine_args))
        except BadArguments as error:
            raise PlanError(f"--override-engine-args: {error}") from error
    gpus = gpus_of(engine, tree, up.tensor_parallel_size)
    return WorkerGroup(role, count, settings, gpus=gpus, alone=True, arguments=tree)


def _agree(groups: Sequence[WorkerGroup], block_size: int) -> None:
    """Engines that hand off KV to each other must use the same blocks and layout; routers pair no others."""
    members = []
    for group in groups:
        tree = {key: value for key, value in group.arguments.items() if key != "cache_transceiver_config"}
        kv = {"tokens_per_block": block_size}
        transceiver = group.arguments.get("cache_transceiver_config") or {}
        named = transceiver.get("backend") if isinstance(transceiver, Mapping) else None
        named = "NIXL" if named in (None, "DEFAULT") else named  # as the worker does
        try:
            args = decode(merge({"kv_cache_config": kv, "cache_transceiver_config": {"backend": named}}, tree))
        except BadArguments:
            continue  # the worker says what is wrong, with its own defaults below
        members.append(advice.EngineConfig(f"--{group.role}", group.role, "", args))  # type: ignore[arg-type]
    wrong = [finding for finding in advice.compare(members) if finding.level == "error"]
    if wrong:
        problems = "; ".join(f"{each.where} {each.message}: {each.fix}" for each in wrong)
        raise PlanError(f"the workers' engine arguments do not go together: {problems}")


def gpus_of(engine: str, tree: Tree, tensor_parallel_size: int = 0) -> int:
    """GPUs of one engine with these arguments; the file goes before the flag, as it does in the worker."""
    tensor, *_ = _PARALLEL[engine]
    sizes: dict[str, Any] = {tensor: tensor_parallel_size or 1} | tree
    counts = (sizes.get(key) or 1 for key in _PARALLEL[engine])
    return math.prod(count for count in counts if isinstance(count, int))


def _one_machine(member: RecipeEntry) -> None:
    if member.header.nodes > 1:
        raise PlanError(
            f"{member.name} is one engine on {member.header.nodes} nodes, and this is one machine: see "
            f"`penstock recipe show {member.name}` for Slurm, `penstock kubernetes render` for Kubernetes"
        )


_NO_ENGINE_ARGUMENTS = {
    name: getattr(WorkerSettings(), name)
    for name in ("extra_engine_args", "override_engine_args", "logits_processor", "default_logits_processors")
}


def _diffusion(up: UpSettings) -> WorkerGroup:
    if not up.diffusion_model:
        raise PlanError("--diffusion needs --diffusion-model, a diffusers directory or Hugging Face id")
    settings = {
        "role": "diffusion",
        "engine": up.diffusion_engine,
        "model": up.diffusion_model,
        "served_model_name": up.diffusion_served_name,
        **_NO_ENGINE_ARGUMENTS,
    }
    return WorkerGroup("diffusion", up.diffusion, settings, gpus=1)


def _as_embedding(up: UpSettings) -> UpSettings:
    """``--model`` names a model that makes vectors only, so its workers have the role for that."""
    asked = next((role for role in ("prefill", "decode", "encode") if getattr(up, role)), "")
    if asked or up.embed_model or up.engine in EXTERNAL:
        what = f"--{asked}" if asked else "--embed-model" if up.embed_model else f"--engine {up.engine}"
        raise PlanError(
            f"{what}: --model {up.model[0]} makes embeddings and generates no text; name it with --embed-model"
        )
    return msgspec.structs.replace(
        up,
        model=(),
        workers=0,
        embed=up.embed or max(1, up.workers),
        embed_model=up.model[0],
        embed_served_name=up.embed_served_name or up.served_model_name,
        served_model_name="",
    )


def _embedding(up: UpSettings, engine: str, model: str) -> WorkerGroup:
    own = "mock" if engine == "mock" else "native"
    settings = {
        "role": "embed",
        "engine": own,
        "model": up.embed_model or model,
        "served_model_name": up.embed_served_name or ("" if up.embed_model else up.served_model_name),
        "kv_blocks": 0,
        "quantization": "none",
        "speculative_model": "",
        "lora": (),
        "lora_folder": "",
        **_NO_ENGINE_ARGUMENTS,
    }
    return WorkerGroup("embed", up.embed, settings, gpus=0 if own == "mock" else 1)
