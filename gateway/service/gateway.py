"""What a gateway does for both of its APIs: accept requests, follow their answers, find them again, in any cell."""

import asyncio
import math
import secrets
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.configs.settings import GatewaySettings, served_names
from penstock.gateway.access.authentication import ALL, ANYONE, Caller, Guard, Sight, TenantTable, noted_in
from penstock.gateway.admission.budgets import Budgets
from penstock.gateway.admission.charges import Charges
from penstock.gateway.admission.idempotency import Claim, reclaim
from penstock.gateway.admission.queues import check_tenant, waiting_of
from penstock.gateway.admission.rate_limits.limiter import Limiter
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.chat.segments import EndedNs, unknown
from penstock.gateway.apis.endpoints import Aggregator, Renderer, UndecidedRenderer, aggregator_for, renderer_for
from penstock.gateway.apis.images import IMAGE_PATHS
from penstock.gateway.apis.responses.objects import InputTokens
from penstock.gateway.base.chat_objects import stopping
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.base.request_bodies import BOM, COMPACTION, PrepareContext
from penstock.gateway.media.loader import MediaLoader
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.listing import Page, page_of
from penstock.gateway.request_log.lookup import StoredRequest
from penstock.gateway.service.adapters import AdapterLoading
from penstock.gateway.service.cell import LIMITS_S, SWEEP_S, Cell
from penstock.gateway.service.cell_choice import CellChooser
from penstock.gateway.service.conversations import Conversations
from penstock.gateway.service.fleet import FORGET_S, FleetView, ServedLately, named_in
from penstock.gateway.service.migration import Carrier
from penstock.gateway.service.preparation import RequestPreparer
from penstock.gateway.service.weights import WeightsControl
from penstock.infra.bus.audit import Auditor
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.tasks import Tasks
from penstock.infra.model.modeldir import ModelDir, split_name
from penstock.infra.process.turns import TurnBudget
from penstock.schemas import done
from penstock.schemas.audit import KEYS_LOST, AuditEntry
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import BY_EMBED_WORKERS, GenerateRequest, Priority, cell_in, in_cell
from penstock.schemas.summary import Criteria

log = structlog.get_logger("gateway")

T = TypeVar("T")

OPEN_AGAIN_S = 1.0
LOOK_AGAIN_S = 0.05


class CellLink(NamedTuple):
    """A gateway's connection to a cell.

    Attributes:
        connecting: ends when it is connected; None: it is.
    """

    bus: Bus
    publisher: Publisher
    connecting: "asyncio.Task[None] | None" = None


