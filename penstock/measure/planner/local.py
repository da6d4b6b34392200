"""Workers of the `penstock up` on this machine: started by it, and drained over the broker.

A worker that leaves takes no new request, finishes those it has and ends; `penstock up` does not start it again. One
that is to come is one of the drained ones, or a further one with the next number.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from penstock.infra.broker.datadir import holder
from penstock.infra.bus.audit import recorded
from penstock.infra.bus.connection import Bus
from penstock.infra.process.signals import RESUME
from penstock.launch.state import Running, read_state, write_resume
from penstock.measure.planner.connectors import ConnectorFailed
from penstock.operate.drain import DrainFailed, ask, change_of
from penstock.operate.workers import registrations
from penstock.schemas import control
from penstock.schemas.errors import ServingError
from penstock.schemas.plans import ROLES, Role

STEMS: dict[Role, str] = {"aggregated": "worker", "prefill": "prefill", "decode": "decode"}
LISTED_S = 10.0  # after which a worker that was asked for must be in state.json
_POLL_S = 0.05


class LocalWorkers:
    """
    Args:
        data_dir: of the `penstock up`.
    """

    name: ClassVar[str] = "local"

    def __init__(self, bus: Bus, data_dir: Path) -> None:
        self._bus = bus
        self._data_dir = data_dir
        self._leaving: set[str] = set()

    async def counts(self) -> dict[Role, int]:
        processes = self._processes()
        return {role: len(names) for role in ROLES if (names := self._staying(role, processes))}

    async def apply(self, targets: Mapping[Role, int]) -> None:
        processes = self._processes()
        wanted: list[str] = []
        for role, target in targets.items():
            staying = self._staying(role, processes)
            wanted += joining(role, target - len(staying), processes)
            for name in reversed(staying[max(1, target) :]):
                await self._drain(name)
        if wanted:
            await self._start(wanted)

    def _staying(self, role: Role, processes: Sequence[Running]) -> list[str]:
        """Workers of a role that run or are being started, by number."""
        named = {each.name: each for each in processes}
        self._leaving = {name for name in self._leaving if name in named and not named[name].drained}
        names = [each.name for each in processes if not each.drained and each.name not in self._leaving]
        return sorted((name for name in names if _is(name, role)), key=_number)

    async def _drain(self, name: str) -> None:
        fleet = await registrations(self._bus)
        worker = next((each for each in fleet if each.name == name), None)
        if worker is None:
            raise ConnectorFailed(f"{name} is not registered, so it cannot be drained yet")
        try:
            detail = f"{change_of(worker)}, by a planner"
            async with recorded(self._bus.nc, self._bus.subjects, "drain", name, detail):
                await ask(self._bus, worker, control.Drain(stay_down=True))
        except (DrainFailed, ServingError) as error:
            raise ConnectorFailed(str(error)) from error
        self._leaving.add(name)

    async def _start(self, names: Sequence[str]) -> None:
        up = holder(self._data_dir / "up.lock")
        if up is None:
            raise ConnectorFailed(f"no `penstock up` runs on {self._data_dir}")
        write_resume(self._data_dir, names)
        os.kill(up, RESUME)
        until = time.monotonic() + LISTED_S
        while missing := [name for name in names if name not in self._running()]:
            if time.monotonic() > until:
                logs = self._data_dir / "logs"
                raise ConnectorFailed(
                    f"`penstock up` did not start {', '.join(missing)}; its log says why, also {logs}"
                )
            await asyncio.sleep(_POLL_S)

    def _running(self) -> set[str]:
        return {each.name for each in self._processes() if not each.drained}

    def _processes(self) -> list[Running]:
        try:
            state = read_state(self._data_dir / "state.json")
        except (OSError, msgspec.DecodeError) as error:
            raise ConnectorFailed(f"no `penstock up` runs on {self._data_dir} ({error})") from error
        return [each for each in state.processes if each.role == "worker"]


def joining(role: Role, count: int, processes: Sequence[Running]) -> list[str]:
    """The next ``count`` workers of a role: drained ones first, then further numbers."""
    known = {each.name for each in processes}
    drained = sorted((each.name for each in processes if each.drained and _is(each.name, role)), key=_number)
    names = drained[: max(0, count)]
    number = 0
    while len(names) < count:
        if (name := f"{STEMS[role]}-{number}") not in known:
            names.append(name)
        number += 1
    return names


def _is(name: str, role: Role) -> bool:
    return name.rpartition("-")[0] == STEMS[role]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
