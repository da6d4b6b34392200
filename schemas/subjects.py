"""Subject names. Each deployment has a namespace; several can share a NATS server."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

_TOKEN = re.compile(r"[^A-Za-z0-9_-]+")
_NAMESPACE = re.compile(r"[a-z][a-z0-9_-]{0,31}")
Namespace = Annotated[
    str,
    msgspec.Meta(
        pattern=f"^{_NAMESPACE.pattern}$", title="a lower-case word of at most 32 letters, digits, '_' or '-'"
    ),
]

HEADER_REPLY_TO = "Penstock-Reply-To"
HEADER_FINAL = "Penstock-Final"
HEADER_EVENT_ID = "Penstock-Event-Id"
HEADER_SEQ = "Penstock-Seq"
HEADER_FROM = "Penstock-From"
HEADER_IGNORED = "Penstock-Ignored-Options"
HEADER_ERROR = "Penstock-Error"
HEADER_RETRY_AFTER = "Penstock-Retry-After"  # of an error: whole seconds
HEADER_RECORD = "Penstock-Record"
HEADER_REQUEST = "Penstock-Request-Id"
HEADER_LOAD = "Penstock-Load"
HEADER_RETURNED = "Penstock-Returned"
HEADER_CRASHED = "Penstock-Crashed"
HEADER_GONE = "Penstock-Gone"  # a worker whose process has ended
HEADER_SUSPECT = "Penstock-Suspect"
HEADER_RECORDED_TIME = "Penstock-Recorded-Time"
HEADER_NO_STORE = "Penstock-No-Store"
HEADER_KEY = "Penstock-Key"  # the public part of an API key of the tenant that asks
HEADER_PART = "Penstock-Part"
HEADER_SUMMARY = "Penstock-Summary"
HEADER_CONTENT_TYPE = "Content-Type"
HEADER_MSG_ID = "Nats-Msg-Id"
HEADER_LAST_ON_SUBJECT = "Nats-Expected-Last-Subject-Sequence"

DEFAULT_TENANT = "default"


MEMORY = "memory"  # begins the subjects, and the token addresses, of what lies in memory storage
KEPT = "kept"  # appended to a job's message id in the id of its copy


def token(name: str) -> str:
    """A name as one subject token: characters with a meaning in NATS (dots, blanks, wildcards) become "_"."""
    return _TOKEN.sub("_", name) or "_"


def adapter_key(model: str, name: str) -> str:
    """The key of an adapter in its bucket: readable, and different for different names."""
    digest = hashlib.sha256(f"{model}\0{name}".encode()).hexdigest()[:16]
    return f"{token(name)}-{digest}"


def weights_key(model: str) -> str:
    """The key of a model in the ``weights`` bucket, likewise."""
    return f"{token(model)}-{hashlib.sha256(model.encode()).hexdigest()[:16]}"


def cell_namespace(namespace: str, cell: int) -> str:
    """The namespace of a deployment's cell; its first cell, home, has the deployment's own."""
    return f"{namespace}-{cell}" if cell else namespace


def in_memory(address: str) -> bool:
    """Whether the output of a token address is in memory storage."""
    return address.startswith(f"{MEMORY}.")


def _shard(request: str) -> str:
    """One of 4,096 shards: three random digits of the id."""
    return token(request[-3:])


def request_of(headers: Mapping[str, str]) -> str:
    """The request that a stored message is about, with whose id its message id begins; "": it has none."""
    return headers.get(HEADER_MSG_ID, "").partition(":")[0]


def inbox_prefix(role: str) -> str:
    """Where a process of this role receives answers, apart from those of others; NATS clients keep the default."""
    return "_INBOX" if role == "client" else f"_INBOX_{role}"


@dataclass(frozen=True, slots=True)
class Subjects:
    """All subjects of one namespace.

    Raises:
        ValueError: the namespace is not a lower-case word of at most 32 letters, digits, "_" or "-".
    """

    namespace: str = "ps"

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError(
                f"namespace {self.namespace!r}: use a lower-case word of at most 32 letters, digits, '_' or '-'"
            )

    def submit(self, model: str, tenant: str = "") -> str:
        """A submission: as its client publishes it, or (with ``tenant``) as the pipeline's account receives it."""
        return self.tenant_subject("submit", tenant, token(model))

    def tenant_subject(self, kind: str, tenant: str, *rest: str) -> str:
        """A subject of the NATS API. The imports of the tenant's account insert its token."""
        return ".".join([self.namespace, kind, *([tenant] if tenant else []), *rest])

    def answer(self, key: str, tenant: str = "") -> str:
        return self.tenant_subject("answer", tenant, key)

    def mailbox(self, tenant: str, subject: str) -> str:
        """Where the gateway publishes what should arrive at ``subject`` in the tenant's account."""
        return f"{self.namespace}.to.{tenant}.{subject}"

    def request(self, model: str, priority: str, request: str) -> str:
        """An accepted request, in the shard of its id.

        A few thousand shards cost the server nothing; a subject per request would cost it 250 bytes each, for a day.
        """
        return f"{self.namespace}.request.{token(model)}.{priority}.{_shard(request)}"

    def shard_of(self, request: str) -> str:
        """All requests in the shard of this one."""
        return f"{self.namespace}.request.*.*.{_shard(request)}"

    def work(self, role: str, worker: str) -> str:
        return f"{self.namespace}.work.{role}.{worker}"

    def kept(self, role: str, worker: str) -> str:
        """A copy of a running job, for the router that may have to place it again. No worker reads it."""
        return f"{self.namespace}.work.{KEPT}.{role}.{worker}"

    def kv(self, model: str, worker: str) -> str:
        return f"{self.namespace}.kv.{token(model)}.{worker}"

    def tokens(self, address: str) -> str:
        """Where output goes; ``address``: of a request (``GenerateRequest.token_address``), or a gateway's id."""
        kind, dot, gateway = address.partition(".")
        if kind == MEMORY and dot:
            return f"{self.namespace}.{MEMORY}.tokens.{gateway}"
        return f"{self.namespace}.tokens.{address}"

    def tokens_stream(self, address: str) -> str:
        """The name of the stream with the output of an address."""
        return self.stream("MEMORY_TOKENS" if in_memory(address) else "TOKENS")

    def contents(self, gateway: str, request: str, part: str) -> str:
        """A part of the content of a request with ``no_store``, in memory storage.

        Args:
            gateway: that accepted it.
            part: "request", or the message of an attempt (``penstock.schemas.contents``).
        """
        return f"{self.namespace}.{MEMORY}.contents.{gateway}.{request}.{part}"

    def done(self, tenant: str, model: str, request: str) -> str:
        """The terminal event of one request: its only message there, ever."""
        return f"{self.namespace}.done.{token(tenant)}.{token(model)}.{token(request)}"

    def done_of(self, request: str) -> str:
        """The terminal event of a request, of any tenant and model."""
        return f"{self.namespace}.done.*.*.{token(request)}"

    def returned(self, model: str) -> str:
        return f"{self.namespace}.returned.{token(model)}"

    def plan(self, model: str) -> str:
        """The decisions about a model's workers."""
        return f"{self.namespace}.plan.{token(model)}"

    def planner(self, model: str) -> str:
        """The lease of the model's planner in the ``planners`` bucket, as a subject."""
        return f"$KV.{self.bucket('planners')}.{token(model)}"

    def handoff(self, worker: str) -> str:
        return f"{self.namespace}.handoff.{worker}"

    def control(self, worker: str) -> str:
        return f"{self.namespace}.ctl.{worker}"

    def drain(self, worker: str) -> str:
        """Where a worker receives orders to drain, sleep and wake, also from users without rights on ``control``."""
        return f"{self.namespace}.drain.{worker}"

    def audit(self, user: str) -> str:
        """Where a user of the broker writes its entries of the audit log. No other may publish there."""
        return f"{self.namespace}.audit.{token(user)}"

    def usage(self, number: int) -> str:
        """A part of the ledger of usage."""
        return f"{self.namespace}.usage.{number:08}"

    @property
    def ended(self) -> str:
        """The terminal events of all requests as they are republished: headers without bodies."""
        return self.live(self.all("done"))

    def batch(self, tenant: str, batch: str) -> str:
        """The log of one batch of requests."""
        return f"{self.namespace}.batches.{tenant}.{batch}"

    def routed(self, router: str) -> str:
        """Where a router receives the requests that another one read for it. Their replies acknowledge them."""
        return f"{self.namespace}.routed.{router}"

    def progress(self, gateway: str) -> str:
        """Where a gateway reports the progress of a request."""
        return f"{self.namespace}.progress.{gateway}"

    @property
    def reading(self) -> str:
        """Where gateways announce the readers of answers, so that no reader is served twice."""
        return f"{self.namespace}.reading"

    @property
    def erase(self) -> str:
        """Where gateways ask routers to erase a request that has ended."""
        return f"{self.namespace}.erase"

    @property
    def verdict(self) -> str:
        """Where gateways announce poisonous requests that must not be stored."""
        return f"{self.namespace}.verdict"

    @property
    def cancel(self) -> str:
        return f"{self.namespace}.cancel"

    @property
    def loads(self) -> str:
        """Where a cell's routers publish the loads of its workers, for gateways that choose between cells."""
        return f"{self.namespace}.loads"

    @property
    def cost(self) -> str:
        """Where gateways that choose between cells ask a cell's router for the cost of a request there.

        An empty message asks for ``loads`` for the next seconds.
        """
        return f"{self.namespace}.cost"

    @property
    def room(self) -> str:
        """Where a cell's router asks gateways which other cells have room for its held requests."""
        return f"{self.namespace}.room"

    def lease(self, worker: str) -> str:
        """The worker's key in the ``workers`` bucket, as a subject."""
        return f"$KV.{self.bucket('workers')}.{worker}"

    def reply(self, name: str) -> str:
        """Where NATS clients may request answers, besides their inboxes."""
        return f"{self.namespace}.reply.{name}"

    def stream(self, name: str) -> str:
        """A stream's name: the namespace in front, since stream names are global to an account."""
        return f"{self.namespace}_{name}"

    def bucket(self, name: str) -> str:
        return f"{self.namespace}_{name}"

    @property
    def awaited(self) -> str:
        """The stream that is made last: where it is, all are."""
        return f"KV_{self.bucket('workers')}"

    def all(self, kind: str) -> str:
        """Every subject of one kind ("work", "kv", ...)."""
        return f"{self.namespace}.{kind}.>"

    def live(self, subject: str) -> str:
        """Where the server republishes messages stored under ``subject`` (wildcards allowed)."""
        if subject.startswith("$KV."):
            _, bucket, key = subject.split(".", 2)
            kind = "bucket" if bucket == self.bucket("workers") else bucket.removeprefix(f"{self.namespace}_")
            return f"{self.namespace}.live.{kind}.{key}"
        head = self.namespace + "."
        assert subject.startswith(head), subject
        tail = subject[len(head) :]
        return f"{head}live.{tail.removeprefix('tokens.')}" if tail.startswith("tokens.") else f"{head}live.{tail}"
