from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.disagg.owner import Pin, Pins


def pin(ticket: str, expires: float = 10.0, blocks: int = 2) -> Pin:
    return Pin(ticket, "kv", "d-1", list(range(blocks)), expires, lambda engine: None)


def test_a_lease_ends_once() -> None:
    pins = Pins()
    pins.add(mine := pin("a"))
    assert (len(pins), pins.blocks) == (1, 2)
    assert pins.release("a") is mine
    assert pins.release("a") is None
    assert (len(pins), pins.blocks) == (0, 0)


def test_a_lease_expires_at_its_time_and_not_before() -> None:
    pins = Pins()
    pins.add(pin("a", expires=10.0))
    pins.add(pin("b", expires=20.0))
    assert pins.expired(9.9) == []
    assert [(each.ticket, free) for each, free in pins.expired(10.0)] == [("a", True)]
    assert pins.get("a") is None
    assert pins.get("b") is not None


def test_blocks_that_are_being_sent_stay_until_that_has_ended() -> None:
    pins = Pins()
    pins.add(mine := pin("a"))
    mine.pushing = 2
    assert pins.release("a") is None, "not free yet"
    assert pins.get("a") is None, "but nobody else gets the ticket"
    assert pins.blocks == 2
    assert pins.pushed(mine) is None
    assert pins.pushed(mine) is mine
    assert len(pins) == 0


def test_a_lease_that_expires_while_it_is_sent_is_not_free_at_once() -> None:
    pins = Pins()
    pins.add(mine := pin("a", expires=1.0))
    mine.pushing = 1
    assert pins.expired(2.0) == [(mine, False)]
    assert pins.pushed(mine) is mine


@given(st.lists(st.tuples(st.sampled_from(["add", "release", "expire", "push", "pushed"]), st.integers(0, 5))))
def test_every_pin_comes_free_exactly_once_whatever_happens(steps: list[tuple[str, int]]) -> None:
    pins = Pins()
    made: list[Pin] = []
    free: list[Pin] = []
    for step, number in steps:
        match step:
            case "add":
                made.append(pin(f"t{len(made)}", expires=float(number)))
                pins.add(made[-1])
            case "release" if made:
                found = pins.release(f"t{number % len(made)}")
                free += [found] if found else []
            case "expire":
                free += [each for each, now in pins.expired(float(number)) if now]
            case "push" if made and (found := pins.get(f"t{number % len(made)}")):
                found.pushing += 1
            case "pushed" if pushing := [each for each in made if each.pushing]:
                found = pins.pushed(pushing[number % len(pushing)])
                free += [found] if found else []
        assert len(pins) == len(made) - len(free)
    for each in made:
        while each.pushing:
            found = pins.pushed(each)
            free += [found] if found else []
    free += [each for each, now in pins.expired(1e9) if now]
    assert sorted(each.ticket for each in free) == sorted(each.ticket for each in made)
