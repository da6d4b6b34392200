"""Subject names. One namespace is one deployment; several share a NATS server without touching."""

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"[^A-Za-z0-9_-]+")
_NAMESPACE = re.compile(r"[a-z][a-z0-9_-]{0,31}")

HEADER_REPLY_TO = "Penstock-Reply-To"
HEADER_FINAL = "Penstock-Final"
HEADER_EVENT_ID = "Penstock-Event-Id"
HEADER_REQUEST = "Penstock-Request-Id"
HEADER_LOAD = "Penstock-Load"
HEADER_MSG_ID = "Nats-Msg-Id"


def token(name: str) -> str:
    """A name as one subject token: what NATS gives a meaning (dots, blanks, wildcards) becomes "_"."""
    return _TOKEN.sub("_", name) or "_"


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

    def submit(self, model: str) -> str:
        return f"{self.namespace}.submit.{token(model)}"

    def request(self, model: str, priority: str) -> str:
        return f"{self.namespace}.request.{token(model)}.{priority}"

    def work(self, role: str, worker: str) -> str:
        return f"{self.namespace}.work.{role}.{worker}"

    def kv(self, model: str, worker: str) -> str:
        return f"{self.namespace}.kv.{token(model)}.{worker}"

    def tokens(self, gateway: str) -> str:
        return f"{self.namespace}.tokens.{gateway}"

    def done(self, model: str) -> str:
        return f"{self.namespace}.done.{token(model)}"

    def returned(self, model: str) -> str:
        return f"{self.namespace}.returned.{token(model)}"

    def handoff(self, worker: str) -> str:
        return f"{self.namespace}.handoff.{worker}"

    def control(self, worker: str) -> str:
        return f"{self.namespace}.ctl.{worker}"

    @property
    def cancel(self) -> str:
        return f"{self.namespace}.cancel"

    def lease(self, worker: str) -> str:
        """The worker's key in the ``workers`` bucket, as a subject."""
        return f"$KV.{self.bucket('workers')}.{worker}"

    def reply(self, name: str) -> str:
        """Where NATS clients may ask for answers, besides their inboxes."""
        return f"{self.namespace}.reply.{name}"

    def stream(self, name: str) -> str:
        """A stream's name: the namespace in front, since stream names are global to an account."""
        return f"{self.namespace}_{name}"

    def bucket(self, name: str) -> str:
        return f"{self.namespace}_{name}"

    def all(self, kind: str) -> str:
        """Every subject of one kind ("work", "kv", ...)."""
        return f"{self.namespace}.{kind}.>"

    def live(self, subject: str) -> str:
        """Where the server republishes what it stored under ``subject`` (also for wildcards)."""
        if subject.startswith("$KV."):
            return f"{self.namespace}.live.bucket.{subject.split('.', 2)[2]}"
        head = self.namespace + "."
        assert subject.startswith(head), subject
        rest = subject[len(head) :]
        return f"{head}live.{rest.removeprefix('tokens.')}" if rest.startswith("tokens.") else f"{head}live.{rest}"
