"""The description of a Kubernetes deployment: a short YAML file, completed by a recipe. Pure.

Sizes are Kubernetes quantities ("64Gi"). What is left out has a default, or comes from the recipe.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from infra.engine_args.tree import BadArguments, decode, parse_yaml
from infra.launch.groups import EXTERNAL, gpus_of
from infra.recipes.catalogue import BLOCK_SIZE, Header, RecipeEntry

Name = Annotated[str, Meta(pattern=r"^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$")]
Count = Annotated[int, Meta(ge=1)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kKMGTPE]i?)?$")]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86_400)]
Role = Literal["aggregated", "prefill", "decode", "encode", "diffusion"]
Engine = Literal["native", "mock", "trtllm", "vllm"]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the file."""


class Front(Section, frozen=True, kw_only=True):
    """Gateways or routers."""

    replicas: Count = 2
    cpu: Quantity = "2"
    memory: Quantity = "4Gi"
    flags: tuple[str, ...] = ()


class Nats(Section, frozen=True, kw_only=True):
    """The broker: one server with a volume, or (``url_secret``) an existing one.

    Attributes:
        url_secret: name of a Secret with a URL under each of gateway, router, worker, operator (and sys).
    """

    url_secret: str = ""
    image: str = "nats:2.12-alpine"
    storage: Quantity = "64Gi"
    storage_class: str = ""
    cpu: Quantity = "2"
    memory: Quantity = "8Gi"


class Weights(Section, frozen=True, kw_only=True):
    """The volume that all workers and gateways share. ``claim``: one that exists, instead of one made here."""

    claim: str = ""
    size: Quantity = "1Ti"
    storage_class: str = ""


class Workers(Section, frozen=True, kw_only=True):
    """Workers of one role.

    Attributes:
        gpus: of each pod; by default what the engine arguments ask for, over the nodes.
        nodes: pods that together are one engine.
        engine_args: text of the engine's arguments, instead of the recipe's file.
        load_s: the longest that weights may take to load.
        resources: further ones of each pod, such as ``rdma/ib: 1``.
        nvlink_domain: the pods of an engine share memory over NVLink across nodes (GB200): needs NVIDIA's DRA driver.
        topology_key: node label; each engine's pods are placed where it has one value.
    """

    replicas: Count = 1
    gpus: Annotated[int, Meta(ge=0)] | None = None
    nodes: Count | None = None
    model: str = ""
    engine_args: str = ""
    flags: tuple[str, ...] = ()
    drain_s: Seconds = 30.0
    load_s: Seconds = 3600.0
    cpu: Quantity = "16"
    memory: Quantity = "64Gi"
    shm: Quantity = "16Gi"
    resources: Mapping[str, int | str] = {}
    node_selector: Mapping[str, str] = {}
    nvlink_domain: bool = False
    topology_key: str = ""


class Description(Section, frozen=True, kw_only=True):
    """A whole deployment.

    Attributes:
        recipe: of `penstock recipe list`: engine, model, roles, engine arguments, GPUs and nodes.
        image: of gateways, routers and native workers; see infra/Containerfile.
        engine_image: of workers with trtllm or vllm.
        hub_secret: name of a Secret whose key ``token`` fetches models from the Hugging Face hub.
    """

    name: Name = "penstock"
    namespace: Name = "default"
    image: str
    engine_image: str = ""
    recipe: str = ""
    engine: Engine | None = None
    model: str = ""
    served_model_name: str = ""
    block_size: Count | None = None
    drain_s: Seconds = 30.0
    hub_secret: str = ""
    gateway: Front = Front()
    router: Front = Front()
    nats: Nats = Nats()
    weights: Weights = Weights()
    workers: Mapping[Role, Workers] = {}


class Pool(NamedTuple):
    """Workers of one role, with everything decided. ``gpus``: of each pod; ``max_len``: 0: the model's."""

    role: Role
    engine: str
    model: str
    image: str
    args: str  # text of the engine arguments; "": none
    gpus: int
    nodes: int
    max_len: int
    block_size: int
    spec: Workers


