"""``penstock monitoring``: write files for Prometheus and Grafana to watch a deployment."""

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import msgspec
import yaml

from penstock.cli.terminal import fail, reason
from penstock.configs.flags import Parser
from penstock.deploy.values import Thresholds
from penstock.infra.metrics.scope import FIRST_TOKEN_SECONDS
from penstock.launch.plan import number_of
from penstock.launch.state import DeploymentState, read_state
from penstock.schemas.streams import LONGEST_DEADLINE_S

FOLDER = Path(__file__).parents[1] / "infra" / "deploy" / "monitoring"
GRAFANA = FOLDER / "grafana"
ALERTS = FOLDER / "alerts.yml"  # with the default thresholds
ALERTS_TEMPLATE = FOLDER / "alerts.template.yml"
OK, REFUSED = 0, 1
SCRAPE = "5s"
LATE = [bound for bound in FIRST_TOKEN_SECONDS if bound < LONGEST_DEADLINE_S]  # thresholds of late first tokens


def run(argv: Sequence[str]) -> int:
    """Write the files; returns the exit status."""
    parser = Parser(prog="penstock monitoring", description=__doc__.partition(": ")[2] if __doc__ else None)
    _add_arguments(parser)
    args = parser.parse_args(argv)
    folder = Path(args.out)
    if problem := wrong_url(args.prometheus):
        return fail("monitoring", f"--prometheus {args.prometheus}: {problem}", status=REFUSED)
    try:
        thresholds = thresholds_of(args)
    except ValueError as error:
        return fail("monitoring", str(error), status=REFUSED)
    try:
        targets = targets_of(read_state(Path(args.state))) if args.state else None
    except FileNotFoundError:
        fix = "start a deployment with penstock up, name the --state of one, or give --state '' and list the processes"
        return fail("monitoring", f"{args.state}: no such file; {fix}", status=REFUSED)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        return fail("monitoring", f"--state {args.state}: {reason(error)}", status=REFUSED)
    try:
        write(folder, targets, args.prometheus, thresholds)
    except OSError as error:
        return fail("monitoring", f"--out {folder}: {reason(error)}", status=REFUSED)
    if targets is None:
        print(f"list the processes in {folder / 'targets.json'}, which is left as it is")
    else:
        print(f"{sum(len(group['targets']) for group in targets)} targets in {folder / 'targets.json'}")
    print(f"prometheus --config.file {folder / 'prometheus.yml'} --storage.tsdb.path {folder / 'data'}")
    print(f"grafana: mount {folder / 'grafana'} at /etc/grafana/provisioning")
    return OK


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state", default=".penstock/state.json", help="of the deployment (default: %(default)s); '': none"
    )
    parser.add_argument("--out", default="monitoring", help="folder for the files (default: %(default)s)")
    parser.add_argument(
        "--prometheus", default="http://127.0.0.1:9090", help="where Grafana finds Prometheus (default: %(default)s)"
    )
    alerts = parser.add_argument_group("thresholds of the alerts")
    hints = get_type_hints(Thresholds, include_extras=True)
    for field in msgspec.structs.fields(Thresholds):
        metas = hints[field.name].__metadata__
        help = next(meta.description for meta in reversed(metas) if meta.description)
        kind = type(field.default)
        shown = f"(default: {field.default:{'' if kind is str else 'g'}})"
        alerts.add_argument(
            flag(field.name), type=kind, default=field.default, metavar="X", help=f"{help} {shown}".replace("%", "%%")
        )


