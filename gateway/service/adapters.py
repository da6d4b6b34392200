"""LoRA adapters that an operator loads and unloads while workers run, in vLLM's form.

What is asked for is stored in a bucket of each cell, which workers follow, also after a restart. Then the gateway waits
for the workers' registrations: they say what was loaded, or why it was not.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
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
from penstock.infra.bus.direct_get import Entry, get_last
from penstock.infra.bus.jetstream import compare_and_set
from penstock.infra.model.adapter import AdapterError, check_name
from penstock.schemas.audit import AuditEntry
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import AdapterEntry, LoraAdapter, Registration
from penstock.schemas.subjects import adapter_key
from penstock.schemas.wire import encode

BUCKET = "adapters"
WRITE_S = 5.0
LOAD_S = 60.0  # for all workers to load an adapter
LOOK_S = 0.05


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


class AdapterLoading:
    """
    Args:
        buses: of the cells.
        open_to_all: also callers without an API key may change adapters, while no keys are in use.
    """

    def __init__(self, buses: Sequence[Bus], fleet: FleetView, audit: Auditor, *, open_to_all: bool) -> None:
        self._buses = buses
        self._fleet = fleet
        self._audit = audit
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
        model, name = self._model(asked.model), asked.lora_name
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
            if not any(self._workers(model, cell) for cell in range(len(self._buses))):
                raise ServingError(
                    Code.unsupported,
                    f"no worker of model {model.name!r} loads LoRA adapters; start workers with --lora-folder",
                )
            before = await self._read(model, name)
            revisions = await self._write(model, AdapterEntry(name, model.name, asked.lora_path), before)
            self._note("adapter load", caller, name, asked.lora_path)
            failed = await self._loaded(model, name, revisions)
            if failed is not None:
                previous = [each.data if each is not None else b"" for each in before]
                await self._restore(model, name, previous, revisions)
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
            before = await self._read(model, name)
            await self._write(model, AdapterEntry(name, model.name, unloaded=True), before)
            self._note("adapter unload", caller, name, "")
            until = time.monotonic() + LOAD_S
            while any(each.name == name for _, workers in self._cells(model) for w in workers for each in w.adapters):
                if time.monotonic() > until:
                    raise _late(f"some workers have not unloaded {name!r}")
                await asyncio.sleep(LOOK_S)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _check(self, caller: Caller) -> None:
        operator = caller is not ANYONE and caller.sees is None
        if not operator and not (caller is ANYONE and self._open_to_all):
            hint = "send an operator's API key ('penstock keys create --operator')"
            more = ", or start the gateway with --runtime-lora-updating" if caller is ANYONE else ""
            raise ServingError(Code.permission_denied, f"only an operator loads and unloads adapters: {hint}{more}")

    def _note(self, action: str, caller: Caller, name: str, detail: str) -> None:
        if caller is not ANYONE:
            key = caller.key.prefix if caller.key is not None else "a key of the gateway's own"
            self._audit.note(AuditEntry(action, name, detail, key=key))

    def _model(self, name: str) -> TextModel:
        models = [each for each in self._fleet.models if each.expected]
        if name:
            found = self._fleet.find(name)
            if found is None:
                raise model_not_found(name, [each.name for each in models])
            return found
        if len(models) != 1:
            raise model_missing([each.name for each in models])
        return models[0]

    # --- the workers ---

    def _cells(self, model: TextModel) -> Iterator[tuple[int, list[Registration]]]:
        for cell in range(len(self._buses)):
            yield cell, self._workers(model, cell)

    def _workers(self, model: TextModel, cell: int) -> list[Registration]:
        """Those of a model that apply adapters."""
        members = (each.registration for each in self._fleet.watches[cell].members.values())
        return [each for each in members if each.adapter_slots and each.worker in model.workers]

    async def _loaded(self, model: TextModel, name: str, revisions: Sequence[int]) -> tuple[str, str] | None:
        """Wait until each worker has loaded an adapter; a worker that could not, and why.

        Args:
            revisions: of its entries, by cell.
        """
        until = time.monotonic() + LOAD_S
        while True:
            states: list[tuple[Registration, LoraAdapter | None]] = []
            for cell, workers in self._cells(model):
                for worker in workers:
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

    # --- the entries ---

    def _subject(self, bus: Bus, model: TextModel, name: str) -> str:
        return f"$KV.{bus.subjects.bucket(BUCKET)}.{adapter_key(model.name, name)}"

    async def _read(self, model: TextModel, name: str) -> list[Entry | None]:
        """The entries of an adapter, by cell."""
        return [
            await get_last(
                bus,
                f"KV_{bus.subjects.bucket(BUCKET)}",
                self._subject(bus, model, name),
                newest=True,
                within_s=WRITE_S,
            )
            for bus in self._buses
        ]

    async def _write(self, model: TextModel, entry: AdapterEntry, before: Sequence[Entry | None]) -> list[int]:
        return [
            await self._put(bus, self._subject(bus, model, entry.name), encode(entry), each.seq if each else 0)
            for bus, each in zip(self._buses, before, strict=True)
        ]

    async def _restore(self, model: TextModel, name: str, previous: Sequence[bytes], revisions: Sequence[int]) -> None:
        for bus, data, revision in zip(self._buses, previous, revisions, strict=True):
            await self._put(bus, self._subject(bus, model, name), data, revision)

    async def _put(self, bus: Bus, subject: str, data: bytes, revision: int) -> int:
        """
        Raises:
            ServingError: broker_unavailable: not stored, or not confirmed.
        """
        try:
            reply = await compare_and_set(bus, subject, data, revision, WRITE_S)
        except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            raise _unavailable(repr(error)) from None
        if reply.error is not None:
            raise _unavailable(str(reply.error))
        return reply.seq


def _late(what: str) -> ServingError:
    return ServingError(
        Code.model_unavailable,
        f"{what} within {LOAD_S:g} s; the others go on, and GET /v1/models shows what is served",
        retry_after=10.0,
    )


def _unavailable(reason: str) -> ServingError:
    return ServingError(
        Code.broker_unavailable,
        f"the adapter could not be stored on the broker ({reason}); has it its streams ('penstock streams apply')?",
        retry_after=1.0,
    )
