"""Which of our modules a request passes in the gateway, the router and the worker.

``python -m tests.pipeline.request_path ROLE FLAGS`` runs a penstock command and notes each function of ours that is
called. A file ``phase`` in the folder ``REQUEST_PATH`` says what the calls belong to; each change of it is answered by
a file ``ROLE.PHASE.json`` with what was called in the phase before.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from penstock.cli.commands import main

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("configs", "gateway", "infra", "penstock", "router", "schemas", "workers")
FOLDER = "REQUEST_PATH"


RUNNERS = (f"{os.sep}uvloop{os.sep}__init__.py", f"{os.sep}asyncio{os.sep}runners.py")


class Call(NamedTuple):
    """A function that was called, and how many functions of ours were on the stack at most, itself included.

    Those that started the event loop are not counted: they are below every call, and no part of a request's way.
    """

    module: str
    name: str
    line: int
    depth: int


class Recorder:
    """The calls of all threads that are started after ``install``, and of the one that calls it."""

    def __init__(self) -> None:
        self.calls: dict[CodeType, int] = {}
        self._ours: dict[CodeType, bool] = {}

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _is_ours(self, code: CodeType) -> bool:
        found = self._ours.get(code)
        if found is None:
            found = self._ours[code] = module_of(code.co_filename) != "" and code.co_name != "<module>"
        return found

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not self._is_ours(code):
            return
        depth, outer = 1, frame.f_back
        while outer is not None and not outer.f_code.co_filename.endswith(RUNNERS):
            depth += self._is_ours(outer.f_code)
            outer = outer.f_back
        if depth > self.calls.get(code, 0):
            self.calls[code] = depth

    def taken(self) -> list[Call]:
        """What was called since the last time."""
        found, self.calls = self.calls, {}
        return [Call(module_of(c.co_filename), c.co_qualname, c.co_firstlineno, depth) for c, depth in found.items()]


def module_of(file: str) -> str:
    """The path below the repository of a module of ours, links resolved; else the empty text."""
    path = os.path.realpath(file)
    if not path.startswith(f"{ROOT}{os.sep}"):
        return ""
    below = path[len(str(ROOT)) + 1 :]
    return below if below.partition(os.sep)[0] in FOLDERS else ""


def follow(recorder: Recorder, folder: Path, role: str) -> None:
    """Answer the changes of the file ``phase``, until it says ``end``."""
    phase = ""
    while phase != "end":
        time.sleep(0.02)
        said = (folder / "phase").read_text()
        if said and said != phase:
            calls = recorder.taken()
            part = folder / f"{role}.{phase or 'start'}.part"
            part.write_text(json.dumps(calls))
            part.replace(part.with_suffix(".json"))
            phase = said


def read_calls(file: Path) -> list[Call]:
    return [Call(*row) for row in json.loads(file.read_text())]


def without(calls: Iterable[Call], idle: Iterable[Call]) -> list[Call]:
    """What a process does not call when it has nothing to do."""
    known = {(call.module, call.name, call.line) for call in idle}
    return [call for call in calls if (call.module, call.name, call.line) not in known]


def in_all(calls: Iterable[Call], *again: Iterable[Call]) -> list[Call]:
    """What happens each time: what a process does now and then is left out."""
    known = [{(call.module, call.name, call.line) for call in each} for each in again]
    return [call for call in calls if all((call.module, call.name, call.line) in each for each in known)]


if __name__ == "__main__":
    made = Recorder()
    threading.Thread(target=follow, args=(made, Path(os.environ[FOLDER]), sys.argv[1]), daemon=True).start()
    made.install()
    sys.exit(main(sys.argv[1:]))
