"""One model that generates text, as a gateway knows it: its workers, and what bodies are prepared for.

A worker is used if it has the gateway's own tokenizer and runs the serving revision (``penstock.schemas.fleet``).
Workers of another revision stand by until the serving one has no worker left. A worker with another tokenizer is never
used: the same token ids mean different text to it.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import structlog

from penstock.configs.settings import GatewaySettings
from penstock.gateway.apis.endpoints import Unapplied, unapplied_options
from penstock.gateway.base.gateway_metrics import ModelMetrics
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.gateway.service.model_store import Loaded, ModelStore, Source
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.text.parsers.families import TABLE, reasoning_parser, tool_call_parser
from penstock.infra.text.parsers.registry import ParserNames, agreed_parsers
from penstock.schemas import fleet
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import CARRIED_CHAT

log = structlog.get_logger("gateway")


class WorkerSelection(NamedTuple):
    """
    Attributes:
        revision: "": no worker is there, or none names its revision.
        ready: one takes requests, alone or together with another.
        lacks: the role of a worker without which those that are there run no request; "": none.
        canary: ready workers of the revision that came last of those that stand by.
    """

    used: list[fleet.Registration]
    revision: str
    ready: bool
    lacks: str = ""
    canary: Sequence[fleet.Registration] = ()


def lacking(workers: Iterable[fleet.Registration]) -> str:
    """The role of the worker that workers of pairs need to run requests; "": some run them, or none is ready."""
    ready = [each for each in workers if each.state is fleet.WorkerState.ready and each.role not in fleet.NO_TOKENS]
    alone = {each.role for each in ready if each.pair_only}
    if len(alone) != 1 or not all(each.pair_only for each in ready):
        return ""
    return "decode" if "prefill" in alone else "prefill"


def _latest(workers: Iterable[fleet.Registration], serving: str | None) -> list[fleet.Registration]:
    """The ready workers of the revision that registered last, the serving one aside; empty: they run no request."""
    ready = [each for each in workers if each.state is fleet.WorkerState.ready and each.revision != serving]
    last = max(ready, key=lambda each: (each.epoch, each.worker), default=None)
    of_it = [each for each in ready if last is not None and each.revision == last.revision]
    return of_it if fleet.run_together(each for each in of_it if each.role not in fleet.NO_TOKENS) else []


class Roster:
    """Selects again whenever a worker registers, changes or leaves, and logs what changed."""

    def __init__(self, model: str, metrics: ModelMetrics) -> None:
        self._model = model
        self._tokenizer = ""
        self._metrics = metrics
        self._refused: dict[str, str] = {}  # worker -> its tokenizer
        self._serving: str | None = None
        self._standing_by: frozenset[str] = frozenset()

    def select(self, workers: Iterable[fleet.Registration], tokenizer: str) -> WorkerSelection:
        """
        Args:
            workers: that serve the model's name.
            tokenizer: digest of the gateway's own; "": unknown, and all are used.
        """
        if tokenizer != self._tokenizer:
            self._refuse([])
            self._tokenizer = tokenizer
        compatible: list[fleet.Registration] = []
        refused: list[fleet.Registration] = []
        for worker in workers:
            (compatible if fleet.reads(worker, self._tokenizer) else refused).append(worker)
        candidates = fleet.revisions(compatible, self._tokenizer)
        serving = self._serving if candidates.serving is None else candidates.serving  # all are leaving: as it was
        self._refuse(refused)
        self._report_revisions(serving, candidates.present, compatible)
        used = [worker for worker in compatible if worker.revision == serving]
        lacks = lacking(used)
        ready = candidates.serving is not None and not lacks
        return WorkerSelection(used or compatible, serving or "", ready, lacks, _latest(compatible, serving))

    def _refuse(self, refused: list[fleet.Registration]) -> None:
        gauge = self._metrics.refused
        tokenizers = {worker.worker: worker.tokenizer for worker in refused}
        for name, tokenizer in self._refused.items():
            if tokenizers.get(name) != tokenizer:
                gauge.remove(name, tokenizer, self._tokenizer)
        for name, tokenizer in tokenizers.items():
            if self._refused.get(name) != tokenizer:
                gauge.labels(name, tokenizer, self._tokenizer).set(1)
                log.error(
                    "worker_refused",
                    worker=name,
                    model=self._model,
                    tokenizer=tokenizer,
                    expected=self._tokenizer,
                    reason="it serves this model's name with another tokenizer; give it the gateway's model directory, "
                    "or another --served-model-name",
                )
        self._refused = tokenizers

    def _report_revisions(
        self, serving: str | None, present: frozenset[str], workers: list[fleet.Registration]
    ) -> None:
        if serving != self._serving:
            log.info("revision_serving", model=self._model, revision=serving, before=self._serving)
            self._serving = serving
        standing_by = present - {serving}
        for revision in sorted(standing_by - self._standing_by):
            log.warning(
                "revision_stands_by",
                model=self._model,
                revision=revision,
                serving=serving,
                workers=sorted(worker.worker for worker in workers if worker.revision == revision),
                action="it takes over when the last worker of the serving revision drains or ends",
            )
        self._standing_by = standing_by
        gauge = self._metrics.workers
        gauge.clear()
        for worker in workers:
            gauge.labels("serving" if worker.revision == serving else "standby", worker.revision).inc()


class Card:
    """What clients can read about a model, also while it is not in memory."""

    __slots__ = ("images", "max_model_len")

    def __init__(self, max_model_len: int = 0, images: bool = False) -> None:
        self.max_model_len = max_model_len
        self.images = images


class TextModel:
    """Derived values are computed again on the first access after a change.

    Args:
        names: for clients; the first is canonical. Of a model that workers made known they come from these.
        source: where it is read from; None: its workers say.
        elsewhere: models that generate no text, and the path to ask them at.

    Attributes:
        configured: the operator named it with ``--model``.
        workers: that serve it, by id.
        noted: the last source for which it was prefetched.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        source: Source | None,
        gateway: str,
        settings: GatewaySettings,
        metrics: ModelMetrics,
        store: ModelStore,
        elsewhere: Callable[[], Mapping[str, str]],
    ) -> None:
        self.configured = source is not None
        self.workers: dict[str, fleet.Registration] = {}
        self.noted = source
        self._names = names
        self._source = source
        self._looked = self.configured  # ``_source`` is as the workers say
        self._gateway = gateway
        self._settings = settings
        self._store = store
        self._elsewhere = elsewhere
        self._roster = Roster(names[0], metrics)
        self._selection: WorkerSelection | None = None
        self._context: PrepareContext | None = None
        self._canary: PrepareContext | None = None  # for a share of the requests
        self._canary_share = float(settings.canary.removesuffix("%") or 0) / 100
        self._loaded: Loaded | None = None
        self._ignored: frozenset[str] | None = None
        self._unapplied: tuple[PrepareContext | None, Unapplied] | None = None  # with what it is of
        self._adapters: dict[str, fleet.LoraAdapter] | None = None
        self._adapted: dict[str, PrepareContext] = {}  # by id of the adapter, of ``_context``
        self._has_generated = self.configured  # a worker has been ready for it
        self._card = Card()
        self._carries_chat = False
        self._parsers: ParserNames | None = None  # None: neither a worker nor the template has said
        self._conflicts: set[frozenset[ParserNames]] = set()  # that were logged
        self._unknown: set[str] = set()  # parsers, likewise

    @property
    def name(self) -> str:
        return self._names[0]

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def put(self, registration: fleet.Registration) -> None:
        """A worker that serves it registered, or changed."""
        self.workers[registration.worker] = registration
        self.changed()

    def remove(self, worker: str) -> None:
        if self.workers.pop(worker, None) is not None:
            self.changed()

    def changed(self) -> None:
        self._selection = self._context = self._loaded = self._ignored = self._unapplied = self._adapters = None
        self._adapted = {}
        if not self.configured:
            self._looked = False
            aliases = (alias for each in self.workers.values() if each.model == self.name for alias in each.aliases)
            self._names = tuple(dict.fromkeys((self.name, *aliases))) if self.workers else self._names

    # --- its workers ---

    @property
    def ready(self) -> bool:
        """Whether a worker takes requests for it."""
        return self._select().ready

    @property
    def lacks(self) -> str:
        """The role of a worker without which those that are there run no request; "": none."""
        return self._select().lacks

    @property
    def used(self) -> list[fleet.Registration]:
        return self._select().used

    @property
    def ignored_options(self) -> frozenset[str]:
        """Options that a worker announces as without effect there; any worker may get a request."""
        if self._ignored is None:
            self._ignored = frozenset(name for each in self._select().used for name in each.ignored_options)
        return self._ignored

    @property
    def unapplied(self) -> Unapplied:
        """Options without effect: those, and what the model itself does nothing with."""
        context = self.prepared_for()
        if self._unapplied is None or self._unapplied[0] is not context:
            self._unapplied = context, unapplied_options(context, self.ignored_options)
        return self._unapplied[1]

    @property
    def adapters(self) -> Mapping[str, fleet.LoraAdapter]:
        """Its LoRA adapters, by name. While some workers have another one of that name than others, the one counts
        that was loaded last: requests with it go to workers that have it."""
        if self._adapters is None:
            found: dict[str, fleet.LoraAdapter] = {}
            for each in chain.from_iterable(w.adapters for w in self._select().used if w.role not in fleet.NO_TOKENS):
                if each.digest and (each.name not in found or _newness(each) > _newness(found[each.name])):
                    found[each.name] = each
            self._adapters = dict(sorted(found.items()))
        return self._adapters

    def adapted(self, context: PrepareContext, adapter: fleet.LoraAdapter) -> PrepareContext:
        """What a body is prepared for that names an adapter.

        Args:
            context: of the model.
        """
        found = self._adapted.get(adapter.id)
        if found is None:
            if len(self._adapted) > len(self.adapters):
                self._adapted.clear()
            found = self._adapted[adapter.id] = context._replace(adapter=adapter.id)
        return found

    @property
    def tokenizer(self) -> str:
        """Digest of the tokenizer that prompts are made with; "": unknown."""
        source = self.source
        loaded = self._store.peek(source) if source is not None else None
        return loaded.tokenizer_digest if loaded is not None else source.tokenizer if source is not None else ""

    def refresh(self) -> None:
        """Conflicts are logged even while no request comes."""
        self._select()
        if self.source is not None and self._store.peek(self.source) is not None:
            self.prepared_for()

    def _select(self) -> WorkerSelection:
        if self._selection is None:
            self._selection = self._roster.select(self.workers.values(), self.tokenizer)
            self._has_generated |= self._selection.ready
        return self._selection

    # --- the model itself ---

    @property
    def source(self) -> Source | None:
        """Where it is read from; None: no worker has said."""
        if not self._looked:
            self._looked = True
            self._source = self._learned() or self._source
        return self._source

    def _learned(self) -> Source | None:
        """As the ready worker says that registered first, or else one that is leaving."""
        known = [each for each in self.workers.values() if each.source and each.role not in fleet.NO_TOKENS]

        def order(each: fleet.Registration) -> tuple[bool, bool, int, str]:
            return each.state is not fleet.WorkerState.ready, each.model != self.name, each.epoch, each.worker

        first = min(known, key=order, default=None)
        if first is None:
            return None
        now = self._source
        if now is not None and any(each.tokenizer == now.tokenizer and each.source == now.folder for each in known):
            ready = {each.tokenizer for each in known if each.state is fleet.WorkerState.ready}
            if not ready or now.tokenizer in ready:
                return now  # it is in memory, and as good
        return Source(self.name, first.source, first.tokenizer, first.host)

    @property
    def expected(self) -> bool:
        """Whether requests for it are accepted although no worker may be there: one is, or was, or will be."""
        return self._has_generated or self._select().ready

    @property
    def problem(self) -> str:
        """Why it cannot be served, however many workers it has; "": it can, or was not tried."""
        source = self.source
        if source is None:
            return "its workers do not say where it can be read; use --model"
        return self._store.why_not(source)

    @property
    def card(self) -> Card:
        source = self.source
        loaded = self._store.peek(source) if source is not None else None
        if loaded is not None:
            longest = loaded.max_model_len
            if self._carries_chat and (used := self._select().used):
                longest = max(each.max_model_len for each in used)  # the folder may be of another model
            self._card = Card(longest, loaded.vision is not None)
        elif not self._card.max_model_len:
            used = self._select().used
            return Card(max((each.max_model_len for each in used), default=0), any(each.vision for each in used))
        return self._card

    def context(self) -> PrepareContext | None:
        """What a body is prepared for; None: the model is not in memory."""
        context, loaded = self._context, self._loaded
        if context is None or loaded is None:
            return self._contextualised()
        if not loaded.pinned:
            loaded.used = self._store.clock()
        if self._canary is not None and random.random() < self._canary_share:
            return self._canary
        return context

    def _contextualised(self) -> PrepareContext | None:
        source = self.source
        self._loaded = loaded = self._store.get(source) if source is not None else None
        if loaded is None:
            return None
        self._context = context = self._make_context(loaded.model)
        self._canary = None
        if self._canary_share and (canary := self._select().canary) and not self.adapters:
            self._canary = self._make_context(loaded.model, list(canary))
        return context

    def prepared_for(self) -> PrepareContext | None:
        """The same, for what is no use of the model."""
        source = self.source
        model = self._store.peek(source) if source is not None else None
        if model is None:
            return None
        if self._context is None:
            self._context = self._make_context(model)
        return self._context

    async def load(self) -> PrepareContext:
        """What a body is prepared for, once the model is in memory.

        Raises:
            ServingError: model_unavailable.
        """
        while True:
            context = self.context()
            if context is not None:
                return context
            if (source := self.source) is None:
                raise _nowhere(self.name)
            await self._store.load(source)

    def _make_context(self, model: ModelDir, canary: list[fleet.Registration] | None = None) -> PrepareContext:
        used, revision = self._select()[:2]
        if canary:
            used, revision = canary, canary[0].revision
        settings = self._settings
        parsers = self._agreed(model, used)
        workers = [each for each in used if each.role not in fleet.NO_TOKENS]  # others cannot say what an output may be
        if workers:  # as the one says whose parsers count
            first = min(workers, key=lambda each: (each.epoch, each.worker))
            self._carries_chat = CARRIED_CHAT in first.logits_processors
        return PrepareContext(
            model,
            self._names,
            self._gateway,
            block_size=workers[0].block_size if workers else settings.block_size,
            default_max_tokens=settings.default_max_tokens,
            clamp_max_tokens=settings.clamp_max_tokens,
            default_deadline_s=settings.default_deadline_s,
            worker_max_model_len=max((w.max_model_len for w in workers), default=0),
            revision=revision if used else "",
            max_images=settings.max_images,
            max_videos=settings.max_videos,
            max_messages=settings.max_messages,
            logits_processors=frozenset(name for w in workers for name in w.logits_processors) if workers else None,
            parsers=parsers if any(parsers) else None,
            special_tokens_as_text=settings.special_tokens_in_messages == "text",
            no_store=settings.always_no_store,
            reasoning_fields="" if settings.reasoning_fields == "auto" else settings.reasoning_fields,
            elsewhere=self._elsewhere(),
            carries_chat=self._carries_chat,
        )

    def _agreed(self, model: ModelDir, workers: list[fleet.Registration]) -> ParserNames:
        """How answers are written. It does not change because no worker is there at the moment: as the last one said,
        or as any would say of this template. Else a forced call would be refused, and an answer's constraint be
        another.
        """
        parsers, named = agreed_parsers(workers)
        if named:
            self._parsers = parsers
        elif self._parsers is None:
            template = model.template.suited(tools=True).source if model.template is not None else ""
            self._parsers = ParserNames(reasoning_parser(fleet.AUTO, template), tool_call_parser(fleet.AUTO, template))
        unknown = sorted({name for pair in named for name in pair if name and TABLE.find(name) is None} - self._unknown)
        if unknown:
            self._unknown.update(unknown)
            log.warning(
                "workers_name_unknown_parsers",
                model=self.name,
                parsers=unknown,
                fix="give the gateway --parser-families too",
            )
        if len(named) > 1 and named not in self._conflicts:
            self._conflicts.add(named)
            log.warning("workers_name_different_parsers", model=self.name, parsers=sorted(named), used=parsers)
        return self._parsers


def _newness(adapter: fleet.LoraAdapter) -> tuple[bool, int, str]:
    """A worker that could not load it again has an older one."""
    return not adapter.error, adapter.revision, adapter.digest


def _nowhere(name: str) -> ServingError:
    return ServingError(
        Code.model_unavailable,
        f"model {name[:200]!r} cannot be served at the moment: its workers do not say "
        f"where it can be read; start the gateway with --model {name}=FOLDER",
        param="model",
        retry_after=10.0,
    )
