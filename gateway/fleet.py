"""What a gateway derives from the fleet's registrations: which workers it uses, and what bodies are prepared for."""

from contextlib import AsyncExitStack

import structlog

from configs.settings import GatewaySettings
from gateway.embeddings.prepare import PATH as EMBEDDINGS
from gateway.images.prepare import PATHS as IMAGE_PATHS
from gateway.metrics import Metrics
from gateway.openai.prepare_context import PrepareContext
from gateway.role_models import RoleModels
from gateway.roster import Roster, WorkerSelection
from infra.bus.connection import Bus
from infra.bus.registry import RegisteredWorker, WorkerRegistry
from infra.bus.revisions import reads
from infra.model.modeldir import ModelDir
from infra.model.parser_detection import reasoning_parser, tool_call_parser
from infra.model.parsers.families import TABLE
from infra.model.parsers.registry import ParserNames, agreed_parsers
from schemas.fleet import APART, DIFFUSION, EMBED, Registration, State
from schemas.parser_names import AUTO
from schemas.subjects import token

log = structlog.get_logger("gateway")


class FleetView:
    """Follows the workers bucket. Derived values are computed again on the first access after a change.

    Attributes:
        names: of the model; the first is canonical.
    """

    def __init__(
        self,
        bus: Bus,
        model: ModelDir,
        gateway: str,
        names: tuple[str, ...],
        settings: GatewaySettings,
        metrics: Metrics,
    ) -> None:
        self.names = names
        self.watch = WorkerRegistry(bus, joined=self._joined, left=self._left)
        self.diffusion_models = RoleModels(DIFFUSION, lambda registration: registration.diffusion)
        self.embedding_models = RoleModels(EMBED, lambda registration: registration.embedder)
        self._model = model
        self._gateway = gateway
        self._settings = settings
        self._roster = Roster(names[0], model.tokenizer_digest, metrics)
        self._following = AsyncExitStack()
        self._selection: WorkerSelection | None = None
        self._context: PrepareContext | None = None
        self._ignored: frozenset[str] | None = None
        self._has_generated = False  # a worker has been ready for the language model
        # How answers are written does not change because no worker is there at the moment: as the last one said, or as
        # any would say of this template. Else a forced call would be refused, and an answer's constraint be another.
        template = model.template.suited(tools=True).source if model.template is not None else ""
        self._parsers = ParserNames(reasoning_parser(AUTO, template), tool_call_parser(AUTO, template))
        self._conflicts: set[frozenset[ParserNames]] = set()  # that were logged
        self._unknown: set[str] = set()  # parsers, likewise

    async def open(self) -> None:
        """
        Raises:
            ServingError: the workers bucket cannot be read.
        """
        await self._following.enter_async_context(self.watch)

    async def close(self) -> None:
        await self._following.aclose()

    def refresh(self) -> None:
        """Remove workers whose lease expired. Refusals and conflicts are logged even while no request comes."""
        self.watch.expire()
        self.prepare_context  # noqa: B018 - computed for what it logs

    def has_worker(self) -> bool:
        """Whether a worker takes requests for the model, or, where no language model was configured, for any other."""
        if not self._settings.model and self._ready_apart():
            return True
        return self._select().ready

    @property
    def lacks(self) -> str:
        """The role of a worker without which those that are there run no request; "": none."""
        return self._select().lacks

    @property
    def ignored_options(self) -> frozenset[str]:
        """Options that a worker of the model announces as without effect there; any worker may get a request."""
        if self._ignored is None:
            self._ignored = frozenset(name for each in self._select().used for name in each.ignored_options)
        return self._ignored

    def workers(self) -> list[tuple[Registration, str]]:
        """All workers, by name, each with why it takes no requests of this gateway; "": it takes them."""
        used = {worker.worker for worker in self._select().used}
        with_reasons = [(member.registration, self._reason(member, used)) for member in self.watch.members.values()]
        return sorted(with_reasons, key=lambda entry: (entry[0].role, entry[0].name, entry[0].worker))

    def _reason(self, member: RegisteredWorker, used: set[str]) -> str:
        worker = member.registration
        if worker.state is not State.ready:
            return f"it is {worker.state.value}"
        if worker.role in APART or worker.worker in used:
            return ""
        if not self._serves(member):
            return f"it serves {worker.model!r}, this gateway {self.names[0]!r}"
        if not reads(worker, self._model.tokenizer_digest):
            return "its tokenizer is another one than the gateway's"
        return "it stands by: workers of another revision serve"

    @property
    def listed_names(self) -> tuple[str, ...]:
        """Names of the language model; none where none was configured and no worker has generated text.

        Requests for it are then refused: they would wait for a worker that nobody starts.
        """
        expected = self._settings.model or self._select().ready or self._has_generated
        return () if not expected and self._ready_apart() else self.names

    def _ready_apart(self) -> bool:
        """Whether a worker takes requests for images or vectors."""
        return bool(self.diffusion_models.ready() or self.embedding_models.ready())

    def serves_elsewhere(self, model: str) -> bool:
        """Whether workers serve this model (a subject token) and only other gateways of the namespace know it.

        Models of images and vectors do not count: every gateway knows them.
        """
        if model in map(token, self.names):
            return False
        served = (member.registration for member in self.watch.members.values())
        return any(model in (token(r.model), *map(token, r.aliases)) for r in served if r.role not in APART)

    @property
    def prepare_context(self) -> PrepareContext:
        if self._context is None:
            self._context = self._make_context()
        return self._context

    def _joined(self, member: RegisteredWorker) -> None:
        self.diffusion_models.put(member.registration)
        self.embedding_models.put(member.registration)
        self._selection = self._context = self._ignored = None

    def _left(self, member: RegisteredWorker, why: str) -> None:
        log.info("worker_left", worker=member.registration.worker, why=why)
        self.diffusion_models.remove(member.registration.worker)
        self.embedding_models.remove(member.registration.worker)
        self._selection = self._context = self._ignored = None

    def _serves(self, member: RegisteredWorker) -> bool:
        registration = member.registration
        return registration.role not in APART and self.names[0] in (registration.model, *registration.aliases)

    def _select(self) -> WorkerSelection:
        if self._selection is None:
            serving = (member.registration for member in self.watch.members.values() if self._serves(member))
            self._selection = self._roster.select(serving)
            self._has_generated |= self._selection.ready
        return self._selection

    def _make_context(self) -> PrepareContext:
        workers, revision = self._select()[:2]
        parsers, named = agreed_parsers(workers)
        if named:
            self._parsers = parsers
        unknown = sorted({name for pair in named for name in pair if name and TABLE.find(name) is None} - self._unknown)
        if unknown:
            self._unknown.update(unknown)
            log.warning("workers_name_unknown_parsers", parsers=unknown, fix="give the gateway --parser-families too")
        if len(named) > 1 and named not in self._conflicts:
            self._conflicts.add(named)
            log.warning("workers_name_different_parsers", parsers=sorted(named), used=parsers)
        settings = self._settings
        return PrepareContext(
            self._model,
            self.listed_names,
            self._gateway,
            block_size=workers[0].block_size if workers else settings.block_size,
            default_max_tokens=settings.default_max_tokens,
            default_deadline_s=settings.default_deadline_s,
            worker_max_model_len=max((w.max_model_len for w in workers), default=0),
            revision=revision if workers else "",
            max_images=settings.max_images,
            max_messages=settings.max_messages,
            logits_processors=frozenset(name for w in workers for name in w.logits_processors) if workers else None,
            parsers=self._parsers if any(self._parsers) else None,
            special_tokens_as_text=settings.special_tokens_in_messages == "text",
            no_store=settings.always_no_store,
            reasoning_fields="" if settings.reasoning_fields == "auto" else settings.reasoning_fields,
            elsewhere={name: IMAGE_PATHS[model.kind] for name, model in self.diffusion_models.known.items()}
            | dict.fromkeys(self.embedding_models.known, EMBEDDINGS),
        )
