"""Weights that an operator changes while workers run: pause, update, resume; and sleep and wake.

Pauses and updates are stored in a bucket of each cell, which workers follow, also after a restart. Then the gateway
waits for the workers' registrations: they say what was done, or why it was not. An update that one worker cannot make
is taken back from all.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from nats.errors import Error as NatsError

from penstock.gateway.access.authentication import Caller
from penstock.gateway.base.request_bodies import decode_body, invalid
from penstock.gateway.service.adapters import Operators, sequences
from penstock.gateway.service.fleet import FleetView
from penstock.gateway.service.text_model import TextModel
from penstock.infra.bus.audit import Auditor
from penstock.infra.bus.connection import Bus
from penstock.schemas import control, fleet
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import FINISH, Registration, TensorSource, WeightsEntry
from penstock.schemas.subjects import weights_key
from penstock.schemas.wire import encode

BUCKET = "weights"
LOAD_S = 600.0  # for all workers to read new weights, beside the time that running requests have
LOOK_S = 0.05

Model = Annotated[str, Meta(max_length=512, description="which one, where several are served")]
Running = Annotated[
    Literal["finish", "continue"], Meta(description="running requests end first, or pause and continue afterwards")
]
Within = Annotated[float, Meta(ge=0, le=3600, description="seconds that running requests may take to finish")]


class PauseModel(Struct, frozen=True):
    """POST /v1/admin/pause."""

    model: Model = ""
    running: Running = "finish"
    timeout_s: Within = 120.0


class UpdateWeights(Struct, frozen=True):
    """POST /v1/admin/update_weights."""

    path: Annotated[
        str, Meta(max_length=1024, description="folder of the weights, within the workers' --weights-folder")
    ] = ""
    model: Model = ""
    running: Running = "finish"
    timeout_s: Within = 120.0
    source: Annotated[
        Literal["folder", "nccl", "gloo", "nixl"],
        Meta(description="where they come from; all but folder: a trainer's tensors (penstock.client.weights)"),
    ] = msgspec.field(default="folder", name="from")
    address: Annotated[str, Meta(max_length=256, description="of the trainer's torch.distributed.TCPStore")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="likewise")] = 0
    world_size: Annotated[
        int, Meta(ge=0, le=1 << 16, description="the trainer and the workers; refused if it is another; 0: any")
    ] = 0


class ShowWeights(Struct, frozen=True):
    """GET /v1/admin/weights."""

    model: Model = ""


class ResumeModel(Struct, frozen=True):
    """POST /v1/admin/resume."""

    model: Model = ""


class RestModel(Struct, frozen=True):
    """POST /v1/admin/sleep, POST /v1/admin/wake."""

    model: Model = ""
    worker: Annotated[str, Meta(max_length=512, description="only this one, by its name or id")] = ""
    timeout_s: Within = 120.0


class WorkerWeights(Struct, frozen=True):
    """A worker's weights. ``seconds``: that the last update took there, or the last way to or from host memory."""

    worker: str
    revision: str
    update: int
    paused: bool
    asleep: bool
    seconds: float


class ModelWeights(Struct, frozen=True):
    """What these endpoints answer: the weights of a model's workers. ``revision``: that answers new requests."""

    model: str
    revision: str
    update: int
    paused: bool
    workers: list[WorkerWeights]


