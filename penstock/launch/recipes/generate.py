"""``penstock recipe generate``: recipes for a model, GPUs and a load."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from penstock.cli.terminal import fail
from penstock.configs.flags import Parser, whole_number
from penstock.infra.engine_args.memory_estimate import GIB, Shape, UnknownShape
from penstock.infra.engine_args.rules.rule import EngineRole
from penstock.infra.engine_args.schema import TransceiverBackend
from penstock.infra.engine_args.tree import BadArguments
from penstock.launch.recipes.advice import check_set, failed
from penstock.launch.recipes.catalogue import GPUS, context_of, parse, shape_at
from penstock.launch.recipes.engine_args import EngineSpec, Generated, generate

OK, REFUSED, USAGE = 0, 1, 2
PER_NODE = {"GB200": 4}  # a tray; other nodes have eight
_NAME = re.compile(r"\w[\w.-]{0,100}", re.ASCII)


def run_generate(argv: Sequence[str]) -> int:
    """Print the recipes, or write them to a folder."""
    args = _parser().parse_args(argv)
    try:
        texts = files(shape_at(args.model), args.model, vars(args))
        if args.out:
            Path(args.out).mkdir(parents=True, exist_ok=True)
        for name, (text, generated) in texts.items():
            for warning in generated.warnings:
                print(f"{name}: {warning}", file=sys.stderr)
            if args.out:
                path = Path(args.out) / f"{name}.yaml"
                path.write_text(text, encoding="utf-8")
                print(path)
            else:
                print(f"# ---- {name}.yaml\n{text}")
    except (BadArguments, UnknownShape, OSError) as error:
        problems = error.problems if isinstance(error, BadArguments) else (str(error),)
        return fail("recipe generate", *problems, status=REFUSED)
    return OK


def files(shape: Shape, model: str, arguments: dict[str, Any]) -> dict[str, tuple[str, Generated]]:
    """The texts of recipes by name: one, or a pair for prefill and decode.

    Raises:
        BadArguments: the model cannot be served this way, or the two engines would not match.
    """
    gpus_by_role: dict[EngineRole, int] = {
        "aggregated": arguments["gpus"], "prefill": arguments["prefill_gpus"], "decode": arguments["decode_gpus"],
    }  # fmt: skip
    counts = {role: count for role, count in gpus_by_role.items() if count}
    if set(counts) not in ({"aggregated"}, {"prefill", "decode"}):
        raise BadArguments(["gpus: give --gpus, or --prefill-gpus with --decode-gpus"])
    name = arguments["set"] or _slug(model)
    if not _NAME.fullmatch(name):
        raise BadArguments([f"set: {name!r} is used in file names; use letters, digits, _ . and -"])
    memory, blackwell = GPUS[arguments["gpu"]]
    specs = {
        role: EngineSpec(
            role=role,
            gpus=gpus,
            gpu_bytes=int(memory * GIB),
            blackwell=blackwell,
            gpus_per_node=arguments["gpus_per_node"] or PER_NODE.get(arguments["gpu"], 8),
            **{key: arguments[key] for key in ("isl", "osl", "concurrency", "mtp", "windows", "transport")},
        )
        for role, gpus in counts.items()
    }
    return texts_of(shape, specs, model=model, name=name, gpu=arguments["gpu"])


def texts_of(
    shape: Shape, specs: Mapping[EngineRole, EngineSpec], *, model: str, name: str, gpu: str
) -> dict[str, tuple[str, Generated]]:
    """The texts of the recipes of one set by name, checked alone and together.

    Raises:
        BadArguments: the model cannot be served this way, or the engines would not match.
    """
    generated = {}
    for role, spec in specs.items():
        try:
            one = generate(shape, spec)
        except BadArguments as error:
            raise BadArguments(f"{role}: {problem}" for problem in error.problems) from error
        suffix = "agg" if role == "aggregated" else role
        generated[f"{name}-{suffix}"] = (text_of(one, spec, model=model, name=name, gpu=gpu), one)
    recipes = [parse(name, text) for name, (text, _) in generated.items()]
    findings = check_set([(recipe, context_of(recipe)) for recipe in recipes])
    if failed(findings):
        raise BadArguments(str(each) for each in findings if each.level == "error")
    return generated


def text_of(generated: Generated, spec: EngineSpec, *, model: str, name: str, gpu: str) -> str:
    """A recipe: header and arguments."""
    drafted = f", {spec.mtp} drafted by MTP" if spec.mtp else ""
    header: dict[str, Any] = {
        "title": f"{model}, {spec.role}, generated",
        "model": model,
        "engine": "trtllm",
        "backend": "pytorch",
        "role": spec.role,
        "set": name,
        "gpus": spec.gpus,
        "nodes": spec.nodes,
        "gpu": gpu,
        "longest_prompt": spec.isl,
        "use": f"Prompts of {spec.isl} and answers of {spec.osl} tokens, {spec.concurrency} at once{drafted}; "
        f"{generated.memory.sequences} whole contexts fit each rank (an estimate).",
        "rows": [],
    }
    if spec.nodes == 1:
        del header["nodes"]
    head = "".join(f"# {key}: {_line(value)}\n" for key, value in header.items())
    sections = [
        yaml.dump({key: value}, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110)
        for key, value in generated.tree.items()
    ]
    return f"{head}\n{''.join(sections)}"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)


def _line(value: Any) -> str:
    text: str = yaml.dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text


def _slug(model: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")


def _parser() -> Parser:
    parser = Parser(
        prog="penstock recipe generate", description="TensorRT-LLM engine arguments for a model, GPUs and a load"
    )
    parser.add_argument("--model", required=True, help="directory with a config.json, or the model of a recipe")
    parser.add_argument("--gpu", required=True, choices=tuple(GPUS), help="kind of GPU")
    for flag, help_text in (
        ("--gpus", "GPUs of an aggregated engine"),
        ("--prefill-gpus", "GPUs of a prefill engine"),
        ("--decode-gpus", "GPUs of a decode engine"),
        ("--gpus-per-node", "default: 8, GB200: 4"),
    ):
        parser.add_argument(flag, type=whole_number(), default=0, metavar="N", help=help_text)
    parser.add_argument("--isl", type=whole_number(), required=True, metavar="N", help="tokens of the longest prompt")
    parser.add_argument("--osl", type=whole_number(), required=True, metavar="N", help="tokens of the longest answer")
    parser.add_argument(
        "--concurrency", type=whole_number(), required=True, metavar="N", help="concurrent requests, per engine"
    )
    parser.add_argument("--mtp", type=int, default=0, metavar="N", help="tokens drafted by the model's own MTP layer")
    parser.add_argument("--windows", action="store_true", help="keep only the tokens in the model's sliding windows")
    parser.add_argument("--transport", choices=get_args(TransceiverBackend), default="NIXL", help="KV transport")
    parser.add_argument("--set", default="", help="prefix of the file names; default: the model's name")
    parser.add_argument("--out", default="", metavar="DIR", help="write the files here instead of printing them")
    return parser
