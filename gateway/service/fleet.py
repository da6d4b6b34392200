"""What a gateway derives from the fleet's registrations: which models there are, and which workers it uses.

A gateway serves the models that its operator named, and with ``learn_models``, or if none was named, every model that
workers register. ``RoleModels`` has the models that workers of a separate role serve (images, vectors).

A model stays known for a while after its last worker has left, so that a request that arrives while a worker is being
replaced waits in the queue instead of failing. A gateway that starts meanwhile cannot prepare a request for it, and
learns from the log that there is such a model (``ServedLately``).
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import Generic, TypeVar

import msgspec
import structlog

from penstock.configs.settings import GatewaySettings
from penstock.gateway.access.authentication import ANYONE, Caller, Sight
from penstock.gateway.apis.embeddings import paths_of
from penstock.gateway.apis.endpoints import MAY_BE_UNAPPLIED, Unapplied
from penstock.gateway.apis.images import IMAGE_PATHS
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.base.request_bodies import BOM, PrepareContext, decode_body, model_missing, model_not_found
from penstock.gateway.service.model_store import ModelStore, Source
from penstock.gateway.service.text_model import TextModel
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.infra.bus.tasks import Tasks
from penstock.infra.bus.worker_leases import RegisteredWorker, WorkerRegistry
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas import fleet, requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import token

MAX_MODELS = 256
LATELY_NS = 3_600_000_000_000  # a model whose last request is older counts as removed
LOOK_AGAIN_S = 5.0
RETRY_S = 5.0  # a worker is replaced in seconds

T = TypeVar("T")


class RoleModels(Generic[T]):
    """
    Args:
        role: of the workers.
        describe: what such a worker registers of its model; None: nothing, so it is left out.
    """

    def __init__(self, role: str, describe: Callable[[fleet.Registration], T | None]) -> None:
        self._role = role
        self._describe = describe
        self._known: dict[str, T] = {}
        self._workers: dict[str, fleet.Registration] = {}

    @property
    def known(self) -> Mapping[str, T]:
        """Models that are or were served, by each of their names; the worker that registered last counts."""
        return self._known

    def put(self, registration: fleet.Registration) -> None:
        """A worker registered, or renewed its registration."""
        if registration.role != self._role or (described := self._describe(registration)) is None:
            return
        self._workers[registration.worker] = registration
        for name in _names(registration):
            self._known[name] = described
        while len(self._known) > MAX_MODELS:
            del self._known[next(iter(self._known))]

    def remove(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def counts(self) -> Counter[str]:
        """Workers that take requests, by each name of their models."""
        workers = (each for each in self._workers.values() if each.state is fleet.WorkerState.ready)
        return Counter(name for each in workers for name in _names(each))

    def ready(self) -> dict[str, T]:
        """Models with a worker that takes requests, sorted by name."""
        workers = [each for each in self._workers.values() if each.state is fleet.WorkerState.ready]
        names = sorted({name for registration in workers for name in _names(registration)})
        return {name: self._known[name] for name in names if name in self._known}


def _names(registration: fleet.Registration) -> Iterable[str]:
    return (registration.model, *registration.aliases)


class ServedLately:
    """Whether a request for a model was accepted within the last hour, from the log. Answers are kept for 5 s."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._looked: OrderedDict[tuple[str, str], tuple[float, bool]] = OrderedDict()

    async def check(self, endpoint: str, name: str) -> None:
        """
        Args:
            endpoint: as in ``GenerateRequest``: a name may mean models of several kinds; "": any that generates text.
        Raises:
            ServingError: broker_unavailable: it was; or the log did not answer.
        """
        at, served = self._looked.get((endpoint, name), (0.0, False))
        if not at or time.monotonic() - at > LOOK_AGAIN_S:
            served = await self._look(endpoint, name)
            self._looked[endpoint, name] = (time.monotonic(), served)
            self._looked.move_to_end((endpoint, name))
            if len(self._looked) > MAX_MODELS:
                self._looked.popitem(last=False)
        if served:
            raise ServingError(
                Code.broker_unavailable,
                f"no worker of model {name[:200]!r} is there, and this gateway started after the last one had left, so "
                "it cannot prepare a request yet; try again once a worker is back",
                param="model",
                retry_after=RETRY_S,
            )

    async def _look(self, endpoint: str, name: str) -> bool:
        stream, subject = self._bus.subjects.stream("REQUESTS"), f"{self._bus.subjects.all('request')}"
        subject = subject.removesuffix(">") + f"{token(name)}.>"
        entry = await get_last(self._bus, stream, subject)
        if entry is None or entry.time_ns < self._bus.clock.now_ns() - LATELY_NS:
            return False
        try:
            request = requests.decode(entry.data)
            return request.endpoint == endpoint if endpoint else not request.output
        except msgspec.MsgspecError:  # of a later release
            return False


