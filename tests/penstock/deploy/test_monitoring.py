"""Dashboards and alert rules ask for series that exist. A real Prometheus is in
tests/pipeline/pairs/test_prometheus.py.
"""

import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
import yaml

from penstock.deploy.monitoring import ALERTS, LATE, run, targets_of, wrong_url
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.infra.metrics.scope import MetricScope
from penstock.launch.state import DeploymentState, GatewayState, Running
from tests.generated import dashboards
from tests.generated.dashboards import DASHBOARDS
from tests.generated.metrics import scopes
from tests.generated.panels import Panel
from tests.perf import pictures
from tests.pipeline.support import ROOT

NAME = re.compile(r"\b(?:penstock|process|user)_[a-z_]+\b")
PANELS = [pytest.param(panel, id=f"{board.name}: {panel.title}") for board in DASHBOARDS for panel in board.panels]
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]


def known() -> set[str]:
    """Names of all series of our processes."""
    names: set[str] = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
    names |= {f"penstock_broker_stream_{what}" for what in ("bytes", "max_bytes", "messages", "consumers")}
    names |= {f"penstock_worker_gpu_{what}" for what in ("memory_used_bytes", "memory_bytes", "utilization_ratio")}
    for scope in scopes().values():
        for metric in scope.metrics():
            family = next(iter(metric.collect()))
            ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            names |= {f"{family.name}{end}" for end in ends}
    return names


def asked(expr: str) -> set[str]:
    names = set(NAME.findall(re.sub(r"\{[^}]*\}|\"[^\"]*\"", "", expr)))
    return {name for name in names if name.startswith(("penstock_", "process_"))}


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_series_that_our_processes_have(panel: Panel) -> None:
    for query in panel.queries:
        assert asked(query.expr) or panel.needs, query.expr
        assert asked(query.expr) <= known()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_series_that_exist_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert asked(rule["expr"]) <= known()
    assert set(rule["annotations"]) == {"summary", "action"}
    assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_tells_releases_apart_that_share_a_namespace_of_subjects_and_a_model(rule: dict[str, Any]) -> None:
    for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
        labels = {label.strip() for label in grouping.split(",")}
        assert {"kubernetes_namespace", "release", "namespace"} <= labels, grouping


def test_the_dashboards_files_are_current() -> None:
    for path, text in dashboards.files().items():
        assert path.read_text() == text, "run python -m tests.generated"


def test_every_process_of_a_deployment_is_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processes = (
        Running("nats", "nats", 1),
        Running("gateway-0", "gateway", 2),
        Running("gateway-1", "gateway", 3),
        Running("worker-0", "worker", 4, "http://127.0.0.1:9100/metrics"),
    )
    urls = ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
    state = DeploymentState("http://127.0.0.1:8000", "", "", "", "ps", "demo", processes, urls)
    found = {group["labels"]["process"]: group["targets"] for group in targets_of(state)}
    assert found == {"gateway-0": ["127.0.0.1:8001"], "gateway-1": ["127.0.0.1:8002"], "worker-0": ["127.0.0.1:9100"]}
    file = tmp_path / "state.json"
    file.write_bytes(msgspec.json.encode(state))
    assert run(["--state", str(file), "--out", str(tmp_path / "out")]) == 0
    assert "3 targets in" in capsys.readouterr().out
    assert len(list((tmp_path / "out" / "grafana" / "dashboards").glob("*.json"))) == len(DASHBOARDS)
    assert run(["--state", str(tmp_path / "none.json"), "--out", str(tmp_path / "out")]) == 1
    assert "no such file; start a deployment" in capsys.readouterr().err
    assert run(["--state", str(file), "--out", str(file / "in-a-file")]) == 1
    assert f"--out {file}/in-a-file: Not a directory" in capsys.readouterr().err
    file.write_text("no JSON")
    assert run(["--state", str(file)]) == 1
    assert f"--state {file}: JSON is malformed" in capsys.readouterr().err


