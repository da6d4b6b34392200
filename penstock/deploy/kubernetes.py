"""``penstock kubernetes render``, the shell around ``render``, and ``penstock kubernetes chart``."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import yaml

from penstock.cli.terminal import reason
from penstock.configs.flags import Parser
from penstock.deploy.chart import CHART
from penstock.deploy.render import Wanted, to_yaml, values_of
from penstock.deploy.values import Engine, Role
from penstock.infra.engine_args.tree import BadArguments
from penstock.launch.recipes import catalogue
from penstock.launch.recipes.catalogue import RecipeEntry

OK, REFUSED = 0, 1
CHART_ABOUT = (
    "write the Helm chart to a folder, to install it from there. --no-nats leaves NATS out, for one of your own: helm "
    "then asks for no other chart"
)
ABOUT = "values for the Helm chart, printed, with the helm commands that use them"


def run_render(argv: Sequence[str]) -> int:
    """Print the values for a recipe, or for an engine and a model."""
    parser = Parser(prog="penstock kubernetes render", description=ABOUT)
    _add_arguments(parser)
    args = parser.parse_args(argv)
    counts = {role: getattr(args, role) for role in get_args(Role) if getattr(args, role, None)}
    wanted = Wanted(
        release=args.release,
        counts=counts,
        engine=msgspec.convert(args.engine, Engine) if args.engine else None,
        model=args.model,
        served_model_name=args.served_model_name,
        image=args.image,
        native_image=args.native_image,
        engine_image=args.engine_image,
        hub_secret=args.hub_secret,
        urls_secret=args.urls_secret,
        ca_secret=args.ca_secret,
    )
    try:
        print(rendered(args.recipe, wanted), end="")
    except (BadArguments, OSError, UnicodeDecodeError) as error:
        for problem in error.problems if isinstance(error, BadArguments) else (reason(error),):
            print(f"penstock kubernetes render: {problem}", file=sys.stderr)
        return REFUSED
    return OK


def run_chart(argv: Sequence[str]) -> int:
    """Copy the chart."""
    parser = Parser(prog="penstock kubernetes chart", description=CHART_ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new folder")
    about_nats = "with the NATS chart as a dependency (default: yes)"
    parser.add_argument("--nats", action=argparse.BooleanOptionalAction, default=True, help=about_nats)
    args = parser.parse_args(argv)
    try:
        copy_chart(args.folder, nats=args.nats)
    except OSError as error:
        print(f"penstock kubernetes chart: {args.folder}: {reason(error)}", file=sys.stderr)
        return REFUSED
    print(f"wrote {args.folder}")
    return OK


def copy_chart(folder: Path, *, nats: bool) -> None:
    """
    Args:
        nats: False: without the dependency, which helm demands even where ``nats.enabled`` is false.
    Raises:
        OSError: the folder exists or cannot be written.
    """
    shutil.copytree(CHART, folder, ignore=shutil.ignore_patterns("charts", "__pycache__"))
    if nats:
        return
    (folder / "Chart.lock").unlink()
    about = yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8"))
    del about["dependencies"]
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about, sort_keys=False), encoding="utf-8")
    values = (folder / "values.yaml").read_text(encoding="utf-8")
    ours, _, _ = values.partition("# Values of the NATS chart")
    (folder / "values.yaml").write_text(f"{ours}nats: {{enabled: false}}\n", encoding="utf-8")


def rendered(recipe: str, wanted: Wanted) -> str:
    """The text of the values, with the recipe's files read.

    Raises:
        BadArguments: there is no such recipe, or it does not fit what is wanted.
    """
    own = Path(recipe)
    if recipe and own.is_dir():
        chosen = [catalogue.entry_at(path) for path in sorted(own.glob("*.yaml"))]
    elif recipe and own.is_file():
        chosen = [catalogue.entry_at(own)]
    else:
        chosen = catalogue.select(recipe, catalogue.members()) if recipe else []
    members: dict[str, RecipeEntry] = {member.header.role: member for member in chosen}
    texts = {role: Path(member.path).read_text(encoding="utf-8") for role, member in members.items()}
    return to_yaml(wanted, values_of(wanted, members, texts))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        default="",
        help="recipe or set of `penstock recipe list`, or a file or folder of your own (default: none)",
    )
    parser.add_argument("--release", default="penstock", help="name of the release (default: %(default)s)")
    for role in get_args(Role)[:4]:
        parser.add_argument(f"--{role}", type=_count, metavar="N", help=f"engines of the role {role}")
    parser.add_argument("--engine", choices=get_args(Engine), help="default: the recipe's, else native")
    parser.add_argument(
        "--model", default="", help="directory on the models volume or Hugging Face id (default: the recipe's)"
    )
    parser.add_argument("--served-model-name", default="", metavar="NAME", help="name that clients use")
    parser.add_argument("--image", default="", help="of gateways, routers and mock workers; see docs/containers.md")
    parser.add_argument("--native-image", default="", metavar="IMAGE", help="of native workers")
    parser.add_argument("--engine-image", default="", metavar="IMAGE", help="of workers with trtllm, vllm or sglang")
    parser.add_argument("--hub-secret", default="", metavar="SECRET", help="Secret with a Hugging Face token")
    parser.add_argument(
        "--urls-secret", default="", metavar="SECRET", help="Secret with the URLs of a NATS of your own (default: none)"
    )
    about_ca = "Secret whose ca.crt signs the certificates of that NATS (default: the system's authorities)"
    parser.add_argument("--ca-secret", default="", metavar="SECRET", help=about_ca)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