def read(text: str) -> Description:
    """
    Raises:
        BadArguments: not YAML, unknown keys, wrong values; the problem names the key.
    """
    try:
        return msgspec.convert(parse_yaml(text), Description)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise BadArguments([f"{path.rstrip('`').lstrip('.') or 'description'}: {message}"]) from error


def pools(given: Description, members: Mapping[str, RecipeEntry] = {}, texts: Mapping[str, str] = {}) -> list[Pool]:
    """The workers, role by role.

    Args:
        members: the recipe's files by role.
        texts: what is in them, by role.
    Raises:
        BadArguments: something is missing or contradictory.
    """
    roles: dict[Role, Workers] = dict(given.workers) or {_role(role): Workers() for role in members}
    if not roles:
        raise BadArguments(["workers: name at least one role, or a recipe"])
    problems = []
    found = []
    for role, spec in roles.items():
        try:
            found.append(_pool(given, role, spec, members.get(role), texts.get(role, "")))
        except BadArguments as error:
            problems += [f"workers.{role}: {problem}" for problem in error.problems]
    if problems:
        raise BadArguments(problems)
    models = {pool.model for pool in found if pool.role != "diffusion"}
    if len(models) > 1:
        raise BadArguments([f"workers: one language model per deployment, not {', '.join(sorted(models))}"])
    if len(sizes := {pool.block_size for pool in found}) > 1:
        raise BadArguments([f"workers: blocks of {sizes} tokens; handoff and routing need one size"])
    return found


def _pool(given: Description, role: Role, spec: Workers, member: RecipeEntry | None, text: str) -> Pool:
    header = member.header if member else None
    engine = "native" if role == "diffusion" else given.engine or (header.engine if header else "native")
    if header is not None and engine != header.engine:
        raise BadArguments([f"engine: {engine}, the recipe is for {header.engine}; leave it out"])
    model = spec.model or ("" if role == "diffusion" else given.model or (header.model if header else ""))
    if not model:
        raise BadArguments(["model: name a directory on the weights volume (/models/...) or a Hugging Face id"])
    args = spec.engine_args or text
    if args and engine not in EXTERNAL:
        raise BadArguments([f"engine_args: read by {' and '.join(EXTERNAL)}, not by {engine}"])
    if spec.engine_args and engine == "trtllm":
        try:
            decode(parse_yaml(spec.engine_args))
        except BadArguments as error:
            raise BadArguments(f"engine_args: {problem}" for problem in error.problems) from error
    image = given.engine_image if engine in EXTERNAL else given.image
    if not image:
        raise BadArguments([f"engine_image: name the image with penstock and {engine}; see infra/Containerfile"])
    gpus, nodes = _placed(spec, engine, args, None if spec.engine_args else header)
    block_size = given.block_size or (member.block_size if member else BLOCK_SIZE)
    return Pool(role, engine, model, image, args, gpus, nodes, member.max_len if member else 0, block_size, spec)


def _placed(spec: Workers, engine: str, args: str, header: Header | None) -> tuple[int, int]:
    """GPUs of each pod, and pods of each engine."""
    nodes = spec.nodes or (header.nodes if header else 1)
    if engine == "mock":
        return 0, 1
    total = gpus_of(engine, parse_yaml(args)) if engine in EXTERNAL else 1
    gpus = spec.gpus if spec.gpus is not None else -(-total // nodes)
    if nodes > 1 and engine != "trtllm":
        raise BadArguments([f"nodes: {nodes}; only trtllm runs one engine over several nodes here"])
    if engine in EXTERNAL and gpus * nodes != total:
        raise BadArguments([f"gpus: {gpus} x {nodes} nodes, the engine's arguments ask for {total}"])
    return gpus, nodes


def _role(text: str) -> Role:
    return msgspec.convert(text, Role)  # type: ignore[no-any-return]


def quantity(tree: Mapping[str, Any]) -> dict[str, str]:
    """Quantities as text, as Kubernetes prints them back."""
    return {key: str(value) for key, value in tree.items()}
