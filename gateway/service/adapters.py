"""LoRA adapters that an operator loads and unloads while workers run, in vLLM's form.

What is asked for is stored in a bucket of each cell, which workers follow, also after a restart. Then the gateway waits
for the workers' registrations: they say what was loaded, or why it was not.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from nats.errors import Error as NatsError

from penstock.gateway.access.authentication import ANYONE, Caller
from penstock.gateway.base.request_bodies import decode_body, invalid, model_missing, model_not_found
from penstock.gateway.service.fleet import FleetView
from penstock.gateway.service.text_model import TextModel
from penstock.infra.bus.audit import Auditor
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last, read
from penstock.infra.bus.jetstream import compare_and_set
from penstock.infra.model.adapter import AdapterError, check_name
from penstock.schemas.audit import AuditEntry
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import AdapterEntry, LoraAdapter, Registration, decode_adapter, removal_headers
from penstock.schemas.subjects import adapter_key
from penstock.schemas.wire import encode

BUCKET = "adapters"
WRITE_S = 5.0
LOAD_S = 60.0  # for all workers to load an adapter
LOOK_S = 0.05
MOST_UNLOADED = 4_000  # entries of adapters that are unloaded, of 0.3 kB; those that flags name are kept beside them
PRUNED_AT_ONCE = 400  # how many more there may be meanwhile


class LoadAdapter(Struct, frozen=True):
    """POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=128, description="by which requests name it, as a model")]
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=1024, description="its folder, within the workers' --lora-folder")
    ]
    load_inplace: Annotated[bool, Meta(description="replace the one of this name, if there is one")] = False
    model: Annotated[str, Meta(max_length=512, description="that it belongs to, where several are served")] = ""


class UnloadAdapter(Struct, frozen=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=128)]
    lora_int_id: Annotated[int | None, Meta(description="ignored")] = None


_decode_load = msgspec.json.Decoder(LoadAdapter).decode
_decode_unload = msgspec.json.Decoder(UnloadAdapter).decode


class Operators:
    """What operators change of models while workers run: who may, of which model, and the entries that say it.

    Args:
        buses: of the cells.
        bucket: of the entries.
        what: operators change, in errors.
    """

    def __init__(self, buses: Sequence[Bus], fleet: FleetView, audit: Auditor, bucket: str, what: str) -> None:
        self.buses = buses
        self.fleet = fleet
        self._audit = audit
        self._bucket = bucket
        self._what = what

    def check(self, caller: Caller, more: str = "") -> None:
        """
        Args:
            more: what else would allow it, for the error.
        Raises:
            ServingError: permission_denied; the caller is not an operator.
        """
        if caller is ANYONE or caller.sees is not None:
            hint = f"send an operator's API key ('penstock keys create --operator'){more}"
            raise ServingError(Code.permission_denied, f"only an operator {self._what}: {hint}")

    def note(self, action: str, caller: Caller, name: str, detail: str) -> None:
        """Write to the audit log."""
        if caller is not ANYONE:
            key = caller.key.prefix if caller.key is not None else "a key of the gateway's own"
            self._audit.note(AuditEntry(action, name, detail, key=key))

    def model(self, name: str) -> TextModel:
        """The model of a name, or the only one.

        Raises:
            ServingError: model_not_found, invalid_request: several are served.
        """
        models = [each for each in self.fleet.models if each.expected]
        if name:
            found = self.fleet.find(name)
            if found is None:
                raise model_not_found(name, [each.name for each in models])
            return found
        if len(models) != 1:
            raise model_missing([each.name for each in models])
        return models[0]

    def workers(self, model: TextModel) -> Iterator[tuple[int, Registration]]:
        """Of a model, with the cells that they are in."""
        for cell in range(len(self.buses)):
            for each in self.fleet.watches[cell].members.values():
                if each.registration.worker in model.workers:
                    yield cell, each.registration

    async def read(self, key: str) -> list[Entry | None]:
        """An entry, by cell."""
        return [
            await get_last(
                bus, f"KV_{bus.subjects.bucket(self._bucket)}", self._subject(bus, key), newest=True, within_s=WRITE_S
            )
            for bus in self.buses
        ]

    async def write(self, key: str, values: Sequence[bytes], revisions: Sequence[int]) -> list[int]:
        """Store an entry in the place of these revisions (0: there is none); the new ones, by cell.

        Raises:
            ServingError: broker_unavailable: not stored, or not confirmed.
        """
        stored = []
        for bus, data, revision in zip(self.buses, values, revisions, strict=True):
            try:
                reply = await compare_and_set(bus.nc, self._subject(bus, key), data, revision, WRITE_S)
            except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as error:
                raise self._unavailable(repr(error)) from None
            if reply.error is not None:
                raise self._unavailable(str(reply.error))
            stored.append(reply.seq)
        return stored

    async def prune(self, spare: Callable[[bytes], bool], most: int, at_once: int) -> None:
        """Remove the oldest entries that may be spared, once there are ``at_once`` more than ``most`` of them.

        Raises:
            ServingError: the entries cannot be read.
        """
        for bus in self.buses:
            bucket = bus.subjects.bucket(self._bucket)
            entries = read(bus, f"KV_{bucket}", f"$KV.{bucket}.>")
            found = [(entry.subject, entry.seq) async for entry in entries if entry.data and spare(entry.data)]
            if len(found) <= most + at_once:
                continue
            found.sort(key=lambda each: each[1])
            for subject, seq in found[: len(found) - most]:  # one that was just replaced stays
                with contextlib.suppress(NatsError, TimeoutError):  # else the next change removes it
                    await bus.nc.request(subject, b"", headers=removal_headers(seq), timeout=WRITE_S)

    def _subject(self, bus: Bus, key: str) -> str:
        return f"$KV.{bus.subjects.bucket(self._bucket)}.{key}"

    def _unavailable(self, reason: str) -> ServingError:
        return ServingError(
            Code.broker_unavailable,
            f"an entry of {self._bucket} could not be stored on the broker ({reason}); has it its streams "
            "('penstock streams apply')?",
            retry_after=1.0,
        )


