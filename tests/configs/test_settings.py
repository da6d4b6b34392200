"""What settings say together."""

import socket

import pytest

from penstock.configs.settings import RouterSettings, WorkerSettings, fallbacks_of, named, traces_url


def test_only_a_collector_s_url_without_a_path_gets_one() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("http://[::1]:4318?key=1") == "http://[::1]:4318/v1/traces?key=1"
    assert traces_url("http://[c") == "http://[c/v1/traces", "whoever sends there says what is wrong"
    for whole in ("https://c/otlp/v1/traces", "https://c/x?key=1", "", "grpc://c:4317"):
        assert traces_url(whole) == whole


def test_a_process_without_a_name_has_its_role_s_its_host_s_and_its_port_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-1.example.com")
    assert named(WorkerSettings(metrics_port=9201), "worker", 9201).name == "worker-host-1-9201"
    assert named(RouterSettings(), "router", 0).name == "router-host-1"
    assert named(RouterSettings(name="mine"), "router", 9101).name == "mine"


def test_models_of_a_fallback_are_in_order_by_the_one_whose_requests_they_run() -> None:
    assert fallbacks_of(()) == {}
    given = ("big=small", "hosted", "small=big")
    assert fallbacks_of(given) == {"big": ("small", "hosted"), "small": ("big",)}, "each other's: no request comes back"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("small",), "write MODEL=OTHER"),
        (("big=",), "write MODEL=OTHER"),
        (("big=small", "big"), "cannot take its own place"),
        (("big=small", "small"), "names small twice|named twice"),
    ],
)
def test_a_fallback_that_would_go_round_is_refused(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fallbacks_of(given)
