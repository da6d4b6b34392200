"""Turns a body into a request without blocking the event loop: large bodies are prepared in threads.

A thread helps if the work is Python or releases the interpreter, as the tokenizer does. Decoding JSON does neither, and
takes about 40 ns per value: a body with far more values than the model's context has tokens is refused unread. Tenants
take turns with the few threads, so that one tenant's long work does not delay another's. A small body whose chat
template takes long is prepared again in a thread.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog

from penstock.configs.settings import GatewaySettings, fallbacks_of
from penstock.gateway.access.authentication import ANYONE, Caller, Sight
from penstock.gateway.apis.chat.carried_chat import fetched_by_server
from penstock.gateway.apis.chat.prepare_chat import (
    PendingMediaRequest,
    PreparedRequest,
    attach_media,
    prepare_chat,
    prepare_completion,
)
from penstock.gateway.apis.embeddings import MAX_VALUES, TEXT_PATHS, prepare_embedding
from penstock.gateway.apis.endpoints import check_options
from penstock.gateway.apis.images import IMAGE_PATHS, prepare_images
from penstock.gateway.apis.messages import prepare_message as anthropic_chat
from penstock.gateway.apis.messages.prepare_message import prepare_message
from penstock.gateway.apis.ollama import prepare_ollama as ollama_chat
from penstock.gateway.apis.ollama.bodies import untagged
from penstock.gateway.apis.ollama.prepare_ollama import prepare_ollama
from penstock.gateway.apis.responses import chat
from penstock.gateway.apis.responses.bodies import parse_compaction, parse_response
from penstock.gateway.apis.responses.chat import brought_tools
from penstock.gateway.apis.responses.prepare_response import count_prompt_of, encode_kept, prepare_response, with_body
from penstock.gateway.apis.responses.record import encode_stored
from penstock.gateway.base.request_bodies import (
    CHAT,
    COMPACTION,
    MESSAGE,
    OLLAMA,
    RESPONSE,
    PrepareContext,
    invalid,
    rename,
)
from penstock.gateway.media.loader import Fetcher, MediaLoader
from penstock.gateway.media.sources import MediaLimits, MediaRejected
from penstock.gateway.service.constraint_check import ConstraintCheck
from penstock.gateway.service.conversations import Conversations
from penstock.gateway.service.fleet import FleetView, named_in
from penstock.infra.bounded import FairQueue, QueueLimits
from penstock.infra.text.template_sandbox import cpu_budget
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import adapter_name
from penstock.schemas.requests import BY_EMBED_WORKERS, Fallback, GenerateRequest, new_request_id, packed
from penstock.schemas.subjects import DEFAULT_TENANT
from penstock.schemas.wire import encode

log = structlog.get_logger("gateway")

T = TypeVar("T")

LIMITS = QueueLimits(entries=4_096, size_bytes=1 << 30, tenant_entries=1_024, tenant_bytes=256 << 20)
RETRY_S = 1.0


class _Job(NamedTuple):
    tenant: str
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


class FairThreads:
    """
    Args:
        threads: each competes with the event loop for the interpreter.
        per_tenant: how many of them one tenant may hold at a time; fewer than all, so that another finds one.
    """

    def __init__(self, threads: int, per_tenant: int, name: str, limits: QueueLimits = LIMITS) -> None:
        self._free = threads
        self._per_tenant = per_tenant
        self._executor = ThreadPoolExecutor(threads, name)
        self._waiting: FairQueue[_Job] = FairQueue(limits)
        self._running: Counter[str] = Counter()

    def close(self) -> None:
        """Start no waiting work. Running work ends by itself."""
        while (job := self._waiting.take()) is not None:
            job.done.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread; returns or raises what it does.

        Args:
            size_bytes: memory that the work takes while it waits.
        Raises:
            ServingError: overloaded: too much waits already.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not self._waiting.add(tenant, done, _Job(tenant, work, done), size_bytes):
            raise ServingError(Code.overloaded, "too many large requests wait to be prepared", retry_after=RETRY_S)
        self._begin()
        try:
            return await done
        finally:
            self._waiting.drop(tenant, done)  # its client has left

    def _begin(self) -> None:
        while self._free and (job := self._waiting.take(self._held)) is not None:
            self._free -= 1
            self._running[job.tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, job.work)
            running.add_done_callback(partial(self._end, job))

    def _held(self, tenant: str) -> bool:
        return self._running[tenant] >= self._per_tenant

    def _end(self, job: _Job, future: "asyncio.Future[Any]") -> None:
        self._free += 1
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        if job.done.done():
            if not future.cancelled():
                future.exception()  # no task waits for it
        elif future.cancelled():
            job.done.cancel()
        elif (error := future.exception()) is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(future.result())
        self._begin()


# Bytes; larger ones are prepared in a thread. To tokenise this many takes 0.2 ms if their words are known, else 1 ms.
LARGE_BODY = 8_192
THREADS = 3  # each competes with the event loop for the interpreter
PER_TENANT = 2  # of them
NAMED_INLINE = 131_072  # bytes; to find the model in a larger body takes more than 0.2 ms
INLINE_CPU_S = 0.005  # of the event loop, for the chat template of a small body; most take 0.1 ms
FEW_VALUES = 65_536  # in a body; this many are decoded in 3 ms
PRIVATE_S = 120.0  # for all media of a request with no_store; later, routers erase media without a request
COUNT_BYTES = 1 << 18  # searched for commas in one call, which holds the interpreter for 0.1 ms

# Of a chat's fields, for errors.
_NAMES = {RESPONSE: chat.NAMES, MESSAGE: anthropic_chat.NAMES, **dict.fromkeys(OLLAMA, ollama_chat.NAMES)}


class _OtherModel(NamedTuple):
    """A model that may run a request instead. ``request``: the request as prepared for that model."""

    context: PrepareContext
    request: GenerateRequest


class RequestPreparer:
    """Owns the threads, and the processes that try constraints; ``close`` it.

    Args:
        loader_for: stores media in the cell of a request, by its id.
        cell: number of the cell for the id of the next request.

    Attributes:
        fleet: the models that requests may name.
    """

    def __init__(
        self,
        fleet: FleetView,
        loader_for: Callable[[str], MediaLoader],
        conversations: Conversations,
        gateway: str,
        settings: GatewaySettings,
        now_ns: Callable[[], int] = time.time_ns,
        cell: Callable[[], int] = lambda: -1,
    ) -> None:
        self.fleet = fleet
        self._loader_for = loader_for
        self._conversations = conversations
        self._gateway = gateway
        self._settings = settings
        self._now_ns = now_ns
        self._cell = cell
        self._fallbacks = fallbacks_of(settings.fallback)
        self._constraints = ConstraintCheck()
        self._threads = FairThreads(THREADS, PER_TENANT, "prepare")

    async def close(self) -> None:
        self._threads.close()
        await self._constraints.close()

    async def prepare(
        self,
        endpoint: str,
        body: bytes,
        *,
        no_store: bool = False,
        caller: Caller = ANYONE,
        other: "_OtherModel | None" = None,
    ) -> PreparedRequest:
        """
        Args:
            no_store: as if the body asked for it.
            caller: whose request it becomes.
            other: to prepare a request for text for, as its fallback; None: the one that the body names.
        Raises:
            ServingError: the body cannot be served.
        """
        now_ns = self._now_ns() if other is None else other.request.created_ns
        request_id = new_request_id(now_ns, cell=self._cell()) if other is None else other.request.id
        if self._settings.strict_options:
            await self.run_for(body, check_options, endpoint, body, tenant=caller.tenant)
        if endpoint in IMAGE_PATHS:
            models = {name: each for name, each in self.fleet.diffusion_models.known.items() if caller.may_name(name)}
            prepared = await self.run_for(
                body,
                prepare_images,
                endpoint,
                body,
                models,
                gateway=self._gateway,
                default_deadline_s=self._settings.default_deadline_s,
                now_ns=now_ns,
                request_id=request_id,
                no_store=no_store or self._settings.always_no_store,
                tenant=caller.tenant,
            )
            return prepared if caller is ANYONE else prepared._replace(request=caller.own(prepared.request))
        if endpoint in BY_EMBED_WORKERS:
            return await self._embedding(
                endpoint, body, caller, now_ns=now_ns, request_id=request_id, no_store=no_store
            )
        if other is not None:
            context, asked = other.context, ""
        else:
            context, asked = await self._context(body, caller, tagged=endpoint in OLLAMA)
        if no_store and not context.no_store:
            context = context._replace(no_store=True)
        while True:
            if endpoint in (RESPONSE, COMPACTION):
                prepared = await self._response(
                    endpoint, body, context, self.fleet.sight(caller), now_ns=now_ns, request_id=request_id
                )
            elif endpoint == MESSAGE:
                prepared = await self._message(body, context, now_ns=now_ns, request_id=request_id)
            elif endpoint in OLLAMA:
                prepared = await self._ollama(endpoint, body, context, now_ns=now_ns, request_id=request_id)
            else:
                work = prepare_chat if endpoint == CHAT else prepare_completion
                found = await self._render_for(
                    body, work, body, context, now_ns=now_ns, request_id=request_id, tenant=context.tenant
                )
                prepared = await self._with_media(found, context) if isinstance(found, PendingMediaRequest) else found
            if prepared.wanted is None:
                break
            field = rename(prepared.wanted.field, _NAMES.get(endpoint, {}))
            loosened = await self._constraints.check(prepared.wanted, prepared.request.tenant, field)
            if not loosened:
                break
            if context.loosened:
                raise invalid("tools", "the tools' schemas cannot be compiled; make them simpler")
            context = context._replace(loosened=loosened)
        for part in fetched_by_server(prepared.request.chat) if context.carries_chat else ():
            try:
                await Fetcher(MediaLimits.of(self._settings)).check(part.url)
            except MediaRejected as error:
                raise error.to_error(rename(part.field, _NAMES.get(endpoint, {}))) from None
        if other is not None or not self._fallbacks or endpoint == COMPACTION:
            return prepared
        return await self._with_fallbacks(prepared, endpoint, body, context, asked, caller)

    async def _with_fallbacks(
        self, prepared: PreparedRequest, endpoint: str, body: bytes, context: PrepareContext, asked: str, caller: Caller
    ) -> PreparedRequest:
        """The request with its fallbacks, as far as its caller may name them.

        Args:
            context: that the request was prepared in.
            asked: the requested model, if only its fallbacks are known; "": ``context`` is of that model.
        """
        names = (asked,) if asked else (adapter_name(context.adapter),) if context.adapter else context.names
        others = next((self._fallbacks[name] for name in names if name in self._fallbacks), ())
        request = prepared.request
        if not others or request.worker:  # the request names a worker, so no other may run it
            return prepared
        known = [*names, *context.names]
        found: dict[str, Fallback] = {}
        for name in others:
            try:
                own = caller.context(await self.fleet.context_for(name, caller))
                if own.names[0] in (request.model, *found) and not own.adapter:
                    continue
                instead = _OtherModel(own._replace(names=[*own.names, *known]), prepared.request)
                other = await self.prepare(endpoint, body, no_store=context.no_store, caller=caller, other=instead)
            except ServingError as error:  # it is not there, or takes no such request
                log.debug("fallback_not_prepared", model=name, request=request.id, error=error.message)
                continue
            found[other.request.model] = Fallback(other.request.model, encode(packed(other.request)))
        request = msgspec.structs.replace(
            request, fallbacks=tuple(found.values()), fallback_after_s=self._settings.fallback_after_s, asked=asked
        )
        return prepared._replace(request=request)

    async def _embedding(
        self, endpoint: str, body: bytes, caller: Caller, *, now_ns: int, request_id: str, no_store: bool
    ) -> PreparedRequest:
        fleet = self.fleet
        others = fleet.elsewhere() | dict.fromkeys(fleet.names, TEXT_PATHS)
        work = partial(
            prepare_embedding,
            body,
            {name: each for name, each in fleet.embedding_models.known.items() if caller.may_name(name)},
            gateway=self._gateway,
            default_deadline_s=self._settings.default_deadline_s,
            now_ns=now_ns,
            endpoint=endpoint,
            others={name: paths for name, paths in others.items() if caller.may_name(name)},
            no_store=no_store or self._settings.always_no_store,
            request_id=request_id,
        )
        if len(body) <= LARGE_BODY:
            prepared = work()
        else:
            checked = partial(_checked, body, MAX_VALUES, work, "the most that embeddings take")
            prepared = await self._in_thread(caller.tenant, len(body), checked)
        return prepared._replace(request=caller.own(prepared.request))

    async def _response(
        self,
        endpoint: str,
        body: bytes,
        context: PrepareContext,
        sight: Sight,
        *,
        now_ns: int,
        request_id: str,
    ) -> PreparedRequest:
        compacts = endpoint == COMPACTION
        parse = parse_compaction if compacts else parse_response
        asked = await self.run_for(body, parse, body, tenant=context.tenant)
        if asked.background and context.no_store:  # by the header or the gateway's setting
            raise invalid(
                "background",
                "a response in the background has to be stored, so that it can be fetched later, and this one must not "
                "be (X-Penstock-No-Store, or --always-no-store of the gateway)",
            )
        history = await self._conversations.history(asked.previous_response_id, sight)
        asked, named_bytes = await self._conversations.without_references(asked, sight)

        def work() -> tuple[PreparedRequest | PendingMediaRequest, bytes]:
            """The request, and what is stored of its body."""
            made = prepare_response(
                asked, history.turns, context, now_ns=now_ns, request_id=request_id, compacts=compacts
            )
            if compacts:
                return made, encode_kept(asked, history.turns, request_id)
            tools = brought_tools(asked, history.turns).tools
            return made, encode_stored(asked, history.ancestors, history.size, tools)

        if (more := history.size + named_bytes) > LARGE_BODY:
            prepared, stored = await self._in_thread(context.tenant, len(body) + more, work)
        else:
            prepared, stored = await self._render_for(body, work, tenant=context.tenant)
        if isinstance(prepared, PendingMediaRequest):
            prepared = await self._with_media(prepared, context)
        return with_body(prepared, endpoint, stored)._replace(detached=bool(asked.background))

    async def _message(self, body: bytes, context: PrepareContext, *, now_ns: int, request_id: str) -> PreparedRequest:
        found = await self._render_for(
            body, prepare_message, body, context, now_ns=now_ns, request_id=request_id, tenant=context.tenant
        )
        prepared = found.prepared
        if isinstance(prepared, PendingMediaRequest):
            prepared = await self._with_media(prepared, found.context)
        return with_body(prepared, MESSAGE, found.client_body)

    async def _ollama(
        self, endpoint: str, body: bytes, context: PrepareContext, *, now_ns: int, request_id: str
    ) -> PreparedRequest:
        work = partial(prepare_ollama, endpoint, body, context, now_ns=now_ns, request_id=request_id)
        found = await self._render_for(body, work, tenant=context.tenant)
        prepared = found.prepared
        if isinstance(prepared, PendingMediaRequest):
            prepared = await self._with_media(prepared, found.context)
        return with_body(prepared, endpoint, b"")

    async def count_response(self, body: bytes, caller: Caller = ANYONE) -> int:
        """Tokens of a response's prompt.

        Raises:
            ServingError: the body cannot be served.
        """
        asked = await self.run_for(body, parse_response, body, tenant=caller.tenant)
        sight = self.fleet.sight(caller)
        history = await self._conversations.history(asked.previous_response_id, sight)
        asked, named_bytes = await self._conversations.without_references(asked, sight)
        context, _ = await self._context(body, caller)
        work = partial(count_prompt_of, asked, history.turns, context)
        return await self._in_thread(caller.tenant, len(body) + history.size + named_bytes, work)

    async def compute(self, work: Callable[[bytes, PrepareContext], T], body: bytes, caller: Caller = ANYONE) -> T:
        """Run ``work`` on a body and the context of its model.

        Raises:
            ServingError: the body cannot be served.
        """
        context, _ = await self._context(body, caller)
        return await self._render_for(body, work, body, context, tenant=caller.tenant)

    async def _context(self, body: bytes, caller: Caller, *, tagged: bool = False) -> tuple[PrepareContext, str]:
        """The context of the model that a body names; and that name, if only fallbacks of the model are available.

        Args:
            tagged: the name may end with a tag.
        Raises:
            ServingError: see ``FleetView.context_for``; the body is not JSON.
        """
        base, asked = self.fleet.only_context() if not self._fallbacks else None, ""
        if base is None:
            if len(body) <= NAMED_INLINE:
                name = named_in(body)
            else:
                name = await self.run_for(body, named_in, body, tenant=caller.tenant)
            name = untagged(name, (*self.fleet.names, *self._fallbacks)) if tagged else name
            try:
                base = await self.fleet.context_for(name, caller)
            except ServingError as error:
                asked, base = name, await self._context_instead(name, caller, error)
                return caller.context(base)._replace(names=[*base.names, name]), asked
        return caller.context(base), asked

    async def _context_instead(self, name: str, caller: Caller, error: ServingError) -> PrepareContext:
        """The context of the first readable fallback of a model that is unknown here, or cannot be read.

        Args:
            error: why the model itself cannot be served.
        Raises:
            ServingError: ``error``, if no fallback can be read.
        """
        if error.code in (Code.model_not_found, Code.model_unavailable) and caller.may_name(name):
            for each in self._fallbacks.get(name, ()):
                with contextlib.suppress(ServingError):
                    return await self.fleet.context_for(each, caller)
        raise error

    async def run_for(
        self, body: bytes, work: Callable[..., T], *args: Any, tenant: str = DEFAULT_TENANT, **options: Any
    ) -> T:
        """Run ``work``, which decodes a body, in a thread if the body is large.

        Args:
            tenant: whose turn of the threads it takes.
        Raises:
            ServingError: context_length_exceeded: the body has too many values. overloaded: too many wait for a thread.
        """
        if len(body) <= LARGE_BODY:
            return work(*args, **options)
        limit, meaning = max(FEW_VALUES, 2 * self.fleet.longest), _TWICE
        if limit < MAX_VALUES and self.fleet.embedding_models.known:  # the endpoint is not known yet
            limit, meaning = MAX_VALUES, "the most that embeddings take"
        checked = partial(_checked, body, limit, partial(work, *args, **options), meaning)
        return await self._in_thread(tenant, len(body), checked)

    async def _render_for(
        self, body: bytes, work: Callable[..., T], *args: Any, tenant: str = DEFAULT_TENANT, **options: Any
    ) -> T:
        """Like ``run_for``, for work that renders a chat template; uses a thread also if rendering takes long."""
        if len(body) <= LARGE_BODY:
            budget = cpu_budget(INLINE_CPU_S)
            try:
                with budget:
                    return work(*args, **options)
            except ServingError:
                if not budget.spent:
                    raise
            return await self._in_thread(tenant, len(body), partial(work, *args, **options))
        return await self.run_for(body, work, *args, tenant=tenant, **options)

    async def _in_thread(self, tenant: str, size_bytes: int, work: Callable[[], T]) -> T:
        return await self._threads.run(tenant, size_bytes, partial(_within, self._settings.template_cpu_s, work))

    async def _with_media(self, pending: PendingMediaRequest, context: PrepareContext) -> PreparedRequest:
        """The request once its media are loaded and stored."""
        assert context.model.vision is not None
        left_s = pending.deadline_s - (self._now_ns() - pending.now_ns) / 1e9
        try:
            async with asyncio.timeout(left_s):
                owner = ""
                if pending.no_store:
                    assert pending.request_id is not None
                    owner = pending.request_id
                loader = self._loader_for(pending.request_id)
                async with asyncio.timeout(PRIVATE_S if owner else None):
                    media = await loader.load(pending.prompt.media, context.model.vision, left_s, owner)
        except TimeoutError:
            raise ServingError(
                Code.deadline_exceeded, "the images and videos did not arrive before the deadline"
            ) from None
        size_bytes = 8 * len(pending.prompt.tokens)
        return await self._in_thread(context.tenant, size_bytes, partial(attach_media, pending, media, context))


def _within(cpu_s: float, work: Callable[[], T]) -> T:
    with cpu_budget(cpu_s):
        return work()


_TWICE = "twice what the model's context can hold"


def _checked(body: bytes, limit: int, work: Callable[[], T], meaning: str = _TWICE) -> T:
    check_values(body, limit, meaning)
    return work()


def check_values(body: bytes, limit: int, meaning: str = _TWICE) -> None:
    """Refuse a body whose decoding would block the event loop. The number of commas nearly bounds the number of values.

    Text has commas too, but at least two tokens for each, so whatever fits into the context passes.

    Raises:
        ServingError: context_length_exceeded: more than ``limit`` commas.
    """
    count = 0
    for at in range(0, len(body), COUNT_BYTES):
        count += body.count(b",", at, at + COUNT_BYTES)
        if count > limit:
            raise ServingError(
                Code.context_length_exceeded, f"the body has more than {limit} values or commas, which is {meaning}"
            )
