"""The LoRA adapters of a worker: those that its flags name, and what an operator has loaded and unloaded meanwhile.

The latter are entries of a bucket on the broker, so that every worker of the model follows them, and finds them again
after a restart. An entry names a folder, which each worker reads from its own disk or a shared one, within
``--lora-folder`` only. What a worker has read is known by a digest of its content: requests name that, too, so workers
whose folders differ never take each other's requests.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.model.adapter import CONFIG, AdapterError, AdapterFolder, check_name, read_adapter
from penstock.schemas import fleet
from penstock.schemas.errors import ServingError
from penstock.schemas.fleet import AdapterEntry, LoraAdapter
from penstock.workers.engines.engine_protocol import AdapterEngine, Engine, EngineError

log = structlog.get_logger("adapters")

BUCKET = "adapters"
# A router may have placed a request just before it learns that its adapter is gone: it runs if it comes within this.
RETIRE_S = 5.0
RETRY_S = 5.0  # until entries are read again that could not be read
MOST_REASON = 500  # characters of an error in a registration, whatever stands in an adapter's files


class _Wanted(NamedTuple):
    """``path``: as it was named; ``revision``: of the entry that names it, 0: the worker's flags do."""

    path: str
    revision: int


def flagged(settings: WorkerSettings) -> dict[str, str]:
    """Folders by the adapters' names, of ``--lora`` and of the folders in ``--lora-folder``.

    Raises:
        AdapterError: a flag is malformed, or there is no such folder.
    """
    found: dict[str, str] = {}
    if settings.lora_folder:
        folder = Path(settings.lora_folder).expanduser()
        if not folder.is_dir():
            raise AdapterError(f"--lora-folder {settings.lora_folder}: there is no such folder")
        found = {each.name: each.name for each in sorted(folder.iterdir()) if (each / CONFIG).is_file()}
    for each in settings.lora:
        name, equals, path = each.partition("=")
        if not equals or not path:
            raise AdapterError(f"--lora {each!r}: write it as NAME=FOLDER")
        found[name.strip()] = path.strip()
    return found


