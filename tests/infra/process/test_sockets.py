"""Listening sockets, and what is said where there can be none."""

import contextlib
import errno
import os
import socket

import pytest

from penstock.configs.settings import GatewaySettings
from penstock.gateway.run_gateway import listening_sockets
from penstock.infra.process.sockets import CannotListen, bind, cannot_listen, claim, is_loopback, listening, own_sockets
from penstock.launch.machine import Listeners, held_run


def test_a_port_in_use_is_named_and_another_start_may_succeed() -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=rf"--http-port: port {port} is in use on 127.0.0.1") as caught:
            listening("127.0.0.1", port)
        assert not caught.value.permanent


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 70])
def test_an_unknown_host_is_not_called_a_port_in_use(host: str) -> None:
    with pytest.raises(CannotListen, match=r"--http-host .*: unknown host") as caught:
        bind(host, 0)
    assert caught.value.permanent


def test_all_addresses_are_those_of_both_families_or_of_ipv4_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening("::", 0) as both:
        socket.create_connection(("127.0.0.1", both.getsockname()[1]), 5).close()
        if both.family == socket.AF_INET6:
            with contextlib.suppress(OSError), socket.create_connection(("::1", both.getsockname()[1]), 5) as client:
                assert client.family == socket.AF_INET6

    class WithoutIpv6(socket.socket):
        def __init__(self, family: int = socket.AF_INET, *rest: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *rest)

    monkeypatch.setattr(socket, "socket", WithoutIpv6)
    with bind("::", 0) as only:
        assert only.getsockname()[0] == "0.0.0.0"


def test_an_address_of_another_machine_is_named_as_such() -> None:
    with pytest.raises(CannotListen, match="not an address of this machine"):
        bind("192.0.2.1", 0)  # reserved for documentation


@pytest.mark.parametrize(
    ("number", "said", "permanent"),
    [
        (errno.EACCES, "reserved for root; choose one from", True),
        (errno.EADDRINUSE, "in use", False),
        (errno.ENOBUFS, "cannot listen on h:80", False),
    ],
)
def test_each_cause_is_distinguished_from_the_others(number: int, said: str, permanent: bool) -> None:
    problem = cannot_listen(OSError(number, os.strerror(number)), "h", 80)
    assert said in str(problem)
    assert problem.permanent is permanent


def test_own_ports_follow_the_shared_one() -> None:
    with pytest.raises(CannotListen, match="3 gateways need the ports up to 65537"):
        own_sockets("127.0.0.1", 65535, 3)
    listeners = Listeners("127.0.0.1")
    listeners.open(0, 2)
    try:
        assert listeners.port not in listeners.ports.values()
        assert listeners.url not in (listeners.url_of(0), listeners.url_of(1))
        assert len(set(listeners.ports.values())) == 2
        listening("127.0.0.1", listeners.ports[0]).close()  # as a gateway does, beside the socket that holds the port
        listening("127.0.0.1", listeners.ports[0]).close()  # and again when it is restarted
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", listeners.ports[1]))
    finally:
        listeners.close()


def test_two_deployments_never_hold_the_same_port() -> None:
    """Started at once on neighbouring ports, a gateway of one had the port that all gateways of the other share."""
    first = free_ports(4)
    one, two = Listeners("127.0.0.1"), Listeners("127.0.0.1")
    one.open(first, 2)  # and the two after it, where its gateways do not listen yet
    try:
        for other in (first + 1, first + 2):
            with pytest.raises(CannotListen, match=f"port {other} is in use"):
                two.open(other, 2)
            with pytest.raises(CannotListen, match=f"port {other} is in use"):
                two.open(other, 1)
            with pytest.raises(CannotListen, match=f"port {other} is in use"):
                listening_sockets(GatewaySettings(http_port=other))
        # Its own gateways listen beside the sockets that hold their ports.
        own = GatewaySettings(http_port=first + 1, listen_fd=os.dup(one.fd))
        for each in listening_sockets(own):
            each.close()
    finally:
        one.close()
    two.open(first + 1, 2)
    two.close()


def test_of_deployments_that_open_at_the_same_moment_at_most_one_has_a_port() -> None:
    """Each stops between any two of its steps for the other."""
    first = free_ports(4)
    claims = claim("127.0.0.1", first + 1)  # the other has come this far
    try:
        one = Listeners("127.0.0.1")
        with pytest.raises(CannotListen):
            one.open(first, 2)
        listening("127.0.0.1", first + 1).close()  # nothing of ``one`` is left there
    finally:
        claims.close()


def free_ports(count: int) -> int:
    """The first of some in a row."""
    with contextlib.ExitStack() as opened:
        held = [opened.enter_context(sock) for sock in held_run(0, count)]
        return int(held[0].getsockname()[1])


def test_listeners_that_could_not_open_hold_no_socket() -> None:
    """The port below is not tried again: another process may have taken it."""
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        listeners, before = Listeners("127.0.0.1"), os.listdir("/proc/self/fd")
        with pytest.raises(CannotListen):
            listeners.open(port - 1, 2)
        assert listeners.fd == -1
        assert os.listdir("/proc/self/fd") == before


def test_a_gateway_that_is_added_has_the_port_in_its_row_or_any_other_and_gives_it_back() -> None:
    first = free_ports(5)
    listeners = Listeners("127.0.0.1")
    listeners.open(first, 1, more=True)
    try:
        assert listeners.ports == {0: first + 1}
        assert len(listeners.inherited) == 2
        assert listeners.add(1) == first + 2
        with pytest.raises(CannotListen):
            claim("127.0.0.1", first + 2)
        taken = listening("127.0.0.1", first + 3)
        assert listeners.add(2) not in range(first, first + 4)
        taken.close()
        listeners.remove(1)
        claim("127.0.0.1", first + 2).close()
        assert listeners.add(1) == first + 2
        assert listeners.url_of(1) == f"http://127.0.0.1:{first + 2}"
    finally:
        listeners.close()


def test_a_lone_gateway_of_a_chosen_number_leaves_the_port_behind_its_own_to_others() -> None:
    first = free_ports(3)
    one, two = Listeners("127.0.0.1"), Listeners("127.0.0.1")
    one.open(first, 1, chosen=True, more=True)
    two.open(first + 1, 1, chosen=True, more=True)
    try:
        ports = [one.ports[0], one.add(1), two.ports[0], two.add(1)]
        assert len({*ports, first, first + 1}) == 6
    finally:
        one.close()
        two.close()


def test_loopback_is_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "example.com", "localhost.example.com", "")))
