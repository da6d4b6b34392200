"""``penstock kubernetes render``, the shell around ``render``, and ``penstock kubernetes chart``."""

import argparse
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec
import yaml

from penstock.cli.terminal import fail, reason
from penstock.configs.flags import Parser
from penstock.deploy.values import Engine, Role
from penstock.infra.engine_args.tree import BadArguments, parse_yaml
from penstock.launch.groups import EXTERNAL, gpus_of
from penstock.launch.nats import CLIENTS_PORT
from penstock.launch.recipes import catalogue
from penstock.launch.recipes.catalogue import BLOCK_SIZE, RecipeEntry

Tree = dict[str, Any]
CHART = Path(__file__).parents[1] / "infra" / "deploy" / "helm" / "penstock"
NATS_CHARTS = "https://nats-io.github.io/k8s/helm/charts/"
USERS = ("gateway", "router", "worker", "operator", "sys")  # as which pods of a default installation log in
LWS = "https://lws.sigs.k8s.io/docs/installation/"


class KubernetesSpec(NamedTuple):
    """What is deployed.

    Attributes:
        counts: engines by role; roles of the recipe that are not in it have one.
        engine: "": the recipe's, or native.
        model: "": the recipe's, or the demo model.
        image, native_image: of gateways, routers and mock workers, of native workers; "": the chart's.
        nats_url: of a NATS of one's own, without credentials.
        hub_secret, urls_secret, creds_secret, ca_secret: names of Secrets; see ``hub`` and ``broker`` among the values.
    """

    release: str = "penstock"
    counts: Mapping[str, int] = {}
    engine: Engine | None = None
    model: str = ""
    served_model_name: str = ""
    image: str = ""
    native_image: str = ""
    engine_image: str = ""
    hub_secret: str = ""
    urls_secret: str = ""
    nats_url: str = ""
    creds_secret: str = ""
    ca_secret: str = ""


def values_of(wanted: KubernetesSpec, members: Mapping[str, RecipeEntry] = {}, texts: Mapping[str, str] = {}) -> Tree:
    """The values that differ from the chart's.

    Args:
        members: the recipe's files by role.
        texts: what is in them, by role.
    Raises:
        BadArguments: what is wanted contradicts itself or the recipe.
    """
    header = next(iter(members.values())).header if members else None
    engine = wanted.engine or (header.engine if header else "native")
    if header is not None and engine != header.engine:
        raise BadArguments([f"--engine {engine}: the recipe is for {header.engine}; leave it out"])
    if engine in EXTERNAL and not wanted.engine_image:
        raise BadArguments([f"--engine-image: name the image with penstock and {engine}; see docs/containers.md"])
    model = wanted.model or (header.model if header else "")
    if engine in EXTERNAL and not model:
        raise BadArguments(["--model: name a directory on the models volume (/models/...) or a Hugging Face id"])
    counts = _counts(wanted.counts, members)
    top = {
        "image": wanted.image,
        "nativeImage": wanted.native_image,
        "engineImage": wanted.engine_image,
        "model": model,
    }
    top |= {"servedModelName": wanted.served_model_name}
    values: Tree = {key: value for key, value in top.items() if value}
    sizes = {member.block_size for role, member in members.items() if counts.get(role)} or {BLOCK_SIZE}
    if len(sizes) > 1:
        raise BadArguments([f"the recipe has blocks of {sorted(sizes)} tokens; handoff and routing need one size"])
    values["blockSize"] = sizes.pop()
    if wanted.hub_secret:
        values["hub"] = {"existingSecret": wanted.hub_secret}
    if broker := _broker(wanted):
        values |= {"nats": {"enabled": False}, "broker": broker}
    if not model:
        values["models"] = {"enabled": False}
    values["workers"] = {
        role: {"engine": engine, "replicas": count} | _pool(engine, members.get(role), texts.get(role, ""))
        for role, count in counts.items()
        if count
    }
    return values


def _broker(wanted: KubernetesSpec) -> Tree:
    """Of a NATS of one's own; empty: that of the chart."""
    if wanted.urls_secret and (wanted.nats_url or wanted.creds_secret):
        raise BadArguments(["--urls-secret has URLs with credentials; leave --nats-url and --creds-secret out"])
    if bool(wanted.nats_url) != bool(wanted.creds_secret):
        raise BadArguments(["--nats-url and --creds-secret are needed together, or --urls-secret instead of both"])
    if wanted.ca_secret and not (wanted.urls_secret or wanted.nats_url):
        own = "name the Secret with its URLs (--urls-secret), or --nats-url and --creds-secret"
        raise BadArguments([f"--ca-secret: for a NATS of your own; {own}"])
    plain = next((url for url in wanted.nats_url.split(",") if url and not url.strip().startswith("tls://")), "")
    if wanted.ca_secret and plain:
        raise BadArguments([f"--ca-secret: it is for TLS, and --nats-url has {plain}; write tls://"])
    broker: Tree = {}
    if wanted.urls_secret:
        broker["urlsSecret"] = wanted.urls_secret
    if wanted.nats_url:
        broker |= {"url": wanted.nats_url, "credsSecret": wanted.creds_secret}
        if (ports := _ports(wanted.nats_url)) != [CLIENTS_PORT]:
            broker["ports"] = ports
    if wanted.ca_secret:
        broker["caSecret"] = wanted.ca_secret
    return broker


