"""Names and URLs of endpoints."""

from pathlib import Path

import pytest

from penstock.launch.state import DeploymentState, Running, write_state
from penstock.measure.sweep.endpoints import BadEndpoint, parse_endpoints


@pytest.mark.parametrize(
    ("named", "url"),
    [
        ("a=http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("a=gateway.serving.svc.cluster.local:8000/v1/", "http://gateway.serving.svc.cluster.local:8000"),
        ("a=https://api.example.com/base/v1", "https://api.example.com:443/base"),
        ("a=http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_urls_are_local_in_a_cluster_or_https(named: str, url: str) -> None:
    (endpoint,) = parse_endpoints([named])
    assert endpoint.target.url == url
    assert [(page.target.url, page.path) for page in endpoint.pages] == [(url, "/metrics")]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["http://127.0.0.1:8000"], "expected NAME=URL"),
        (["a"], "expected NAME=URL"),
        (["a="], "expected NAME=URL"),
        (["plots=http://h"], "'plots' is reserved"),
        (["../a=http://h"], "letters, digits"),
        (["a b=http://h"], "letters, digits"),
        (["a=ftp://h"], "only http and https"),
        (["a=http://h:port"], "port is not a number"),
        (["a=http://"], "names no host"),
        (["a=http://h", "a=http://i"], "named twice"),
        (["a=none/state.json"], "no deployment runs there"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_its_reason(named: list[str], said: str) -> None:
    with pytest.raises(BadEndpoint, match=said):
        parse_endpoints(named)


def test_a_state_file_names_the_gateway_and_the_metrics_of_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    processes = (Running("w", "worker", 1, "http://127.0.0.1:9/metrics"), Running("g", "gateway", 2))
    write_state(path, DeploymentState("http://h:8001", "n", "c", "s", "ps", "m", processes))
    one, two = parse_endpoints([f"a={path}", "b=h"], ["b=http://dcgm:9400"], [4, 2])
    assert [(page.target.port, page.path) for page in one.pages] == [(8001, "/metrics"), (9, "/metrics")]
    assert [(page.target.host, page.path) for page in two.pages] == [("h", "/metrics"), ("dcgm", "/metrics")]
    assert (one.gpus, two.gpus) == (4, 2)


@pytest.mark.parametrize(("metrics", "gpus"), [(["c=http://h"], []), ([], [1, 2, 3])])
def test_metrics_and_gpus_belong_to_named_endpoints(metrics: list[str], gpus: list[int]) -> None:
    with pytest.raises(BadEndpoint):
        parse_endpoints(["a=h", "b=h"], metrics, gpus)