class WeightsControl:
    """
    Args:
        buses: of the cells.
    """

    def __init__(self, buses: Sequence[Bus], fleet: FleetView, audit: Auditor) -> None:
        self._operators = Operators(buses, fleet, audit, BUCKET, "changes a model's weights")
        self._lock = asyncio.Lock()  # one change at a time, each with a look at the outcome

    async def pause(self, body: bytes, caller: Caller) -> ModelWeights:
        """Have a model's workers start no request, until ``resume``. New ones wait, within their deadlines.

        Raises:
            ServingError: permission_denied; invalid_request: the body, or requests still run; model_not_found;
                unsupported: no worker can; broker_unavailable; model_unavailable: workers did not do it in time.
        """
        asked, model = self._asked(_decode_pause, body, caller)
        async with self._lock:
            return await self._change(model, caller, "pause", asked.timeout_s, paused=asked.running)

    async def resume(self, body: bytes, caller: Caller) -> ModelWeights:
        """End a pause; raises as ``pause``."""
        _, model = self._asked(_decode_resume, body, caller)
        async with self._lock:
            return await self._change(model, caller, "resume", 0.0, paused="")

    async def show(self, body: bytes, caller: Caller) -> ModelWeights:
        """A model's weights as they are; raises as ``pause``."""
        return self._shown(self._asked(_decode_show, body, caller)[1])

    async def update(self, body: bytes, caller: Caller) -> ModelWeights:
        """Have all workers of a model compute with other weights; raises as ``pause``.

        Those of a folder, or a trainer's tensors, which all workers receive before one computes with them. If one of
        them cannot, all go back to the weights before.
        """
        asked, model = self._asked(_decode_update, body, caller)
        if asked.source == "folder" and not asked.path:
            raise invalid("path", "name the folder of the weights")
        if asked.source != "folder" and not (asked.address and asked.port):
            raise invalid("address", "give address and port of the trainer's TCPStore, as penstock.client.weights does")
        async with self._lock:
            number = 1 + max(each.weights.update for _, each in self._workers(model))
            before = await self._entry(model)
            number, revision = max(number, before.update + 1), ""
            if asked.source != "folder":
                revision = await self._receive(model, caller, asked, number)
            try:
                done = await self._change(
                    model, caller, "update", asked.timeout_s,
                    update=number, path=asked.path, revision=revision, received=bool(revision),
                    before=self._shown(model).revision, running=asked.running,
                )  # fmt: skip
                revisions = {each.revision for _, each in self._workers(model) if each.weights.update == number}
                if len(revisions) != 1:
                    raise invalid("path", f"workers found different weights in {asked.path!r}: {sorted(revisions)}")
            except ServingError:
                with contextlib.suppress(ServingError):  # of workers that are gone, or late again
                    await self._change(
                        model, None, "update", asked.timeout_s,
                        update=number + 1, path=before.path, revision=before.revision or before.base, before="",
                        received=before.received, running=FINISH, source=None,
                    )  # fmt: skip
                raise
            await self._change(model, None, "update", asked.timeout_s, revision=revisions.pop(), source=None)
            return done

    async def _receive(self, model: TextModel, caller: Caller, asked: UpdateWeights, number: int) -> str:
        """Have all workers receive a trainer's tensors; the revision that these are. What they serve stays."""
        workers = [each for _, each in self._workers(model)]
        if unable := [each.name or each.worker for each in workers if not each.weights.receives]:
            raise invalid("from", f"these workers have no --weights-staging, where they receive tensors: {unable}")
        ranks = {each.worker: rank for rank, each in enumerate(workers, 1)}
        if asked.world_size not in (0, len(ranks) + 1):
            raise invalid("world_size", f"it is {len(ranks) + 1}: the trainer, and {len(ranks)} workers")
        source = TensorSource(number, asked.source, asked.address, asked.port, ranks)
        try:
            await self._change(model, caller, "receive", 0.0, needed=ranks, source=source)
            found = {each.weights.received for _, each in self._workers(model) if each.worker in ranks}
            if len(found) != 1 or "" in found:
                raise invalid("from", f"workers received different tensors: revisions {sorted(found)}")
        except ServingError:
            with contextlib.suppress(ServingError):
                await self._change(model, None, "receive", 0.0, source=None)
            raise
        return found.pop()

    async def sleep(self, body: bytes, caller: Caller) -> ModelWeights:
        """Have a model's workers finish what they run, and move their weights to host memory; raises as ``pause``."""
        asked, model = self._asked(_decode_rest, body, caller)
        chosen = self._chosen(model, asked.worker)
        self._operators.note("weights sleep", caller, model.name, asked.worker)
        order = encode(control.Sleep(asked.timeout_s))
        answers = await asyncio.gather(
            *(self._order(cell, each, order, asked.timeout_s + 60.0) for cell, each in chosen)
        )
        for (_, each), reason in zip(chosen, answers, strict=True):
            if reason:
                raise invalid("worker", f"worker {each.worker} does not sleep: {reason}")
        return await self._rested(model, chosen, asleep=True, within_s=asked.timeout_s + 60.0)

    async def wake(self, body: bytes, caller: Caller) -> ModelWeights:
        """Have a model's workers bring their weights back; raises as ``pause``."""
        asked, model = self._asked(_decode_rest, body, caller)
        chosen = self._chosen(model, asked.worker)
        self._operators.note("weights wake", caller, model.name, asked.worker)
        order = encode(control.Wake())
        await asyncio.gather(*(self._order(cell, each, order, 5.0) for cell, each in chosen))
        return await self._rested(model, chosen, asleep=False, within_s=asked.timeout_s)

    # --- pieces ---

    def _asked(self, decode: Any, body: bytes, caller: Caller) -> tuple[Any, TextModel]:
        self._operators.check(caller)
        asked = decode_body(decode, body or b"{}")
        model = self._operators.model(asked.model)
        if not caller.may_name(model.name):
            raise ServingError(
                Code.permission_denied,
                f"this API key may not change {model.name!r}: it is limited to certain names ('penstock keys list')",
                param="model",
            )
        if not self._workers(model):
            raise ServingError(
                Code.unsupported,
                f"no worker of model {model.name!r} changes its weights or sleeps (docs/weights.md has those that do)",
            )
        return asked, model

    def _workers(self, model: TextModel) -> list[tuple[int, Registration]]:
        """Those of a model that follow what is asked for, with their cells: of one base, that of the serving one."""
        able = [(cell, each) for cell, each in self._operators.workers(model) if each.weights.base]
        serving = min((each for _, each in able), key=lambda each: (-each.weights.update, each.epoch), default=None)
        return [
            (cell, each) for cell, each in able if serving is not None and each.weights.base == serving.weights.base
        ]

    async def _entry(self, model: TextModel) -> WeightsEntry:
        """The present one; that of the first cell."""
        ((_, worker), *_), found = self._workers(model), await self._operators.read(weights_key(model.name))
        new = WeightsEntry(model.name, base=worker.weights.base)
        if found[0] is None or not found[0].data:
            return new
        entry = fleet.decode_weights(found[0].data)
        return entry if entry.base == new.base else msgspec.structs.replace(new, update=entry.update)

    async def _change(
        self,
        model: TextModel,
        caller: Caller | None,
        action: str,
        within_s: float,
        needed: Collection[str] = (),
        **fields: Any,
    ) -> ModelWeights:
        """Store the entry with other fields, and wait until the workers have done what it says.

        Args:
            needed: workers without which it fails.
        """
        key = weights_key(model.name)
        entry = msgspec.structs.replace(await self._entry(model), within_s=within_s, **fields)
        before = await self._operators.read(key)
        stored = await self._operators.write(key, [encode(entry)] * len(before), sequences(before))
        if caller is not None:
            self._operators.note(f"weights {action}", caller, model.name, entry.path if action == "update" else "")
        until = time.monotonic() + within_s + LOAD_S
        while True:
            workers = self._workers(model)
            followed = [each for cell, each in workers if each.weights.entry >= stored[cell]]
            if lost := set(needed) - {each.worker for _, each in workers}:
                raise ServingError(Code.model_unavailable, f"lost while they received tensors: {sorted(lost)}")
            for each in followed:
                if each.weights.error:
                    param = {"update": "path", "receive": "from"}.get(action, "timeout_s")
                    raise invalid(param, f"worker {each.worker}: {each.weights.error}")
            if workers and len(followed) == len(workers):
                return self._shown(model)
            if time.monotonic() > until:
                raise _late(f"{len(followed)} of {len(workers)} workers have followed", within_s + LOAD_S)
            await asyncio.sleep(LOOK_S)

    def _chosen(self, model: TextModel, worker: str) -> list[tuple[int, Registration]]:
        chosen = [(cell, each) for cell, each in self._workers(model) if worker in ("", each.worker, each.name)]
        if not chosen:
            raise invalid("worker", f"no worker of model {model.name!r} is called {worker!r}")
        return chosen

    async def _order(self, cell: int, worker: Registration, order: bytes, within_s: float) -> str:
        """Why it cannot be done; "": it is done, or begun."""
        bus = self._operators.buses[cell]
        try:
            answer = await bus.nc.request(bus.subjects.drain(worker.worker), order, timeout=within_s)
            return control.decode_ok(answer.data).error
        except (NatsError, TimeoutError, msgspec.MsgspecError) as error:
            return f"it does not answer ({error!r})"

    async def _rested(
        self, model: TextModel, chosen: Sequence[tuple[int, Registration]], *, asleep: bool, within_s: float
    ) -> ModelWeights:
        names, until = {each.worker for _, each in chosen}, time.monotonic() + within_s
        while any(each.worker in names and each.weights.asleep != asleep for _, each in self._workers(model)):
            if time.monotonic() > until:
                raise _late(f"some workers are not {'asleep' if asleep else 'awake'}", within_s)
            await asyncio.sleep(LOOK_S)
        return self._shown(model)

    def _shown(self, model: TextModel) -> ModelWeights:
        workers = [each for _, each in self._workers(model)]
        first = min(workers, key=lambda each: (-each.weights.update, each.epoch))
        return ModelWeights(
            model.name,
            first.revision,
            first.weights.update,
            all(each.weights.paused for each in workers),
            [
                WorkerWeights(
                    each.name or each.worker, each.revision, each.weights.update, each.weights.paused,
                    each.weights.asleep, each.weights.seconds,
                )
                for each in workers
            ],
        )  # fmt: skip


_decode_pause = msgspec.json.Decoder(PauseModel).decode
_decode_show = msgspec.json.Decoder(ShowWeights).decode
_decode_update = msgspec.json.Decoder(UpdateWeights).decode
_decode_resume = msgspec.json.Decoder(ResumeModel).decode
_decode_rest = msgspec.json.Decoder(RestModel).decode


def _late(what: str, within_s: float) -> ServingError:
    return ServingError(
        Code.model_unavailable,
        f"{what} within {within_s:g} s; the others continue, and `penstock top` shows them",
        retry_after=10.0,
    )