def wrong_url(url: str) -> str:
    """What is wrong with a URL that Grafana is to read from; "": nothing."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        return f"{error}; give a URL such as http://127.0.0.1:9090"
    usable = usable and not any(each.isspace() for each in url)
    return "" if usable else "give a URL such as http://127.0.0.1:9090"


def targets_of(state: DeploymentState) -> list[dict[str, Any]]:
    """Scrape targets, in the format of Prometheus' file discovery. Restarts of processes do not change them.

    Gateways that may leave have a label, so that their end causes no alert.
    """
    urls = {process.name: process.metrics_url for process in state.processes if process.metrics_url}
    roles = {process.name: process.role for process in state.processes}
    urls |= state.gateway_urls
    by_number = sorted(state.gateway_urls, key=number_of)
    optional = by_number[state.gateways.fewest or len(by_number) :]
    return [
        {
            "targets": [urlsplit(url).netloc],
            "labels": {"process": name, "component": roles[name]} | ({"optional": "true"} if name in optional else {}),
        }
        for name, url in sorted(urls.items())
    ]


def thresholds_of(args: argparse.Namespace) -> Thresholds:
    """
    Raises:
        ValueError: a threshold that no rule could use.
    """
    given = {field.encode_name: getattr(args, field.name) for field in msgspec.structs.fields(Thresholds)}
    try:
        made = msgspec.convert(given, Thresholds)
    except msgspec.ValidationError as error:
        raise ValueError(re.sub(r"`\$\.(\w+)`", lambda match: flag(match[1]), str(error))) from None
    if made.late not in LATE:
        raise ValueError(
            f"--late {made.late:g}: choose a bucket of the histogram: {', '.join(map('{:g}'.format, LATE))}"
        )
    for name in ("failed_budget", "late_budget"):
        budget, most = getattr(made, name), 1 / max(made.burn_fast, made.burn_slow)
        if budget >= most:
            raise ValueError(f"{flag(name)} {budget:g}: its burn alerts could never fire; choose less than {most:.3g}")
    return made


def flag(name: str) -> str:
    """Of a threshold."""
    return "--" + re.sub("(?<=[a-z])(?=[A-Z])", "-", name).lower().replace("_", "-")


VOLUMES = 'persistentvolumeclaim=~".*-nats-js-.*"'


def alert_rules(thresholds: Thresholds) -> str:
    """The alert rules with these thresholds."""
    _, groups, rules = ALERTS_TEMPLATE.read_text(encoding="utf-8").partition("groups:")
    # On hosts, a Prometheus scrapes one deployment.
    text = (groups + rules).replace("{${own}}", "").replace("${own},", "").replace("${volume}", VOLUMES)
    for name, value in msgspec.to_builtins(thresholds).items():
        text = text.replace(f"${{{name}}}", value if isinstance(value, str) else f"{value:g}")
    return f"# Made by penstock monitoring. Check it: promtool check rules alerts.yml\n{text}"


def write(folder: Path, targets: Sequence[Mapping[str, Any]] | None, prometheus: str, thresholds: Thresholds) -> None:
    """Write all files; those that exist are replaced, but for ``targets.json`` where ``targets`` is None.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if targets is not None or not (folder / "targets.json").exists():
        (folder / "targets.json").write_bytes(msgspec.json.format(msgspec.json.encode(targets or []), indent=2) + b"\n")
    (folder / "alerts.yml").write_text(alert_rules(thresholds), encoding="utf-8")
    _write_yaml(folder / "prometheus.yml", scrape_config())
    dashboards = folder / "grafana" / "dashboards"
    dashboards.mkdir(parents=True, exist_ok=True)
    for file in GRAFANA.glob("*.json"):
        shutil.copyfile(file, dashboards / file.name)
    _write_yaml(folder / "grafana" / "datasources" / "penstock.yaml", datasource(prometheus))
    _write_yaml(dashboards / "penstock.yaml", provider())


def datasource(prometheus: str) -> dict[str, Any]:
    """Grafana's provisioning of a Prometheus at this URL."""
    source = {"name": "Prometheus", "type": "prometheus", "url": prometheus, "access": "proxy", "isDefault": True}
    return {"apiVersion": 1, "datasources": [source]}


def provider(path: str = "/etc/grafana/provisioning/dashboards") -> dict[str, Any]:
    """Grafana's provisioning of the dashboards in a folder."""
    one = {"name": "penstock", "folder": "Penstock", "type": "file", "options": {"path": path}}
    return {"apiVersion": 1, "providers": [one]}


def scrape_config(discovery: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Prometheus's configuration. ``honor_labels``: each process names itself.

    Args:
        discovery: where the targets are found; by default in ``targets.json``.
    """
    found = discovery or {"file_sd_configs": [{"files": ["targets.json"]}]}
    return {
        "global": {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [{"job_name": "penstock", "honor_labels": True, **found}],
    }


def _write_yaml(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
