"""``penstock recipe list|matrix|show|check``, and the command line that runs a recipe.

Files for vLLM and SGLang are checked by the names of the releases that workers were run with
(``configs/recipes/arguments.json``), so the engines need not be installed here. What values mean, the engine itself
checks when the worker starts.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import msgspec

from penstock.cli.terminal import fail, reason
from penstock.configs.flags import Parser, whole_number
from penstock.infra.engine_args.memory_estimate import GIB, UnknownShape
from penstock.infra.engine_args.rules.rule import Context, EngineRole
from penstock.infra.engine_args.schema import EngineArgs
from penstock.infra.engine_args.tree import BadArguments, Tree, parse_yaml
from penstock.launch.recipes.advice import advise, check_set, failed, finding_lines, lines
from penstock.launch.recipes.catalogue import (
    FOLDER,
    GPUS,
    Header,
    Recipe,
    RecipeEntry,
    context_of,
    entry_at,
    header_of,
    members,
    parse,
    shape_at,
)
from penstock.workers.engines.external.arguments import refused
from penstock.workers.engines.sglang import args as sglang
from penstock.workers.engines.support import matrix, sampling_notes, sampling_table
from penstock.workers.engines.vllm import args as vllm

Engine = Literal["trtllm", "vllm", "sglang"]
TITLES = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}
_OTHER = ("vllm", "sglang")
LAUNCHER = "trtllm-llmapi-launch"  # runs the worker on rank 0 only; the other ranks compute


def worker_command(member: RecipeEntry, *, model: str = "") -> str:
    """A shell command; for several nodes, with Slurm.

    Args:
        model: a local directory that replaces the model id.
    """
    header = member.header
    argv = ["penstock", "worker", "--engine", header.engine, "--role", header.role]
    argv += ["--model", model or header.model, "--extra-engine-args", member.path]
    argv += ["--block-size", str(member.block_size)]
    if member.max_len:
        argv += ["--max-model-len", str(member.max_len)]
    command = [*_launch(header), *map(shlex.quote, argv)]
    return " ".join(command)


def _launch(header: Header) -> list[str]:
    environ = [f"CUDA_VISIBLE_DEVICES={header.devices}"] if header.devices else []
    if header.nodes == 1:
        return environ
    per_node = header.gpus // header.nodes
    return [
        *environ, "srun", "--mpi=pmix", f"--nodes={header.nodes}", f"--ntasks={header.gpus}",
        f"--ntasks-per-node={per_node}", LAUNCHER,
    ]  # fmt: skip


def hardware(header: Header) -> str:
    nodes = f", {header.nodes} nodes" if header.nodes > 1 else ""
    return f"{header.gpus} x {header.gpu}{nodes}"


OK, REFUSED, USAGE = 0, 1, 2


def run_list(argv: Sequence[str]) -> int:
    """Print all recipes."""
    Parser(prog="penstock recipe list", description="recipes that come with penstock").parse_args(argv)
    _print([("recipe", "engine", "role", "GPUs", "model", "title"), *(
        (name, header.engine, header.role, hardware(header), header.model, header.title)
        for name, (_, header, *_) in members().items()
    )])  # fmt: skip
    return OK


def run_matrix(argv: Sequence[str]) -> int:
    """Print what each engine can do, and what becomes of sampling options."""
    Parser(prog="penstock recipe matrix", description="what each engine can do").parse_args(argv)
    _print(matrix())
    print()
    _print(sampling_table())
    print()
    for number, note in enumerate(sampling_notes(), 1):
        print(f"({number}) {note}")
    return OK


def run_show(argv: Sequence[str]) -> int:
    """Print a recipe and the commands of its set."""
    parser = Parser(prog="penstock recipe show", description="a recipe, and how to run it")
    parser.add_argument("name", help="recipe, see `penstock recipe list`; or a file of your own with such a header")
    parser.add_argument("--model", default="", help="model directory, instead of the id")
    args = parser.parse_args(argv)
    entries = members()
    member = entries.get(args.name.removesuffix(".yaml"))
    own = Path(args.name)
    if member is None and own.is_file():
        try:
            member = entry_at(own)
        except (BadArguments, OSError, UnicodeDecodeError) as error:
            why = error.problems[0] if isinstance(error, BadArguments) else f"{own}: {reason(error)}"
            return fail("recipe", why, status=USAGE)
        entries = {member.name: member}
    if member is None:
        return fail("recipe", f"no recipe {args.name!r}; recipes are {', '.join(entries)}", status=USAGE)
    print(Path(member.path).read_text(encoding="utf-8").rstrip())
    same_set = [each for each in entries.values() if each.header.set == member.header.set]
    for one in same_set:
        container = f"  (container: {' '.join(one.header.container)})" if one.header.container else ""
        print(f"\n# {one.header.title}{container}\n{worker_command(one, model=args.model)}")
    if all(one.header.nodes == 1 for one in same_set) and member.path != str(own):
        model_flag = f" --model {shlex.quote(args.model)}" if args.model else ""
        print(f"\n# all of it on one machine\npenstock up --recipe {member.header.set}{model_flag}")
    return OK


def _print(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def run_check(argv: Sequence[str]) -> int:
    """Check files, each alone and all together. Returns 1 if an engine would refuse one."""
    args = _check_parser().parse_args(argv)
    opened: list[tuple[Recipe, Context]] = []
    any_refused = False
    for file in args.files:
        role, name = _role_of(file)
        try:
            text = _text(name)
            engine: Engine = args.engine or engine_of(text)
            if engine == "trtllm":
                recipe = parse(Path(name).stem, text)
                opened.append((recipe, _context(recipe, args, role)))
                continue
            problems = problems_of(engine, parse_yaml(text))
        except (BadArguments, UnknownShape, OSError, UnicodeDecodeError) as error:
            for problem in error.problems if isinstance(error, BadArguments) else (reason(error),):
                print(f"{name}: {problem}", file=sys.stderr)
            return REFUSED
        print("\n".join(foreign_lines(name, engine, problems)))
        any_refused |= bool(problems)
    for recipe, context in opened:
        advice = advise(recipe, context)
        any_refused |= failed(advice.findings)
        print("\n".join(lines(advice)))
    if len(opened) > 1:
        findings = check_set(opened)
        any_refused |= failed(findings)
        print("\n".join(["together", *(line for each in findings for line in finding_lines(each))]))
        if not findings:
            print("  they agree")
    return REFUSED if any_refused else OK


def _check_parser() -> Parser:
    parser = Parser(prog="penstock recipe check", description="check engine arguments: what would fail or be slow")
    parser.add_argument("files", nargs="+", metavar="[ROLE=]FILE", help="YAML of engine arguments, or a recipe's name")
    about_engine = "whose arguments they are (default: the header's, else the engine that knows most of the keys)"
    parser.add_argument("--engine", choices=get_args(Engine), help=about_engine)
    parser.add_argument("--role", choices=get_args(EngineRole), help="default: the recipe's, else aggregated")
    parser.add_argument("--model", help="model directory (default: the recipe's model)")
    parser.add_argument("--model-len", type=whole_number(), metavar="N", help="longest prompt + output, in tokens")
    parser.add_argument("--longest-prompt", type=whole_number(), metavar="N", help="in tokens (default: --model-len)")
    parser.add_argument("--gpus", type=whole_number(), metavar="N", help="GPUs of the engine, on all nodes")
    parser.add_argument("--nodes", type=whole_number(), metavar="N")
    parser.add_argument("--gpu", choices=tuple(GPUS), help="kind of GPU")
    parser.add_argument("--gpu-memory-gib", type=float, metavar="X", help="memory of one GPU")
    parser.add_argument("--block-size", type=whole_number(), metavar="N", help="tokens per block of the pipeline")
    parser.add_argument(
        "--draft-tokens", type=int, metavar="N", help="proposed so far: trtllm_spec_draft_tokens_total of a worker"
    )
    parser.add_argument(
        "--accepted-tokens", type=int, metavar="N", help="right ones of those: trtllm_spec_accepted_tokens_total"
    )
    parser.add_argument("--logits-processors", action="store_true", help="requests may ask for logits processors")
    parser.add_argument("--trtllm-version", metavar="V")
    parser.add_argument("--container-version", metavar="V", help="of NVIDIA's runtime container")
    return parser


def _role_of(given: str) -> tuple[str | None, str]:
    """Split an argument such as ``prefill=a.yaml`` into role and file."""
    role, equals, name = given.partition("=")
    return (role, name) if equals and role in get_args(EngineRole) else (None, given)


def _text(name: str) -> str:
    """Of a file, or of a bundled recipe by its name."""
    path = Path(name)
    bundled = FOLDER / f"{name}.yaml"
    if not path.is_file() and bundled.is_file():
        path = bundled
    return path.read_text(encoding="utf-8")


def _context(recipe: Recipe, args: argparse.Namespace, role: str | None) -> Context:
    """The recipe's context, overridden by the command line."""
    base = context_of(recipe)
    over: dict[str, object] = {}
    for field, given in (
        ("role", role or args.role), ("model_len", args.model_len),
        ("longest_prompt", args.longest_prompt or args.model_len),
        ("gpus", args.gpus), ("nodes", args.nodes), ("router_block_size", args.block_size),
        ("version", args.trtllm_version), ("container", args.container_version),
    ):  # fmt: skip
        if given is not None:
            over[field] = given
    if args.gpu:
        over["gpu_bytes"], over["blackwell"] = int(GPUS[args.gpu][0] * GIB), GPUS[args.gpu][1]
    if args.gpu_memory_gib:
        over["gpu_bytes"] = int(args.gpu_memory_gib * GIB)
    if args.model:
        over["shape"] = shape_at(args.model)
    if args.draft_tokens is not None and args.accepted_tokens is not None:
        over["accepted"] = (args.draft_tokens, args.accepted_tokens)
    over["logits_processors"] = args.logits_processors
    draft = recipe.args.speculative_config.draft_model if recipe.args.speculative_config else None
    if draft:
        directory = Path(draft).expanduser()
        if directory.is_dir():
            over["draft"] = shape_at(draft)
            over["draft_bytes"] = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        elif _local(draft):
            over["missing"] = frozenset([draft])
    balancer = recipe.args.moe_config.load_balancer
    if isinstance(balancer, str) and not Path(balancer).is_file():
        over["missing"] = frozenset([*(over.get("missing") or ()), balancer])  # type: ignore[misc]
    return msgspec.structs.replace(base, **over)


def _local(name: str) -> bool:
    """Whether a model is given as a path rather than as an id "owner/name"."""
    return name.startswith((".", "/", "~")) or name.count("/") != 1


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


def foreign_lines(name: str, engine: Engine, problems: list[str]) -> list[str]:
    """What ``penstock recipe check`` says of such a file."""
    found = [f"  error    {problem}" for problem in problems] or ["  no key that a worker would refuse"]
    title, release = TITLES[engine], known()[engine].release
    return [
        name,
        f"  for {title}: its keys are checked against those of {release}, its values by the engine when it starts; "
        "rules and memory estimates are TensorRT-LLM's",
        *found,
    ]