class Gateway:
    """One replica. ``open`` it, use it from one event loop, ``close`` it.

    Args:
        links: to each cell; the first is home, which has API keys, tenants, limits and claims as well.

    Attributes:
        bus: of the home cell.
        cells: by their numbers.
        active: those that take new requests.
        adapters: loads and unloads LoRA adapters.
        weights: changes weights while workers run.
        draining: no longer ready; requests that still arrive are served.
        stopped: open requests were left to other gateways.
        answering: open requests whose answers go out over HTTP.
        turns: shares the event loop's turns between new requests and running answers.
    """

    def __init__(
        self, links: Sequence[CellLink], models: Sequence[ModelDir], settings: GatewaySettings, metrics: GatewayMetrics
    ) -> None:
        self.id = f"{settings.name or 'gateway'}-{secrets.token_hex(4)}"
        self.bus = bus = links[0].bus
        self.settings = settings
        self.metrics = metrics
        self.started_ns = time.time_ns()
        self.draining = False
        self.stopped = False
        self.answering: set[InflightRequest] = set()
        self.turns = TurnBudget()
        for link in links:
            link.bus.nc.expects_more = self.turns.expects_new
        self.tasks: Tasks = bus.tasks.group("gateway")
        self.audit = Auditor(bus, self.tasks)
        self.tenants = TenantTable(bus)
        noted = noted_in(settings.state_dir, settings.namespace)
        self.guard = Guard(
            bus,
            self.tenants.known,
            always=settings.require_keys,
            noted=noted,
            own=settings.api_key,
            on_lost=self._keys_lost,
        )
        self.tenants.on_changed = self._on_tenants_changed
        named = named_models(models, settings)
        buses = [link.bus for link in links]
        self.fleet = FleetView(buses, named, self.id, settings, metrics, self.tasks, self._open_models)
        self.adapters = AdapterLoading(buses, self.fleet, self.audit, open_to_all=settings.runtime_lora_updating)
        self.weights = WeightsControl(buses, self.fleet, self.audit)
        self.limiter = Limiter(bus, self.id)
        self.budgets = Budgets(self.guard.table.keys, self.tenants.known, bus.clock.now_ns)
        self.charges = Charges(self.limiter, self._record_of, self._request_of, self.tasks, bus.clock)
        self._links = links
        self.cells = [
            Cell(
                number,
                link.bus,
                link.publisher,
                self.id,
                settings,
                metrics,
                self.turns,
                self.charges,
                self.fleet.name_in,
                self._show_queued,
                self._show_retention,
            )
            for number, link in enumerate(links)
        ]
        self._first_cell = max(0, settings.cell)
        self.active = [cell for cell in self.cells if cell.active]
        self._nearest = self.active[_nearest(settings, len(self.active))]
        self._chooser = CellChooser(buses, self._nearest.number)
        self._carriers = [
            Carrier(cell, self.cells, self.id, self._first_cell, self.fleet, self._chooser, cell.tasks)
            for cell in self.cells
            if len(links) > 1
        ]
        self._served_lately = [ServedLately(each) for each in buses]
        self._asked_for: dict[str, float] = {}  # models that are served or were lately -> monotonic time
        self.conversations = Conversations(
            self.look_up, self._answered, self.fleet.detokenizer, settings.max_body_bytes
        )
        loaders = [MediaLoader(cell.bus, settings, metrics, cell.unstored.keep_medium) for cell in self.cells]
        self._preparer = RequestPreparer(
            self.fleet,
            lambda request_id: loaders[self._numbered(request_id)],
            self.conversations,
            self.id,
            settings,
            bus.clock.now_ns,
            self._first_number,
        )

    async def open(self) -> None:
        """
        Raises:
            ServingError: a stream or a bucket cannot be read.
        """
        for cell, link in zip(self.cells, self._links, strict=True):
            if link.connecting is None:
                await self._open_cell(cell)
            elif not (link.connecting.done() and await self._could_open(cell)):
                self.tasks.spawn(self._open_later(cell, link.connecting), name=f"open-cell-{cell.number}")
        await self.guard.open(self.tasks)
        await self.limiter.open(self.tasks)
        self.tasks.spawn(self._sweep(), name="sweep")
        if len(self.cells) > 1:
            self.tasks.spawn(self._chooser.keep_asking(), name="ask-for-loads")

    async def _open_cell(self, cell: Cell) -> None:
        await cell.open()
        await self.fleet.follow(cell.number)
        self.tasks.spawn(self.budgets.follow(cell.bus), name=f"budgets-{cell.number}")
        if len(self.cells) > 1:
            await self._chooser.follow(cell.number)
            await self._carriers[cell.number].open()

    async def _could_open(self, cell: Cell) -> bool:
        try:
            await self._open_cell(cell)
        except (ServingError, NatsError, TimeoutError, OSError) as error:
            log.warning("cell_not_opened", cell=cell.number, error=repr(error), retry_in_s=OPEN_AGAIN_S)
            return False
        return True

    async def _open_later(self, cell: Cell, connecting: "asyncio.Task[None]") -> None:
        """Open a cell when its broker is there; until then the others do its work."""
        await asyncio.wait([connecting])
        while not await self._could_open(cell):  # noqa: ASYNC110 - another process
            await asyncio.sleep(OPEN_AGAIN_S)
        log.info("cell_opened", cell=cell.number)

    async def close(self) -> None:
        await self.tasks.aclose()
        await asyncio.gather(*(carrier.close() for carrier in self._carriers))
        await asyncio.gather(*(cell.close() for cell in self.cells))
        await self._preparer.close()
        await self.fleet.close()
        await self.guard.close()
        await self.limiter.close()
        await self.budgets.close()

    def _on_tenants_changed(self) -> None:
        self.guard.tenants_changed()
        for cell in self.cells:
            cell.queues.follows_tenants = any(limits.max_waiting for limits in self.tenants.known.values())

    def check_tenant(self, tenant: str) -> None:
        """
        Raises:
            ServingError: queue_full: as many of the tenant's requests wait as may.
        """
        limits = self.tenants.known.get(tenant)
        if limits is not None and limits.max_waiting:
            check_tenant(tenant, limits.max_waiting, [cell.queues.tenants for cell in self.active])

    def room_of(self, tenant: str) -> int:
        """How many more of a tenant's requests may wait."""
        limits = self.tenants.known.get(tenant)
        if limits is None or not limits.max_waiting:
            return sys.maxsize
        levels = [cell.queues.tenants for cell in self.active]
        return max(0, limits.max_waiting - waiting_of(tenant, limits.max_waiting, levels))

    def _keys_lost(self, lost: bool) -> None:
        self.metrics.keys_lost.set(lost)
        if lost:  # there, `penstock doctor` sees it without an address of this gateway
            self.audit.note(AuditEntry(KEYS_LOST, self.id))

    def cell_of(self, request_id: str) -> Cell:
        """The cell in which a request was accepted. What was accepted while there was one cell is at home.

        Raises:
            ServingError: broker_unavailable: this gateway has not reached the cell yet.
        """
        cell = self.cells[self._numbered(request_id)]
        if not cell.opened and len(self.cells) > 1:
            raise ServingError(
                Code.broker_unavailable,
                f"the broker of cell {cell.number}, where this request is, was not there since this gateway started; "
                "try again later",
                retry_after=1.0,
            )
        return cell

    def _numbered(self, request_id: str) -> int:
        """The number of a request's cell within the deployment."""
        number = cell_in(request_id) - self._first_cell if len(self.cells) > 1 else 0
        return number if 0 <= number < len(self.cells) else 0

    def _first_number(self) -> int:
        """Of the cell that a request is prepared for, as ids have it. Its media are stored there."""
        if len(self.cells) == 1:
            return self._first_cell  # also where no other cell is: one may come while the request is kept
        first = sorted(self.active, key=lambda cell: cell is not self._nearest)
        usable = (cell for cell in first if cell.serves and self.fleet.serves_in(cell.number))
        return self._first_cell + next(usable, self._nearest).number

    @property
    def open_requests(self) -> int:
        return sum(cell.open_requests for cell in self.cells)

    @property
    def has_routers(self) -> bool:
        """Whether some router takes requests."""
        return any(cell.queues.has_routers for cell in self.cells)

    @property
    def lacks_consumer(self) -> str:
        """The stream whose consumers for routers are missing; "": none."""
        return next(filter(None, (cell.queues.lacks_consumer for cell in self.cells)), "")

    def not_ready(self) -> list[str]:
        """Why a request could not be served now; empty: ready."""
        reasons = ["this gateway is shutting down"] if self.draining else []
        if not self.bus.connected:  # API keys, limits and claims are there
            return [*reasons, "the broker is not connected"]
        of_cells = [cell.not_ready() for cell in self.active]
        if all(of_cells):
            reasons += of_cells[0]
        if self.budgets.unread(time.monotonic()):
            reasons.append("what API keys and tenants have spent of their budgets is not read yet")
        if self.settings.ready_without_workers:
            return reasons
        if lacks := self.fleet.lacks:
            reasons.append(f"no {lacks} worker is there, without which the others run no request; start one")
        elif not self.fleet.has_worker():
            names = " or ".join(repr(model.name) for model in self.fleet.models) or "a model"
            reasons.append(f"no worker serves {names}; start one with 'penstock worker'")
        return reasons

    def cells_not_ready(self) -> dict[int, str]:
        """The cells of a deployment of several that take no new request now, with the reason."""
        found = {}
        for cell in self.active if len(self.cells) > 1 else ():
            reasons = cell.not_ready()
            if not reasons and not self.fleet.serves_in(cell.number):
                reasons = ["it has no worker"]
            if reasons:
                found[cell.number] = reasons[0]
        return found

    # --- accepting ---

    async def prepare(
        self,
        endpoint: str,
        body: bytes,
        *,
        no_store: bool = False,
        caller: Caller = ANYONE,
    ) -> PreparedRequest:
        """
        Args:
            no_store: as if the body asked for it.
            caller: whose request it becomes.
        Raises:
            ServingError: the body cannot be served, the queue is full, or the caller's budget is used up.
        """
        if self.stopped:
            raise stopping("")
        body = body.removeprefix(BOM)
        if self.budgets.reached:
            self.budgets.check(caller)
        self.check_tenant(caller.tenant)
        await self._check_room(body)
        try:
            prepared = await self._preparer.prepare(endpoint, body, no_store=no_store, caller=caller)
        except ServingError as error:
            without_tokens = endpoint in (*BY_EMBED_WORKERS, *IMAGE_PATHS)
            if error.code is Code.model_not_found and (without_tokens or self.fleet.learns):
                named = await self.run_for(body, named_in, body)
                if named and caller.may_name(named):
                    for cell, lately in zip(self.cells, self._served_lately, strict=True):
                        if cell.opened:
                            await self._check_lately(lately, endpoint if without_tokens else "", named)
            raise
        self._asked_for[prepared.request.model] = time.monotonic()
        if len(self.cells) == 1:
            return prepared
        await self._wait_for_home()
        if endpoint == COMPACTION or prepared.request.media:
            return prepared  # its id, or its media, are in a cell already
        return await self._placed(prepared)

    async def _check_lately(self, lately: ServedLately, endpoint: str, named: str) -> None:
        """As ``ServedLately.check``; an autoscaler sees that the model is wanted."""
        try:
            await lately.check(endpoint, named)
        except ServingError:
            self._asked_for[named] = time.monotonic()
            raise

    async def _wait_for_home(self) -> None:
        """Return when the home broker is there: it alone says which keys hold, and what their limits leave.

        Raises:
            ServingError: broker_unavailable: it is away for ``LIMITS_S``.
        """
        home, until = self.cells[0], time.monotonic() + LIMITS_S
        while not home.answers:
            if time.monotonic() > until:
                raise ServingError(
                    Code.broker_unavailable,
                    "the broker of the first cell, which has API keys, limits and idempotency keys, is away: nothing "
                    "new is accepted; try again later",
                    retry_after=1.0,
                )
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _check_room(self, body: bytes) -> None:
        """
        Raises:
            ServingError: no cell takes this request.
        """
        refused: ServingError | None = None
        for cell in self.active:
            try:
                cell.store_check.check()
                cell.queues.check_log()
                if cell.queues.class_matters:
                    await self.run_for(body, cell.queues.check_class, body)
                return
            except ServingError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    async def _placed(self, prepared: PreparedRequest) -> PreparedRequest:
        """The request in the cell that suits it best; its id says which that is."""
        request = prepared.request
        accepting = [cell for cell in self.cells if cell.accepts(request)]
        usable = self.fleet.best_of((cell.number for cell in accepting if cell.serves), request.model)
        # Without one it waits for workers or routers, but for no broker if it need not.
        chosen = await self._chooser.choose(request, usable or [cell.number for cell in accepting])
        if chosen == self._numbered(request.id):
            return prepared
        moved = msgspec.structs.replace(request, id=in_cell(request.id, self._first_cell + chosen))
        return prepared._replace(request=moved)

    async def input_tokens(self, body: bytes, caller: Caller = ANYONE) -> InputTokens:
        """Tokens of the prompt of a response, the conversation before it included.

        Raises:
            ServingError: the body cannot be served.
        """
        return InputTokens(await self._preparer.count_response(body, caller))

    async def compute(self, work: Callable[[bytes, PrepareContext], T], body: bytes, caller: Caller = ANYONE) -> T:
        """What a body says by itself, such as its number of tokens.

        Raises:
            ServingError: the body cannot be served.
        """
        return await self._preparer.compute(work, body, caller)

    async def run_for(self, body: bytes, work: Callable[..., T], *args: Any) -> T:
        """``work`` on a body, in a thread if that is large."""
        return await self._preparer.run_for(body, work, *args)

    def accepts_submissions(self) -> bool:
        """Whether a submission should be taken now."""
        return not self.draining and any(cell.queues.has_room and not cell.store_check.failing for cell in self.active)

    def room(self, priority: Priority) -> int:
        """How many more requests of a class would be taken."""
        return sum(cell.queues.room(priority) for cell in self.active)

    def hurry(self, waits: bool) -> None:
        """Whether work waits for the next place in a queue: then places are looked for more often."""
        for cell in self.cells:
            cell.queues.hurried = waits

    async def submit(self, request: GenerateRequest, *, owner: bool = True) -> InflightRequest:
        """Put a request into the log of its cell; returns when it is durable.

        Args:
            owner: the request has no other reader: it is cancelled if its acceptance is not confirmed.
        Raises:
            ServingError: it could not be stored, or too much of its tenant or class waits; it will not run.
        """
        self.check_tenant(request.tenant)  # since its body was checked, others have been accepted
        for cell in self.cells:  # what crashed the workers of one crashes those of another
            request = await cell.verdicts.check(request)
        return await self.cell_of(request.id).submit(request, owner=owner)

    def cancel_unfinished(self, inflight: InflightRequest, reason: str = "the client disconnected") -> None:
        """See ``Cell.cancel_unfinished``."""
        self.cell_of(inflight.request.id).cancel_unfinished(inflight, reason)

    def release(self, inflight: InflightRequest) -> None:
        """Stop reading, without cancelling."""
        self.cell_of(inflight.request.id).release(inflight)

    async def collected(self, inflight: InflightRequest) -> Aggregator:
        """The whole answer of an open request, by whichever model gives it.

        Raises:
            ServingError: its log cannot be read, its deadline has passed, or its model cannot be read here.
        """
        items = await inflight.take()
        request = inflight.request
        collector = aggregator_for(request, await self.fleet.detokenizer(request), ended_ns=lambda: inflight.ended_ns)
        while not collector.push(items):
            items = await inflight.take()
        return collector

    async def renderer(
        self, request: GenerateRequest, *, include_usage: bool = True, ended_ns: EndedNs = unknown
    ) -> Renderer:
        """Renders the answer of a request as events.

        Args:
            include_usage, ended_ns: as in ``renderer_for``.
        Raises:
            ServingError: unsupported: it has no events; model_unavailable: its model cannot be read here.
        """
        if not request.fallbacks:
            detokenizer = await self.fleet.detokenizer(request)
            return renderer_for(request, detokenizer, include_usage=include_usage, ended_ns=ended_ns)
        detokenizer_of = await self.fleet.detokenizers(request)
        return UndecidedRenderer(
            request,
            lambda chosen: renderer_for(chosen, detokenizer_of(chosen), include_usage=include_usage, ended_ns=ended_ns),
        )

    def stop(self) -> None:
        """Leave all requests to the pipeline: each open answer ends with the id from which it can be continued."""
        self.stopped = True
        for cell in self.cells:
            cell.stopped = True
        for inflight in self.answering:
            inflight.fail(stopping(inflight.request.id))

    # --- finding requests again ---

    async def look_up(self, request_id: str, sight: Sight = ALL, *, deleted: bool = False) -> StoredRequest:
        """An accepted request, by any gateway, and its record if it is over; see ``RequestLookup.find``."""
        return await self.cell_of(request_id).look_up(request_id, sight, deleted=deleted)

    async def attach(
        self, request: GenerateRequest, record: done.Done | None = None, **options: Any
    ) -> InflightRequest:
        """Follow an accepted request from its first token on; see ``Cell.attach``."""
        return await self.cell_of(request.id).attach(request, record, **options)

    async def read_again(self, request: GenerateRequest, last_attempt: int | None = None) -> InflightRequest:
        """Everything that the token stream has of a request; see ``Cell.read_again``."""
        return await self.cell_of(request.id).read_again(request, last_attempt)

    async def as_run(self, request: GenerateRequest) -> GenerateRequest:
        """A request without a record as the model has it that runs it.

        Raises:
            ServingError: the log cannot be read.
        """
        return (await self.read_again(request)).request if request.fallbacks else request

    async def list_requests(self, criteria: Criteria, limit: int, after: str = "") -> Page:
        """Up to ``limit`` requests of all cells; see ``page_of``."""
        return await page_of([cell.listing for cell in self.cells if cell.opened], criteria, limit, after)

    async def cancel_surely(self, request_id: str, reason: str) -> None:
        """Cancel a request with other readers; see ``Cell.cancel_surely``."""
        await self.cell_of(request_id).cancel_surely(request_id, reason)

    async def erase(self, request_id: str) -> None:
        """Have everything deleted that the log holds of a request that has ended; see ``Cell.erase``."""
        record = await self._record_of(request_id)
        for guest in done.guests_of(record) if record is not None else ():
            await self.cell_of(guest).erase(guest)
        await self.cell_of(request_id).erase(request_id)

    async def _answered(self, request: GenerateRequest) -> bool:
        return (await self.read_again(request)).answered

    async def _record_of(self, request_id: str) -> done.Done | None:
        return await self.cell_of(request_id).records.find(request_id)

    async def _request_of(self, request_id: str) -> GenerateRequest:
        return await self.cell_of(request_id).finder.find(request_id)

    # --- upkeep ---

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self._sweep_once()
            except Exception:
                log.exception("sweep_failed")

    def _sweep_once(self) -> None:
        self.fleet.refresh()
        self.budgets.look()
        open_ = Counter[str]()
        for cell in self.cells:
            open_.update(cell.open_of)
        now = time.monotonic()
        self._asked_for.update(dict.fromkeys(open_, now))
        for model in {*self._asked_for, *self.metrics.models}:
            idle_s = now - self._asked_for.get(model, -math.inf)
            if idle_s < FORGET_S or self.fleet.counted(model):
                metrics = self.metrics.of(model)
                metrics.open.set(open_[model])
                metrics.idle.set(idle_s)
            else:
                self._asked_for.pop(model, None)
                self.metrics.forget(model)

    def _show_queued(self) -> None:
        """The numbers of queued requests, of all cells."""
        queued = Counter[str]()
        for cell in self.cells:
            queued.update(cell.queues.queued)
        if len(self.metrics.models) < 2:
            self.metrics.of("").queued.set(queued.total())
            return
        for model in {*self.metrics.models, *queued}:
            self.metrics.of(model).queued.set(queued[model])

    def _show_retention(self) -> None:
        self.metrics.retention.set(min(cell.retention.kept_s for cell in self.cells))

    def _open_models(self) -> set[str]:
        return {inflight.request.model for cell in self.cells for inflight in cell.readers}


