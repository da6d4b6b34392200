"""The page of log events: calls of a logger are found in every form in which the code has them."""

import ast

import pytest

from tests.generated import log_events
from tests.generated.log_events import Call, calls_of

MODULE = """
def plain(error):
    log.warning("one", stream=1, action="wait a moment")
    log.exception("two")
    log.error("three", exc_info=error)
    print("no event"); self.log.info("no logger of the module")

def chosen(off, level, **more):
    log.info("four" if off else "five", key=1)
    event = "six"
    log.warning(event, fix=f"set {level}")
    getattr(log, level)("seven", **more)

class Reader:
    def warn(self, event, **fields):
        log.warning(event, **fields)

    def read(self):
        def inner():
            self.warn("eight", rank=3)
"""


def test_every_form_of_a_call_is_found_with_its_fields() -> None:
    found = calls_of(ast.parse(MODULE), "workers/engines/reader.py")
    assert sorted(found, key=lambda call: (call.name, call.level)) == sorted(
        [
            Call("one", "warning", "worker", ("stream", "action"), ("wait a moment",)),
            Call("two", "error", "worker", ("exception",), ()),
            Call("three", "error", "worker", ("exception",), ()),
            Call("four", "info", "worker", ("key",), ()),
            Call("five", "info", "worker", ("key",), ()),
            Call("six", "warning", "worker", ("fix",), ("set …",)),
            Call("seven", "error", "worker", ("…",), ()),
            Call("seven", "warning", "worker", ("…",), ()),
            Call("eight", "warning", "worker", ("rank",), ()),
        ],
        key=lambda call: (call.name, call.level),
    )


def test_an_event_that_cannot_be_named_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"router/run_router.py:3: the name of this event cannot be found"):
        list(calls_of(ast.parse("def run(names):\n    pass\n    log.error(names[0])\n"), "router/run_router.py"))


def test_an_event_without_a_meaning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    meanings = {name: text for name, text in log_events.MEANINGS.items() if name != "worker_lost"}
    monkeypatch.setattr(log_events, "MEANINGS", meanings | {"nobody_logs_this": ""})
    with pytest.raises(ValueError, match="what these events mean: worker_lost"):
        log_events.page()
    monkeypatch.setattr(log_events, "MEANINGS", log_events.MEANINGS | {"worker_lost": "a worker is gone"})
    with pytest.raises(ValueError, match=r"nothing logs these events .*: nobody_logs_this"):
        log_events.page()