log = structlog.get_logger("gateway")

MAX_LEARNED = 256  # models that workers made known; the one without workers that was known longest is forgotten
FORGET_S = 3_600.0  # after its last worker left
NO_CONTEXT = 131_072  # tokens: what a body may hold while no model is known


class _Named(msgspec.Struct):
    model: str | None = None


_decode_named = msgspec.json.Decoder(_Named).decode


def named_in(body: bytes) -> str:
    """The model that a body names; "": none.

    Raises:
        ServingError: invalid_request.
    """
    found: _Named = decode_body(_decode_named, body.removeprefix(BOM))
    return found.model or ""


class FleetView:
    """Follows the workers bucket of each cell.

    Args:
        buses: of the cells.
        models: that the operator named, and the names of each for clients.
        open_models: names of the models that have open requests here.
    """

    def __init__(
        self,
        buses: Sequence[Bus],
        models: Sequence[tuple[tuple[str, ...], ModelDir]],
        gateway: str,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        tasks: Tasks,
        open_models: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self.watches = [WorkerRegistry(bus, joined=self.joined, left=self.left) for bus in buses]
        self.diffusion_models = RoleModels(fleet.DIFFUSION, lambda registration: registration.diffusion)
        self.embedding_models = RoleModels(fleet.EMBED, lambda registration: registration.embedder)
        self.learns = settings.learn_models or not models
        self.store = ModelStore(
            settings.max_models,
            settings.unload_models_s,
            tasks,
            in_use=open_models,
            loaded=self._loaded,
            unloaded=self._unloaded,
        )
        self.on_models: Callable[[], None] = lambda: None
        self._served_in: list[Mapping[str, bool] | None] = [None] * len(self.watches)  # by cell; None: not known yet
        self._gateway = gateway
        self._settings = settings
        self._metrics = metrics
        self._following = AsyncExitStack()
        self._models: dict[str, TextModel] = {}  # by canonical name
        self._by_name: dict[str, TextModel] = {}
        self._tokens: frozenset[str] = frozenset()
        self._only: TextModel | None = None
        self._apart: frozenset[str] = frozenset()  # models that generate no text, with workers
        self._empty_since: dict[str, float] = {}  # learned models without workers
        self._sources: dict[str, Source] = {}  # by tokenizer digest, for answers that were made with it
        self._ignored: bool | None = None  # whether some model ignores options; None: not computed
        for names, model in models:
            source = Source(names[0], str(model.path), model.tokenizer_digest)
            self.store.add(source, model)
            self._add(names, source)
            self._metrics.of(names[0]).loaded.set(1)

    async def follow(self, cell: int) -> None:
        """
        Raises:
            ServingError: the workers bucket of the cell cannot be read.
        """
        await self._following.enter_async_context(self.watches[cell])

    async def close(self) -> None:
        self.store.close()
        await self._following.aclose()

    def refresh(self) -> None:
        """Remove workers whose lease expired, and unused models. Refusals and conflicts are logged also without
        requests."""
        for watch in self.watches:
            watch.expire()
        for model in self._models.values():
            model.refresh()
        self.store.unload_idle()
        if self._empty_since:
            self.forget()

    # --- the models ---

    @property
    def models(self) -> Iterable[TextModel]:
        """The models that generate text, those of the operator first."""
        return self._models.values()

    @property
    def names(self) -> Sequence[str]:
        """Every name of a model that generates text, and of an adapter."""
        return [*self._by_name, *(adapter.name for adapter, _ in self.adapters())]

    @property
    def models_by_name(self) -> Mapping[str, TextModel]:
        """The models that generate text, by each of their names."""
        return self._by_name

    def find(self, name: str) -> TextModel | None:
        """
        Args:
            name: canonical, or an alias.
        """
        return self._by_name.get(name)

    def listed(self) -> Iterator[tuple[str, TextModel]]:
        """Models that generate text, by each name, that requests may be made for."""
        for name, model in self._by_name.items():
            if model.configured or (model.expected and not model.problem):
                yield name, model

    @property
    def longest(self) -> int:
        """The most tokens that prompt and output may have, of any model."""
        only = self._only
        if only is not None and (context := only.prepared_for()) is not None:
            return context.max_model_len
        return max((model.card.max_model_len for model in self._models.values()), default=0) or NO_CONTEXT

    def only_context(self) -> PrepareContext | None:
        """What bodies are prepared for where there is one model, in memory; None: a body has to say which it is for."""
        return self._only.context() if self._only is not None and not self._only.adapters else None

    async def context_for(self, name: str, caller: Caller = ANYONE) -> PrepareContext:
        """What a body is prepared for that names this model.

        Args:
            name: "": none.
        Raises:
            ServingError: model_not_found; invalid_request: several are served and it names none; model_unavailable.
        """
        model = self._chosen(name, caller)
        context = model.context() or await model.load()
        adapter = model.adapters.get(name) if name not in self._by_name else None
        return context if adapter is None else model.adapted(context, adapter)

    def adapters(self, caller: Caller = ANYONE) -> Iterator[tuple[fleet.LoraAdapter, TextModel]]:
        """LoRA adapters that requests may name, each with its model. A model goes before an adapter of its name."""
        seen = set(self._by_name)
        for model in self._models.values():
            for name, adapter in model.adapters.items():
                if name not in seen and caller.may_name(name):
                    seen.add(name)
                    yield adapter, model

    def _chosen(self, name: str, caller: Caller) -> TextModel:
        if not name:
            usable = [each for each in self._models.values() if any(map(caller.may_name, each.names))]
            if len(usable) == 1:
                return usable[0]
            raise model_missing([each.name for each in usable]) if usable else model_not_found("", ())
        model = self._named(name)
        if model is None or not caller.may_name(name):
            path = self.elsewhere().get(name, "") if caller.may_name(name) else ""
            served = [each for each in self._by_name if caller.may_name(each)]
            raise model_not_found(name, [*served, *(adapter.name for adapter, _ in self.adapters(caller))], path)
        return model

    def _named(self, name: str) -> TextModel | None:
        """The model of a name, or of the adapter that has it."""
        model = self._by_name.get(name)
        if model is not None:
            return model
        return next((each for each in self._models.values() if name in each.adapters), None)

    def elsewhere(self) -> dict[str, str]:
        """Models that generate no text, and the path to ask them at."""
        images = {name: IMAGE_PATHS[model.kind] for name, model in self.diffusion_models.known.items()}
        return images | {name: paths_of(model) for name, model in self.embedding_models.known.items()}

    async def detokenizer(self, request: GenerateRequest) -> Detokenizer | None:
        """What makes text of a request's tokens; None: its answer has none.

        Raises:
            ServingError: model_unavailable: the model cannot be read.
        """
        found = self.store.detokenizers.get(request.tokenizer)
        if found is not None or request.output:
            return found
        source = self._source_of(request, self._by_name.get(request.model))
        if source is None:
            raise _unreadable(request)
        return (await self.store.load(source)).detokenizer

    async def detokenizers(self, request: GenerateRequest) -> Callable[[GenerateRequest], Detokenizer | None]:
        """The same of a request and of its fallbacks, for whichever of them answers.

        Raises:
            ServingError: model_unavailable: none of them can be read; of the result: that one cannot.
        """
        found: dict[str, Detokenizer | None] = {}
        failure: ServingError | None = None
        for each in (request, *(requests.decode_head(other.request) for other in request.fallbacks)):
            try:
                found[each.tokenizer] = await self.detokenizer(each)
            except ServingError as error:
                failure = failure or error
        if not found and failure is not None:
            raise failure

        def chosen(one: GenerateRequest) -> Detokenizer | None:
            if one.tokenizer not in found:
                raise _unreadable(one)
            return found[one.tokenizer]

        return chosen

    def _source_of(self, request: GenerateRequest, model: TextModel | None) -> Source | None:
        """Where the tokenizer of an earlier request can be read; None: it is not known."""
        if request.tokenizer:
            if model is not None and (own := model.source) is not None and own.tokenizer == request.tokenizer:
                return own
            return self._sources.get(request.tokenizer)
        return model.source if model is not None else None

    # --- their workers ---

    def _members(self) -> Iterator[RegisteredWorker]:
        return chain.from_iterable(watch.members.values() for watch in self.watches)

    def serves_in(self, cell: int, name: str = "") -> bool:
        """Whether a cell has workers that run requests for a model.

        Args:
            name: canonical; "": any.
        """
        served = self._served(cell)
        return name in served if name else bool(served)

    def best_of(self, cells: Iterable[int], name: str, revision: str = "") -> list[int]:
        """Those of some cells that run requests for a model. Where some have both workers of a pair, these only: a
        worker of a pair that is left alone does the work of both.

        Args:
            name: canonical.
            revision: only by workers of this revision; "": of any.
        """
        served = {each: self._served(each) if not revision else self._served_by(each, revision) for each in cells}
        able = [each for each in served if name in served[each]]
        return [each for each in able if served[each][name]] or able

    def _served_by(self, cell: int, revision: str) -> Mapping[str, bool]:
        members = (each.registration for each in self.watches[cell].members.values())
        return _served(each for each in members if each.revision == revision)

    def _served(self, cell: int) -> Mapping[str, bool]:
        served = self._served_in[cell]
        if served is None:
            served = self._served_in[cell] = _served(each.registration for each in self.watches[cell].members.values())
        return served

    def has_worker(self) -> bool:
        """Whether a worker takes requests for some model. Those of images and vectors count where all are learned."""
        if any(model.ready for model in self._models.values()):
            return True
        return not any(model.configured for model in self._models.values()) and self._ready_apart()

    @property
    def lacks(self) -> str:
        """The role of a worker without which those that are there run no request; "": none, or other models run."""
        if any(model.ready for model in self._models.values()):
            return ""
        return next((model.lacks for model in self._models.values() if model.lacks), "")

    def sight(self, caller: Caller) -> Sight:
        """Which stored requests a caller may read: those of models that it may name, by whichever of their names."""
        if not caller.models:
            return Sight(caller.sees)
        named = (self._by_name.get(name) for name in caller.models)
        return Sight(caller.sees, caller.models.union(model.name for model in named if model is not None))

    def name_in(self, body: bytes) -> str:
        """Canonical name of the model that a body names; "": it names none that is served."""
        try:
            name = named_in(body)
        except ServingError:
            return ""
        model = self._named(name)
        return model.name if model is not None else name if name in self._apart else ""

    def unapplied_by(self, body: bytes, caller: Caller = ANYONE) -> Unapplied:
        """Options that the body's model or its workers do not apply. None of a model that the caller may not name."""
        if self._ignored is None:
            self._ignored = any(model.ignored_options for model in self._models.values())
        if not self._ignored and MAY_BE_UNAPPLIED(body) is None:
            return {}
        if self._only is not None and not caller.models:
            return self._only.unapplied
        try:
            return self._chosen(named_in(body), caller).unapplied
        except ServingError:
            return {}

    def workers(self) -> list[tuple[fleet.Registration, str]]:
        """All workers, by name, each with why it takes no requests of this gateway; "": it takes them."""
        used = {worker.worker for model in self._models.values() for worker in model.used}
        with_reasons = [(member.registration, self._reason(member, used)) for member in self._members()]
        return sorted(with_reasons, key=lambda entry: (entry[0].role, entry[0].name, entry[0].worker))

    def _reason(self, member: RegisteredWorker, used: set[str]) -> str:
        worker = member.registration
        if worker.state is not fleet.WorkerState.ready:
            return f"it is {worker.state.value}"
        if worker.role in fleet.APART:
            return ""
        serving = self._serving(worker)
        if not serving:
            return f"it serves {worker.model!r}, this gateway {', '.join(map(repr, self._models)) or 'no model'}"
        if worker.worker in used:
            return next((model.problem for model in serving if model.problem), "")
        if not any(fleet.reads(worker, model.tokenizer) for model in serving):
            return "its tokenizer is another one than the gateway's"
        return "it stands by: workers of another revision serve"

    def _ready_apart(self) -> bool:
        """Whether a worker takes requests for images or vectors."""
        return bool(self.diffusion_models.ready() or self.embedding_models.ready())

    def serves_elsewhere(self, model: str) -> bool:
        """Whether workers serve this model (a subject token) and only other gateways of the namespace know it.

        Models of images and vectors do not count: every gateway knows them.
        """
        if model in self._tokens:
            return False
        served = (member.registration for member in self._members())
        return any(model in (token(r.model), *map(token, r.aliases)) for r in served if r.role not in fleet.APART)

    # --- changes ---

    def joined(self, member: RegisteredWorker) -> None:
        registration = member.registration
        self._served_in = [None] * len(self.watches)
        self.diffusion_models.put(registration)
        self.embedding_models.put(registration)
        self._ignored = None
        if registration.role in fleet.APART:
            self._changed_apart()
            return
        serving = self._serving(registration)
        if not serving and self.learns and registration.role not in fleet.NO_TOKENS and self._learn(registration.model):
            serving = self._serving(registration)
        for model in serving:
            self._empty_since.pop(model.name, None)
            before = model.names
            model.put(registration)
            if model.names != before:
                self._names_changed()
            self._note(model)

    def left(self, member: RegisteredWorker, why: str) -> None:
        worker = member.registration.worker
        self._served_in = [None] * len(self.watches)
        log.info("worker_left", worker=worker, why=why)
        self.diffusion_models.remove(worker)
        self.embedding_models.remove(worker)
        self._ignored = None
        if member.registration.role in fleet.APART:
            self._changed_apart()
        for model in self._models.values():
            model.remove(worker)
            if not model.workers and not model.configured:
                self._empty_since.setdefault(model.name, time.monotonic())

    def counted(self, name: str) -> bool:
        """Whether a model is served, and so has its own series."""
        return name in self._models or name in self._apart

    def _changed_apart(self) -> None:
        counts = self.diffusion_models.counts() + self.embedding_models.counts()
        for name in counts.keys() | self._apart:
            if name not in self._models:
                self._metrics.of(name).workers.labels("serving", "").set(counts[name])
        self._apart = frozenset(counts)
        for model in self._models.values():
            model.changed()

    def _serving(self, registration: fleet.Registration) -> list[TextModel]:
        """The models for which a worker takes requests."""
        if registration.role in fleet.APART:
            return []
        names = (registration.model, *registration.aliases)
        return [model for name in dict.fromkeys(names) if (model := self._models.get(name)) is not None]

    def _learn(self, name: str) -> bool:
        """A worker made a model known; False: there are too many."""
        if sum(not each.configured for each in self._models.values()) >= MAX_LEARNED:
            oldest = min(self._empty_since, key=self._empty_since.__getitem__, default=None)
            if oldest is None:
                log.error("too_many_models", model=name, limit=MAX_LEARNED, action="it is not served here")
                return False
            self._remove(oldest)
        model = self._add((name,), None)
        log.info("model_learned", model=name)
        for member in self._members():
            if model in self._serving(member.registration):
                model.put(member.registration)
        self._names_changed()
        return True

    def _add(self, names: tuple[str, ...], source: Source | None) -> TextModel:
        model = TextModel(
            names, source, self._gateway, self._settings, self._metrics.of(names[0]), self.store, self.elsewhere
        )
        self._models[names[0]] = model
        if source is not None:
            self._sources[source.tokenizer] = source
        self._names_changed()
        return model

    def _note(self, model: TextModel) -> None:
        """Keep where a learned model can be read, and read it before it is asked for."""
        source = model.source
        if source is None or model.noted == source:
            return
        model.noted = source
        self._sources.pop(source.tokenizer, None)
        self._sources[source.tokenizer] = source
        while len(self._sources) > 2 * MAX_LEARNED:
            del self._sources[next(iter(self._sources))]
        self.store.prefetch(source)

    def _names_changed(self) -> None:
        """A canonical name goes before the same alias of another model."""
        by_name = {name: model for model in self._models.values() for name in model.names}
        by_name |= self._models
        # In the order of the models, the names of each together.
        self._by_name = {name: by_name[name] for model in self._models.values() for name in model.names}
        self._tokens = frozenset(map(token, self._by_name))
        self._only = next(iter(self._models.values())) if len(self._models) == 1 else None
        self._ignored = None
        self.on_models()

    def forget(self) -> None:
        before = time.monotonic() - FORGET_S
        for name in [name for name, since in self._empty_since.items() if since < before]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._empty_since.pop(name, None)
        if self._models.pop(name, None) is not None:
            log.info("model_forgotten", model=name, why="it has had no worker for a while")
            self._names_changed()

    def _loaded(self, source: Source, seconds: float) -> None:
        metrics = self._metrics.of(source.name)
        metrics.loaded.set(1)
        metrics.load_seconds.set(seconds)
        if (model := self._models.get(source.name)) is not None:
            model.changed()

    def _unloaded(self, source: Source) -> None:
        model = self._models.get(source.name)
        if model is None or model.source == source:
            self._metrics.of(source.name).loaded.set(0)
        if model is not None:
            model.changed()  # its context holds the model


def _served(registrations: Iterable[fleet.Registration]) -> dict[str, bool]:
    """The models that workers run requests for, by all their names, and whether each has all that its requests need:
    not only one role of a pair."""
    ready: dict[str, list[fleet.Registration]] = {}
    for each in registrations:
        if each.state is fleet.WorkerState.ready:
            for name in _names(each):
                ready.setdefault(name, []).append(each)
    whole = {"aggregated", *fleet.APART}
    roles = {name: {each.role for each in workers} for name, workers in ready.items()}
    return {
        name: bool(roles[name] & whole) or {"prefill", "decode"} <= roles[name]
        for name, workers in ready.items()
        if fleet.run_together(workers)
    }


def _unreadable(request: GenerateRequest) -> ServingError:
    return ServingError(
        Code.model_unavailable,
        f"the answer of request {request.id} cannot be read here: no worker serves model {request.model!r} with the "
        f"tokenizer that made it; start one, or a gateway with --model {request.model}=FOLDER",
        param="model",
        retry_after=10.0,
    )
