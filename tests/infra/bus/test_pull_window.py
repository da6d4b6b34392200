"""The pull window against a plain model of a server that answers, refuses, expires and falls silent."""

import json
import random
from typing import NamedTuple

import pytest

from penstock.infra.bus.puller import SILENT_S, PullWindow, Received, pull_request


class Got(NamedTuple):
    subject: str = "inbox"
    data: bytes = b""
    reply: str = ""
    headers: dict[str, str] | None = None


def end(window: PullWindow, generation: int, status: str, pending: int = 0) -> Received:
    """The server ends a request, with so many messages that it had not sent."""
    headers = {"Status": status, "Nats-Pending-Messages": str(pending)}
    return window.receive(Got(headers=headers), generation, 0.0)


def test_what_is_requested_and_what_is_taken_never_exceed_the_room() -> None:
    """Without restarts: the server sends no more than it was asked for, however requests end."""
    for seed in range(300):
        rng = random.Random(seed)
        window, slots, held = PullWindow(0.0), rng.randint(1, 9), 0
        asked = 0  # what the server may still send
        for _ in range(200):
            match rng.choice(["ask", "ask", "arrive", "arrive", "finish", "expire", "refuse"]):
                case "ask":
                    asked += window.next_batch(slots - held)
                case "arrive" if asked:
                    asked, held = asked - 1, held + 1
                    window.taken(window.generation)
                case "finish" if held:
                    held -= 1
                case "expire" if asked:
                    gone = rng.randint(1, asked)
                    asked -= gone
                    assert end(window, window.generation, "408", gone) is Received.ended
                case "refuse":
                    asked = 0
                    assert end(window, window.generation, "409") is Received.refused
            assert asked == window.requested
            assert held + asked <= slots


def test_a_window_with_room_always_asks_again_sooner_or_later() -> None:
    window = PullWindow(0.0)
    assert window.next_batch(4) == 4
    for left in (3, 2):
        window.taken(0)
        assert window.requested == left
    assert window.next_batch(4) == 2
    assert window.next_batch(4) == 0
    assert window.next_batch(0) == window.next_batch(-3) == 0


def test_another_generation_changes_nothing() -> None:
    window = PullWindow(0.0)
    window.next_batch(5)
    window.restart(1.0)
    assert window.requested == 0
    window.next_batch(3)
    window.taken(0)
    assert end(window, 0, "409") is Received.stale
    assert end(window, 0, "408", 5) is Received.stale
    assert window.requested == 3


@pytest.mark.parametrize("restarted", [False, True])
def test_only_a_request_that_should_have_sent_a_heartbeat_is_missed(restarted: bool) -> None:
    window = PullWindow(0.0)
    assert not window.silent(SILENT_S * 9)
    window.next_batch(1)
    assert window.receive(Got(headers={"Status": "100"}), 0, 10.0) is Received.heartbeat
    if restarted:
        window.restart(20.0)
        assert not window.silent(90.0)
        window.next_batch(1)
    since = 20.0 if restarted else 10.0
    assert not window.silent(since + SILENT_S)
    assert window.silent(since + SILENT_S + 1) == SILENT_S + 1


def test_a_closed_window_asks_for_nothing() -> None:
    window = PullWindow(0.0)
    window.close()
    assert window.next_batch(9) == 0


def test_only_a_message_without_a_reply_subject_is_a_status() -> None:
    window = PullWindow(0.0)
    window.next_batch(2)
    job = Got(reply="$JS.ACK.1", headers={"Status": "409"})  # a header that its publisher chose
    assert window.receive(job, 0, 0.0) is Received.job
    assert window.receive(Got(data=b"job"), 0, 0.0) is Received.job
    assert window.requested == 2, "a job counts until it was taken"


def test_a_request_is_in_nanoseconds() -> None:
    body = {"batch": 7, "expires": 30_000_000_000, "idle_heartbeat": 5_000_000_000}
    assert json.loads(pull_request(7)) == body
