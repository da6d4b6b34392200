"""What settings say together."""

import socket

import pytest

from penstock.configs.settings import RouterSettings, WorkerSettings, named


def test_a_process_without_a_name_has_its_role_s_its_host_s_and_its_port_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-1.example.com")
    assert named(WorkerSettings(metrics_port=9201), "worker", 9201).name == "worker-host-1-9201"
    assert named(RouterSettings(), "router", 0).name == "router-host-1"
    assert named(RouterSettings(name="mine"), "router", 9101).name == "mine"