def _nearest(settings: GatewaySettings, cells: int) -> int:
    """The cell that a gateway prefers: the one that was set, else by its name, so that several gateways differ."""
    if settings.nearest_cell >= 0:
        return settings.nearest_cell % cells
    return zlib.crc32(settings.name.encode()) % cells


def named_models(models: Sequence[ModelDir], settings: GatewaySettings) -> list[tuple[tuple[str, ...], ModelDir]]:
    """The models that the operator named, with the names of each for clients."""
    names = served_names(settings.served_model_name)
    if names and len(models) == 1:
        return [(names, models[0])]
    given = [served_names(split_name(each)[0]) for each in settings.model]
    given = given if len(given) == len(models) else [()] * len(models)
    return [(own or (model.name,), model) for own, model in zip(given, models, strict=True)]


async def submit_claimed(
    gateway: Gateway, tenant: str, name: str, body: bytes | None, request: GenerateRequest, claimed: Claim
) -> InflightRequest:
    """Run a request under a claim that another gateway made before it crashed, or whose request was deleted.

    In the first case the claim's id is used, so that the request is stored once although two gateways may find this. In
    the second the log discards that id, and the request keeps its id.

    Args:
        name, body: as for ``claim``.
    Raises:
        ServingError: idempotency_conflict; or it could not be stored.
    """
    claim = await reclaim(gateway.bus, tenant, name, body, request.id, claimed)
    try:
        return await _submit_as(gateway, request, claim.request)
    except ServingError as error:
        if error.code is not Code.request_not_found:
            raise
    claim = await reclaim(gateway.bus, tenant, name, body, request.id, claimed, deleted=True)
    return await _submit_as(gateway, request, claim.request)


async def _submit_as(gateway: Gateway, request: GenerateRequest, request_id: str) -> InflightRequest:
    """Submit a request under another id, which is paid by what was reserved for its own."""
    gateway.charges.rename(request.id, request_id)
    try:
        return await gateway.submit(msgspec.structs.replace(request, id=request_id), owner=False)
    finally:
        gateway.charges.rename(request_id, request.id)  # if it was not submitted