def test_without_a_state_the_targets_are_left_to_whoever_lists_them(tmp_path: Path) -> None:
    assert run(["--state", "", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "targets.json").read_text()) == []
    (tmp_path / "targets.json").write_text("[1]")
    assert run(["--state", "", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "targets.json").read_text() == "[1]"
    assert (tmp_path / "alerts.yml").exists()


@pytest.mark.parametrize("url", ["foo", "ftp://h:9090", "http://", "http://h:99999", "http://h h:1", ""])
def test_an_address_that_grafana_could_not_read_is_refused(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--prometheus", url, "--out", str(tmp_path / "out")]) == 1
    assert f"--prometheus {url}: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert wrong_url("https://prometheus.example.com:9090/path") == ""


def test_thresholds_of_the_alerts_are_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state.json"
    state.write_bytes(msgspec.json.encode(DeploymentState("http://127.0.0.1:8000", "", "", "", "ps", "demo", ())))
    out = ["--state", str(state), "--out", str(tmp_path / "out")]
    given = ("--ttft", "2", "--itl", "0.1", "--late", "1.5", "--late-budget", "0.02", "--burn-fast", "10")
    assert run([*out, *given, "--broker-mount", "/data"]) == 0
    rules = {
        rule["alert"]: " ".join(rule["expr"].split())
        for rule in yaml.safe_load((tmp_path / "out" / "alerts.yml").read_text())["groups"][0]["rules"]
    }
    assert rules["PenstockFirstTokenLate"].endswith("[5m]))) > 2")
    assert rules["PenstockTokensSlow"].endswith("> 0.1")
    late = rules["PenstockLateBurnFast"]
    assert late.count('le=~"1.5(\\\\.0)?"') == late.count("> 10 * 0.02") == 2
    assert "[1h]" in late.partition(" and ")[0]
    assert "[5m]" in late.partition(" and ")[2]
    assert 'mountpoint=~"/data"' in rules["PenstockBrokerDiskFilling"]
    assert not any("${" in expr for expr in rules.values())
    for flags, says in (
        (["--late", "4"], "--late 4: choose a bucket of the histogram: 0.002, "),
        (["--late-budget", "0.2"], "--late-budget 0.2: its burn alerts could never fire; choose less than 0.0694"),
        (["--failed", "1.5"], "--failed"),
        (["--burn-slow", "0"], "--burn-slow"),
    ):
        assert run([*out, *flags]) == 1
        assert says in capsys.readouterr().err


def test_the_hosts_of_the_page_have_the_alert_of_their_brokers_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their store is in a folder of the root file system; an own one is the default."""
    page = (ROOT / "docs/several-machines.md").read_text()
    (command,) = re.findall(r"^penstock monitoring (.*)$", page, re.M)
    monkeypatch.chdir(tmp_path)
    for flags, mount in ((shlex.split(command), "/"), (["--state", ""], "/var/lib/nats")):
        assert run(flags) == 0
        groups = yaml.safe_load((tmp_path / "monitoring/alerts.yml").read_text())["groups"]
        rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
        for name in ("PenstockBrokerDiskFilling", "PenstockBrokerDiskAlmostFull"):
            (pattern,) = re.findall(r'mountpoint=~"([^"]+)"', rules[name])
            assert re.fullmatch(pattern, mount)
    (written,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    assert yaml.safe_load(written)["rule_files"] == ["alerts.yml"]
    nodes = next(job for job in yaml.safe_load(written)["scrape_configs"] if job["job_name"] == "node")
    assert len(nodes["static_configs"][0]["targets"]) == 3


def test_late_first_tokens_are_counted_by_a_bucket_that_gateways_have() -> None:
    scope = MetricScope()
    GatewayMetrics(scope.child("gateway")).of("m").ttft.observe(2.5)
    (family,) = [each for each in scope.registry.collect() if each.name == "penstock_gateway_ttft_seconds"]
    bounds = {sample.labels["le"] for sample in family.samples if "le" in sample.labels}
    for late in LATE:
        assert [bound for bound in bounds if re.fullmatch(rf"{late:g}(\.0)?", bound)]


def test_promtool_accepts_the_files(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    for arguments in (["check", "rules", str(ALERTS)], ["test", "rules", str(ALERTS.with_name("alerts_test.yml"))]):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_dashboards_are_drawn_without_grafana_from_what_prometheus_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One query of the handoff dashboard has data; its variables are filled in as Grafana does."""
    pytest.importorskip("matplotlib")
    asked: list[str] = []

    def answer(url: str, timeout: float) -> io.BytesIO:
        query = parse_qs(urlsplit(url).query)
        asked.append(query["query"][0])
        values = [[float(query["start"][0]) + step, str(step)] for step in (0, 60)]
        found = [{"metric": {"role": "decode"}, "values": values}] if len(asked) == 1 else []
        return io.BytesIO(json.dumps({"data": {"result": found}}).encode())

    monkeypatch.setattr("urllib.request.urlopen", answer)
    assert pictures.run(["--out", str(tmp_path), "handoff"]) == 0
    assert (tmp_path / "dashboard-handoff.png").read_bytes().startswith(b"\x89PNG")
    assert "1 of 7 panels have data" in capsys.readouterr().out
    assert not any("$" in query for query in asked)
    assert pictures.named("{{role}} P95", {"role": "decode"}) == "decode P95"


def test_nobody_is_alerted_of_a_gateway_that_may_leave() -> None:
    names = [f"gateway-{number}" for number in (0, 2, 10, 1)]
    state = DeploymentState(
        "http://h:1", "nats://h:2", "", "", "ps", "tiny", tuple(Running(name, "gateway", 1) for name in names),
        http_urls=("http://h:10", "http://h:12", "http://h:20", "http://h:11"), gateways=GatewayState(2, 12),
    )  # fmt: skip
    labels = [group["labels"] for group in targets_of(state)]
    assert [each["process"] for each in labels if each.get("optional")] == ["gateway-10", "gateway-2"]
    fixed = msgspec.structs.replace(state, gateways=GatewayState())  # as an earlier release has it
    assert not any("optional" in group["labels"] for group in targets_of(fixed))
