"""``penstock health``: exit status and words for a process that is well, that is not, and that is not there."""

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from penstock.operate.health import problem_at, run, url_of
from tests.pipeline.support import free_port


def listed(asked: int) -> bytes:
    """A gateway's page; its second worker is ready from the third request on."""
    workers = [{"name": f"worker-{index}", "role": "aggregated", "ready": index == 0 or asked > 2} for index in (0, 1)]
    return json.dumps({"components": [{"name": "routers", "ready": True}, *workers]}).encode()


class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = {
            "/health/live": (200, b"{}"),
            "/metrics": (200, b"# a page"),
            "/health": (200, listed(self.server.asked)),  # type: ignore[attr-defined]
            "/health/ready": (503, b'{"status": "not ready", "reasons": ["no worker of the model takes jobs"]}'),
        }
        self.server.asked += 1  # type: ignore[attr-defined]
        status, body = found.get(self.path, (404, b""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.asked = 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("role", "variable"), [
    ("gateway", "PENSTOCK_HTTP_PORT"), ("router", "PENSTOCK_METRICS_PORT"), ("worker", "PENSTOCK_METRICS_PORT"),
])  # fmt: skip
def test_a_role_is_asked_at_the_port_it_was_started_with(
    role: str, variable: str, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, str(port))
    assert run([role]) == 0
    assert capsys.readouterr().out == f"{role}: healthy\n"
    monkeypatch.setenv(variable, str(free_port()))
    assert run([role]) == 1
    assert f"{role}: no answer from 127.0.0.1:" in capsys.readouterr().err


def test_a_gateway_that_is_not_ready_says_why(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", str(port))
    assert run(["gateway", "--ready"]) == 1
    assert capsys.readouterr().err == "gateway: status 503: no worker of the model takes jobs\n"


def test_the_ports_are_those_of_the_images_unless_variables_say_others() -> None:
    assert url_of("gateway", {}) == "http://127.0.0.1:8000/health/live"
    assert url_of("gateway", {"PENSTOCK_HTTP_PORT": "8001"}, ready=True) == "http://127.0.0.1:8001/health/ready"
    assert url_of("worker", {}, ready=True) == "http://127.0.0.1:9090/metrics"
    assert url_of("gateway", {"PENSTOCK_HTTP_PORT": "tcp://10.0.0.7:80"}) == url_of("gateway", {}), "of a Service"


def test_another_url_may_be_asked(port: int) -> None:
    assert problem_at(f"http://127.0.0.1:{port}/metrics", 5) == ""
    assert problem_at(f"http://127.0.0.1:{port}/none", 5) == "status 404"
    assert problem_at("ftp://host/x", 5) == "ftp://host/x is not an http URL"


def test_one_waits_until_enough_workers_are_ready(
    port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", str(port))
    monkeypatch.setattr("penstock.operate.health.POLL_S", 0.001)
    assert run(["gateway", "--workers", "2"]) == 1
    assert capsys.readouterr().err == "gateway: 1 of 2 workers are ready\n"
    assert run(["gateway", "--workers", "2", "--wait-s", "30"]) == 0
    assert run(["gateway", "--workers", "1", "--url", f"http://127.0.0.1:{port}/metrics"]) == 1
    assert "lists no components" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("0.0.0.0", "127.0.0.1:7"),
        ("::", "127.0.0.1:7"),
        ("127.0.0.5", "127.0.0.5:7"),
        ("::1", "[::1]:7"),
        ("10.1.2.3", "10.1.2.3:7"),
    ],
)
def test_a_role_is_asked_at_the_address_it_was_started_with(host: str, place: str) -> None:
    assert url_of("gateway", {"PENSTOCK_HTTP_HOST": host, "PENSTOCK_HTTP_PORT": "7"}) == f"http://{place}/health/live"
    for role in ("router", "worker"):
        environ = {"PENSTOCK_METRICS_HOST": host, "PENSTOCK_METRICS_PORT": "7", "PENSTOCK_HTTP_HOST": "10.9.9.9"}
        assert url_of(role, environ) == f"http://{place}/metrics"


def test_a_password_in_the_url_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for scheme in ("http", "ftp"):
        assert run(["gateway", "--url", f"{scheme}://user:s3cret@127.0.0.1:{free_port()}/health"]) == 1
        error = capsys.readouterr().err
        assert "127.0.0.1" in error
        assert "s3cret" not in error