def _ports(urls: str) -> list[int]:
    found = set()
    for url in urls.split(","):
        try:
            parts = urlsplit(url)
            found.add(parts.port or CLIENTS_PORT)
        except ValueError as error:
            raise BadArguments([f"--nats-url: {url}: {error}"]) from None
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise BadArguments([f"--nats-url: {url}: write nats://HOST:PORT or tls://HOST:PORT"])
        if "@" in url:
            raise BadArguments(["--nats-url: without credentials; they are in the Secret of --creds-secret"])
    return sorted(found)


def _counts(given: Mapping[str, int], members: Mapping[str, RecipeEntry]) -> dict[str, int]:
    """Engines by role. A recipe that offers both ways is split into prefill and decode unless roles are named."""
    for role in given:
        if members and given[role] and role not in members:
            raise BadArguments([f"--{role}: the recipe has no engine arguments for it, only {', '.join(members)}"])
    if any(given.values()):
        return dict(given)
    roles = dict.fromkeys(members or ("aggregated",), 1)
    if {"prefill", "decode"} <= roles.keys():
        roles.pop("aggregated", None)
    return {**roles}


def _pool(engine: str, member: RecipeEntry | None, text: str) -> Tree:
    if member is None:
        return {}
    nodes = member.header.nodes
    total = gpus_of(engine, parse_yaml(text))
    pool: Tree = {"gpus": -(-total // nodes)}
    if pool["gpus"] * nodes != total:
        raise BadArguments([f"{member.name}: {total} GPUs cannot be shared evenly by {nodes} nodes"])
    if nodes > 1:
        pool["nodes"] = nodes
    if member.max_len:
        pool["settings"] = {"max-model-len": member.max_len}
    return pool | {"engineArgs": text}


def to_yaml(wanted: KubernetesSpec, values: Tree) -> str:
    """The values as a file, below the commands that use it."""
    body = yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000)
    comments = "".join(f"#   {line}\n" for line in helm_commands(wanted, values))
    return f"# Values for the Helm chart of Penstock. Save them as values.yaml, and then:\n{comments}{body}"


def helm_commands(wanted: KubernetesSpec, values: Tree, file: str = "values.yaml") -> list[str]:
    """The command lines from the values to a deployment.

    Args:
        file: of the values, as a word of the shell.
    """
    release, at = shlex.quote(wanted.release), "./penstock-chart"
    lines = []
    if wanted.hub_secret:
        lines.append(f"kubectl create secret generic {shlex.quote(wanted.hub_secret)} --from-literal=token=$HF_TOKEN")
    if wanted.urls_secret:
        urls = " ".join(f"--from-literal={user}=$URL_OF_{user.upper()}" for user in USERS)
        lines.append("# sys: of the system account; without one there, leave it out")
        lines.append(f"kubectl create secret generic {shlex.quote(wanted.urls_secret)} {urls}")
    if wanted.creds_secret:
        files = " ".join(f"--from-file={user}=./{user}.creds" for user in USERS)
        lines.append("# sys: of the system account; without one there, leave it out and set broker.systemUser: false")
        lines.append(f"kubectl create secret generic {shlex.quote(wanted.creds_secret)} {files}")
    if wanted.ca_secret:
        lines.append(f"kubectl create secret generic {shlex.quote(wanted.ca_secret)} --from-file=ca.crt=./ca.crt")
    spread = [pool["engine"] for pool in values["workers"].values() if pool.get("nodes", 1) > 1]
    if spread:
        lines.append(f"# needs LeaderWorkerSet: {LWS}")
    if "trtllm" in spread:
        lines.append("ssh-keygen -q -t ed25519 -N '' -f ./penstock-ssh")
        lines.append(
            f"kubectl create secret generic {release}-ssh --from-file=ssh-privatekey=./penstock-ssh "
            "--from-file=ssh-publickey=./penstock-ssh.pub"
        )
    if not values.get("nats", {}).get("enabled", True):
        lines.append(f"penstock kubernetes chart {at} --no-nats")
    else:
        lines.append(f"penstock kubernetes chart {at}")
        lines.append(f"helm repo add nats {NATS_CHARTS}")
        lines.append(f"helm dependency build {at}  # fetches the NATS chart, once")
    lines.append(f"helm template {release} {at} -f {file}  # to look at the manifests")
    lines.append(f"helm upgrade --install {release} {at} -f {file}")
    return lines


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines as they are: people read and edit this."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, data: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _text)


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
    wanted = KubernetesSpec(
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
        nats_url=args.nats_url,
        creds_secret=args.creds_secret,
        ca_secret=args.ca_secret,
    )
    try:
        print(rendered(args.recipe, wanted), end="")
    except (BadArguments, OSError, UnicodeDecodeError) as error:
        problems = error.problems if isinstance(error, BadArguments) else (reason(error),)
        return fail("kubernetes render", *problems, status=REFUSED)
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
        return fail("kubernetes chart", f"{args.folder}: {reason(error)}", status=REFUSED)
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


def rendered(recipe: str, wanted: KubernetesSpec) -> str:
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
    about_url = "or its URLs without credentials, comma-separated; --creds-secret has those"
    parser.add_argument("--nats-url", default="", metavar="URL", help=about_url)
    about_creds = "Secret with a credentials file (JWT and seed) for each user"
    parser.add_argument("--creds-secret", default="", metavar="SECRET", help=about_creds)
    about_ca = "Secret whose ca.crt signs the certificates of that NATS (default: the system's authorities)"
    parser.add_argument("--ca-secret", default="", metavar="SECRET", help=about_ca)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