class AdapterTable:
    """Keeps an engine's adapters as flags and entries say. Used in the event loop.

    Args:
        call: runs a function in the engine thread.
        names: of the worker's model, the canonical one first.
        changed: publishes the registration again.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        call: Callable[[Callable[[Engine], None]], "Future[None]"],
        settings: WorkerSettings,
        names: tuple[str, ...],
        changed: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.slots = engine.slots
        self._engine = engine
        self._call = call
        self._most = settings.max_cpu_loras
        self._root = Path(settings.lora_folder).expanduser().resolve() if settings.lora_folder else None
        self._flags = settings.lora
        self._flagged = flagged(settings)
        self._names = names
        self._changed = changed
        self._entries: dict[str, tuple[AdapterEntry, int]] = {}  # by key
        self._known: dict[str, LoraAdapter] = {}  # by name
        self._wanted: dict[str, _Wanted] = {}  # of ``_known``
        self._retiring: dict[str, asyncio.TimerHandle] = {}  # by id
        self._bus: Bus | None = None
        self._tail: LogTail | None = None
        self._news = asyncio.Event()
        self._reconciling = asyncio.Lock()

    def registered(self) -> tuple[LoraAdapter, ...]:
        loaded = self._engine.loaded
        return tuple(msgspec.structs.replace(each, loaded=each.id in loaded) for each in self._known.values())

    async def start(self) -> None:
        """Load what the flags name.

        Raises:
            AdapterError: ``--lora`` names one that cannot be served.
        """
        await self._reconcile()
        named = {each.partition("=")[0].strip() for each in self._flags}
        for adapter in self._known.values():
            if adapter.name in named and adapter.error:
                raise AdapterError(f"--lora {adapter.name}: {adapter.error}")

    async def follow(self, bus: Bus) -> None:
        """Follow the entries on the broker, and load what they name. Those of before hold while none can be read."""
        again, self._bus = self._bus is bus, bus
        before, self._entries = self._entries, {}
        key = f"$KV.{bus.subjects.bucket(BUCKET)}."
        tail = LogTail.of_bucket(bus, BUCKET, lambda entry: self._on_entry(key, entry), lambda: self._entries.clear())
        try:
            await tail.start()
        except ServingError as error:
            self._entries = before
            if not again:
                log.warning(
                    "adapters_not_followed",
                    error=error.message,
                    effect=f"adapters stay as they are; it is tried again every {RETRY_S:g} s",
                    action="run 'penstock streams apply', and give the broker's users their new rights",
                )
        else:
            self._tail = tail
        await self._reconcile()

    async def keep(self) -> None:
        """Load and unload as entries change; runs until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._tail is None else None):
                    await self._news.wait()
            known = self.registered()
            if self._tail is None and self._bus is not None:
                await self.follow(self._bus)
            if await self._reconcile() or self.registered() != known:
                await self._changed()

    async def unfollow(self) -> None:
        if self._tail is not None:
            await self._tail.stop()
        self._tail = self._bus = None

    def _on_entry(self, prefix: str, entry: Entry) -> None:
        key = entry.subject.removeprefix(prefix)
        self._news.set()
        if not entry.data:
            before = self._entries.get(key)
            # Old entries of unloaded adapters are removed: what was unloaded here stays so, whatever flags name.
            if before is not None and not (before[0].unloaded and before[0].name in self._flagged):
                del self._entries[key]
            return
        try:
            value = fleet.decode_adapter(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("adapter_entry_unreadable", key=key, error=str(error))
            return
        if value.model in self._names:
            self._entries[key] = value, entry.seq

    # --- what is wanted, and what is ---

    def _targets(self) -> dict[str, _Wanted]:
        wanted = {name: _Wanted(path, 0) for name, path in self._flagged.items()}
        for entry, revision in self._entries.values():
            if entry.unloaded:
                wanted.pop(entry.name, None)
            else:
                wanted[entry.name] = _Wanted(entry.path, revision)
        return wanted

    async def _reconcile(self) -> bool:
        """Make the engine's adapters those that are wanted; True: something changed."""
        changed = False
        async with self._reconciling:
            self._news.clear()
            wanted = self._targets()
            for name in [name for name in self._known if name not in wanted]:
                self._retire(self._known.pop(name))
                del self._wanted[name]
                changed = True
            for name, target in wanted.items():
                if self._wanted.get(name) != target:
                    await self._load(name, target)
                    changed = True
        return changed

    async def _load(self, name: str, target: _Wanted) -> None:
        before = self._known.get(name)
        self._wanted[name] = target
        try:
            adapter = await self._added(name, target, before)
        except Exception as error:  # its files can hold anything: the worker and its other adapters continue
            message = str(error) if isinstance(error, (AdapterError, EngineError)) else repr(error)
            reason = message[:MOST_REASON]
            log.error("adapter_failed", adapter=name, folder=target.path, error=reason)
            kept = before if before is not None else LoraAdapter(name, root=target.path)
            self._known[name] = msgspec.structs.replace(kept, revision=target.revision, error=reason)
            return
        self._known[name] = adapter
        if before is not None and before.id != adapter.id:
            self._retire(before)
        log.info("adapter_loaded", adapter=adapter.id, folder=target.path)

    async def _added(self, name: str, target: _Wanted, before: LoraAdapter | None) -> LoraAdapter:
        """
        Raises:
            AdapterError, EngineError: it cannot be served. Others: its folder or its files are not what they should be.
        """
        check_name(name, self._names)
        serving = sum(bool(each.digest) for each in self._known.values())
        if serving >= self._most and (before is None or not before.digest):
            raise AdapterError(f"{serving} adapters are in host memory, which --max-cpu-loras limits; unload some")
        folder = self._within(name, target)

        def read() -> tuple[AdapterFolder, object]:
            found = read_adapter(folder, self._engine.max_rank)
            prepared = self._engine.prepare(found, fleet.adapter_id(name, found.digest))
            again = read_adapter(folder, self._engine.max_rank)
            if again.digest != found.digest:  # its blocks would have the name of another's
                raise AdapterError(f"{folder} changed while it was read; load the adapter again when it is complete")
            return found, prepared

        found, prepared = await asyncio.to_thread(read)
        adapter = LoraAdapter(name, found.digest, target.path, target.revision)
        if (retiring := self._retiring.pop(adapter.id, None)) is not None:
            retiring.cancel()

        def add(engine: Engine) -> None:
            assert engine.adapters is not None
            engine.adapters.add(adapter.id, prepared)

        await asyncio.wrap_future(self._call(add))
        return adapter

    def _within(self, name: str, target: _Wanted) -> Path:
        """The folder of an adapter. Other than flags, entries come from the network: they name folders within
        ``--lora-folder`` only, also behind symbolic links.

        Raises:
            AdapterError: it is outside.
        """
        in_folder = self._root is not None and not any(each.startswith(f"{name}=") for each in self._flags)
        if not target.revision and not in_folder:
            return Path(target.path).expanduser()
        if self._root is None:
            raise AdapterError("this worker has no --lora-folder, within which adapters are loaded while it runs")
        folder = (self._root / target.path).resolve()
        if target.revision and not folder.is_relative_to(self._root):
            raise AdapterError(f"{target.path!r} is not within the worker's --lora-folder {self._root}")
        return folder

    def _retire(self, adapter: LoraAdapter) -> None:
        """Take no more requests with an adapter, once those that are on their way have come."""
        if not adapter.digest:
            return
        log.info("adapter_unloaded", adapter=adapter.id)

        def remove(engine: Engine) -> None:
            assert engine.adapters is not None
            engine.adapters.remove(adapter.id)

        def gone() -> None:
            self._retiring.pop(adapter.id, None)
            self._call(remove)

        self._retiring[adapter.id] = asyncio.get_running_loop().call_later(RETIRE_S, gone)

    def close(self) -> None:
        for timer in self._retiring.values():
            timer.cancel()
