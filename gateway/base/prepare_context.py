"""What a body is prepared for: the model, the gateway's defaults, and what its workers have in common."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from penstock.gateway.base.errors import model_not_found
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.blocks import tenant_salt
from penstock.schemas.requests import Priority
from penstock.schemas.subjects import DEFAULT_TENANT


class PrepareContext(NamedTuple):
    """
    Attributes:
        names: of the model for clients; the first is canonical.
        gateway: id of the gateway whose token subject receives the answer.
        block_size: tokens of a KV block of the model's workers.
        default_max_tokens: output tokens at most if the client does not set max_tokens; 0: the model's own default, or
            the rest of the context.
        default_deadline_s: if the client sets neither timeout_s nor deadline_s.
        worker_max_model_len: the largest of the workers' limits on prompt + output, in tokens; 0: unknown.
        revision: that the workers serve; "": no worker is known, and block digests use the model directory's.
        max_images: images and embedding files per request.
        max_messages: of a chat, with those of the conversation that it continues.
        logits_processors: names that some worker has; None: no worker is known.
        parsers: of reasoning and tool calls in chats; None: output is plain text.
        special_tokens_as_text: the text of a special token in a message does not become that token.
        no_store: the request is erased after its end, whatever its body says.
        tenant: whose request it is.
        allowed: names of models that it may use; None: all.
        priority: its class if the body names none, and the highest that it may have; None: the body decides.
        own_cache: tenants share no KV; False: this one shares it with the default tenant.
        reasoning_fields: of answers, see ``--reasoning-fields``; "": the default.
        loosened: schemas by tool, in place of those of tools that are not strict and have what cannot be compiled.
        elsewhere: models that generate no text, and the path to ask them at.
    """

    model: ModelDir
    names: Sequence[str]
    gateway: str
    block_size: int = 32
    default_max_tokens: int = 0
    default_deadline_s: float = 600.0
    worker_max_model_len: int = 0
    revision: str = ""
    max_images: int = 16
    max_messages: int = 4_096
    logits_processors: frozenset[str] | None = None
    parsers: ParserNames | None = None
    special_tokens_as_text: bool = True
    no_store: bool = False
    tenant: str = DEFAULT_TENANT
    allowed: Set[str] | None = None
    priority: Priority | None = None
    own_cache: bool = True
    elsewhere: Mapping[str, str] = {}
    reasoning_fields: str = ""
    loosened: Mapping[str, Any] = {}

    def check_model(self, name: str | None) -> None:
        """
        Args:
            name: None or "": whichever is served.
        Raises:
            ServingError: model_not_found.
        """
        if not name:
            if not any(self.allowed is None or each in self.allowed for each in self.names):
                raise model_not_found("", ())
        elif name not in self.names or (self.allowed is not None and name not in self.allowed):
            allowed = self.allowed
            path = self.elsewhere.get(name, "") if allowed is None or name in allowed else ""
            raise model_not_found(name, [each for each in self.names if allowed is None or each in allowed], path)

    def salt(self, chosen: str) -> str:
        """The cache salt of a request for which its client chose this one: tenants cannot choose each other's."""
        tenant = self.tenant if self.own_cache else DEFAULT_TENANT
        return tenant_salt(tenant, chosen)

    @property
    def max_model_len(self) -> int:
        """Prompt + output, in tokens."""
        workers = self.worker_max_model_len
        return min(self.model.length.limit(workers), workers) if workers else self.model.max_model_len
