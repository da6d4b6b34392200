"""The pull window against a plain model of a server that answers, refuses, expires and falls silent."""

import random

import pytest

from infra.bus.pull_window import SILENT_S, Window


def test_what_is_requested_and_what_is_taken_never_exceed_the_room() -> None:
    """Without restarts: the server sends no more than it was asked for, however requests end."""
    for seed in range(300):
        rng = random.Random(seed)
        window, slots, held = Window(0.0), rng.randint(1, 9), 0
        asked = 0  # what the server may still send
        for _ in range(200):
            match rng.choice(["ask", "ask", "arrive", "arrive", "finish", "expire", "refuse"]):
                case "ask":
                    asked += window.ask(slots - held)
                case "arrive" if asked:
                    asked, held = asked - 1, held + 1
                    window.took(window.generation)
                case "finish" if held:
                    held -= 1
                case "expire" if asked:
                    gone = rng.randint(1, asked)
                    asked -= gone
                    assert window.ended(window.generation, "408", gone)
                case "refuse":
                    asked = 0
                    assert not window.ended(window.generation, "409", 0)
            assert asked == window.requested
            assert held + asked <= slots


def test_a_window_with_room_always_asks_again_sooner_or_later() -> None:
    window = Window(0.0)
    assert window.ask(4) == 4
    for left in (3, 2):
        window.took(0)
        assert window.requested == left
    assert window.ask(4) == 2
    assert window.ask(4) == 0
    assert window.ask(0) == window.ask(-3) == 0


def test_another_generation_changes_nothing() -> None:
    window = Window(0.0)
    window.ask(5)
    window.restart(1.0)
    assert window.requested == 0
    window.ask(3)
    window.took(0)
    assert not window.ended(0, "409", 0)
    assert not window.ended(0, "408", 5)
    assert window.requested == 3


@pytest.mark.parametrize("restarted", [False, True])
def test_only_a_request_that_should_have_sent_a_heartbeat_is_missed(restarted: bool) -> None:
    window = Window(0.0)
    assert not window.silent(SILENT_S * 9)
    window.ask(1)
    window.heard(10.0)
    if restarted:
        window.restart(20.0)
        assert not window.silent(90.0)
        window.ask(1)
    since = 20.0 if restarted else 10.0
    assert not window.silent(since + SILENT_S)
    assert window.silent(since + SILENT_S + 1) == SILENT_S + 1


def test_a_closed_window_asks_for_nothing() -> None:
    window = Window(0.0)
    window.close()
    assert window.ask(9) == 0
