"""Who sent a request, and what follows from it: whose request it becomes, and what it may name and read."""

from collections.abc import Iterable, MutableMapping
from typing import Any

import msgspec

from penstock.gateway.base.prepare_context import PrepareContext
from penstock.schemas.keys import ApiKey
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import DEFAULT_TENANT

CALLER = "penstock.caller"  # in the ASGI scope of a request


class Caller:
    """
    Args:
        tenant: whose requests are made.
        sees: whose requests and answers may be read; None: everyone's.
        key: the API key; None: keys are not in use, or the request came over NATS.
        models: that may be named; empty: all.
        own_cache: KV is not shared with other tenants.
    """

    __slots__ = ("_base", "_context", "key", "models", "own_cache", "sees", "tenant")

    def __init__(
        self,
        tenant: str,
        sees: str | None,
        *,
        key: ApiKey | None = None,
        models: Iterable[str] = (),
        own_cache: bool = True,
    ) -> None:
        self.tenant = tenant
        self.sees = sees
        self.key = key
        self.models = frozenset(models)
        self.own_cache = own_cache
        self._base: PrepareContext | None = None
        self._context: PrepareContext | None = None

    def may_name(self, model: str) -> bool:
        return not self.models or model in self.models

    def context(self, base: PrepareContext) -> PrepareContext:
        """What this caller's bodies are prepared for."""
        if self._context is None or self._base is not base:
            self._base = base
            self._context = base._replace(
                tenant=self.tenant,
                allowed=self.models or None,
                priority=self.key.priority if self.key is not None else None,
                own_cache=self.own_cache,
            )
        return self._context

    def own(self, request: GenerateRequest) -> GenerateRequest:
        """A request that was made without this caller's context, as this caller's."""
        highest = self.key.priority if self.key is not None else None
        priority = highest if highest is not None and request.priority.rank < highest.rank else request.priority
        if self.tenant == request.tenant and priority is request.priority:
            return request
        return msgspec.structs.replace(request, tenant=self.tenant, priority=priority)


OPERATOR = Caller(DEFAULT_TENANT, None)  # with a key that the gateway was started with
ANYONE = Caller(DEFAULT_TENANT, None)  # where no keys are in use: whoever reaches the port


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    """The caller of a request that was admitted."""
    found: Caller = scope[CALLER]
    return found