class AdapterLoading:
    """
    Args:
        buses: of the cells.
        open_to_all: also callers without an API key may change adapters, while no keys are in use.
    """

    def __init__(self, buses: Sequence[Bus], fleet: FleetView, audit: Auditor, *, open_to_all: bool) -> None:
        self._operators = Operators(buses, fleet, audit, BUCKET, "loads and unloads adapters")
        self._fleet = fleet
        self._open_to_all = open_to_all
        self._lock = asyncio.Lock()  # one change at a time, each with a look at the outcome

    async def load(self, body: bytes, caller: Caller) -> str:
        """Load an adapter in all workers of its model; the text to answer with.

        Raises:
            ServingError: permission_denied; invalid_request: the body, or a worker cannot load it; model_not_found;
                unsupported: no worker of the model applies adapters; broker_unavailable; model_unavailable: not all
                workers have loaded it in time.
        """
        self._check(caller)
        asked: LoadAdapter = decode_body(_decode_load, body)
        if not caller.may_name(asked.lora_name):
            raise ServingError(
                Code.permission_denied,
                f"this API key may not load {asked.lora_name!r}: it is limited to certain names ('penstock keys list')",
                param="lora_name",
            )
        model, name = self._operators.model(asked.model), asked.lora_name
        try:
            check_name(name, self._fleet.models_by_name)
        except AdapterError as error:
            raise invalid("lora_name", str(error)) from None
        async with self._lock:
            for other in self._fleet.models:
                if other is not model and name in other.adapters:
                    raise invalid("lora_name", f"{name!r} is an adapter of model {other.name!r}; unload it first")
            if name in model.adapters and not asked.load_inplace:
                raise invalid(
                    "lora_name",
                    f"the LoRA adapter {name!r} has already been loaded; set load_inplace to true to replace it",
                )
            if not self._workers(model):
                raise ServingError(
                    Code.unsupported,
                    f"no worker of model {model.name!r} loads LoRA adapters; start workers with --lora-folder",
                )
            key = adapter_key(model.name, name)
            before = await self._operators.read(key)
            entry = encode(AdapterEntry(name, model.name, asked.lora_path, flagged=self._flagged(model, name, before)))
            revisions = await self._operators.write(key, [entry] * len(before), sequences(before))
            self._operators.note("adapter load", caller, name, asked.lora_path)
            failed = await self._loaded(model, name, revisions)
            if failed is not None:
                previous = [each.data if each is not None else b"" for each in before]
                await self._operators.write(key, previous, revisions)
                raise invalid("lora_path", f"worker {failed[0]} cannot load {name!r}: {failed[1]}")
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: bytes, caller: Caller) -> str:
        """Unload an adapter from all workers; the text to answer with. Requests that run with it are finished.

        Raises:
            ServingError: permission_denied; invalid_request; model_not_found: there is none; broker_unavailable;
                model_unavailable: a worker has not unloaded it in time.
        """
        self._check(caller)
        asked: UnloadAdapter = decode_body(_decode_unload, body)
        name = asked.lora_name
        async with self._lock:
            model = next((model for adapter, model in self._fleet.adapters(caller) if adapter.name == name), None)
            if model is None:
                raise model_not_found(name, [adapter.name for adapter, _ in self._fleet.adapters(caller)])
            key = adapter_key(model.name, name)
            before = await self._operators.read(key)
            flagged = self._flagged(model, name, before)
            entry = encode(AdapterEntry(name, model.name, unloaded=True, flagged=flagged))
            await self._operators.write(key, [entry] * len(before), sequences(before))
            self._operators.note("adapter unload", caller, name, "")
            await self._operators.prune(_is_spare, MOST_UNLOADED, PRUNED_AT_ONCE)
            until = time.monotonic() + LOAD_S
            while any(each.name == name for _, worker in self._workers(model) for each in worker.adapters):
                if time.monotonic() > until:
                    raise _late(f"some workers have not unloaded {name!r}")
                await asyncio.sleep(LOOK_S)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _check(self, caller: Caller) -> None:
        if caller is not ANYONE or not self._open_to_all:
            self._operators.check(
                caller, ", or start the gateway with --runtime-lora-updating" if caller is ANYONE else ""
            )

    def _workers(self, model: TextModel) -> list[tuple[int, Registration]]:
        """Those of a model that apply adapters, with their cells."""
        return [(cell, worker) for cell, worker in self._operators.workers(model) if worker.adapter_slots]

    def _flagged(self, model: TextModel, name: str, before: Iterable[Entry | None]) -> bool:
        """Whether a worker's flags name an adapter, or did when its entry was made: without the entry they count."""
        if any(
            each.name == name and not each.revision for _, worker in self._workers(model) for each in worker.adapters
        ):
            return True
        return any(decode_adapter(each.data).flagged for each in before if each is not None and each.data)

    async def _loaded(self, model: TextModel, name: str, revisions: Sequence[int]) -> tuple[str, str] | None:
        """Wait until each worker has loaded an adapter; a worker that could not, and why.

        Args:
            revisions: of its entries, by cell.
        """
        until = time.monotonic() + LOAD_S
        while True:
            states: list[tuple[Registration, LoraAdapter | None]] = []
            for cell, worker in self._workers(model):
                found = (a for a in worker.adapters if a.name == name and a.revision >= revisions[cell])
                states.append((worker, next(found, None)))
            for worker, adapter in states:
                if adapter is not None and adapter.error:
                    return worker.worker, adapter.error
            done = sum(adapter is not None for _, adapter in states)
            if states and done == len(states):
                return None
            if time.monotonic() > until:
                raise _late(f"{done} of {len(states)} workers have loaded {name!r}")
            await asyncio.sleep(LOOK_S)


def _is_spare(data: bytes) -> bool:
    try:
        entry = decode_adapter(data)
    except msgspec.MsgspecError:  # of a later build
        return False
    return entry.unloaded and not entry.flagged


def sequences(entries: Iterable[Entry | None]) -> list[int]:
    """Revisions of entries, by cell; 0: there is none."""
    return [each.seq if each is not None else 0 for each in entries]


def _late(what: str) -> ServingError:
    return ServingError(
        Code.model_unavailable,
        f"{what} within {LOAD_S:g} s; the others continue, and GET /v1/models shows what is served",
        retry_after=10.0,
    )
