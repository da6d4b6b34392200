"""``GET /health``: each component that a request needs, and why it is not ready."""

from typing import NamedTuple

from msgspec import Struct

from penstock.gateway.service.service import Gateway

MOST_WORKERS = 1000  # in one answer


class Component(Struct, frozen=True, omit_defaults=True):
    """``reason``: why it is not ready; "": it is. ``role``, ``model``: of a worker."""

    name: str
    ready: bool
    reason: str = ""
    role: str = ""
    model: str = ""


class Health(Struct, frozen=True):
    """``status``: "ready" or "not ready", as of ``/health/ready``."""

    status: str
    reasons: list[str]
    components: list[Component]
    endpoints: list[str]


class HealthAnswer(NamedTuple):
    health: Health
    status: int


def health_of(gateway: Gateway, endpoints: list[str]) -> HealthAnswer:
    """The components of a deployment as this gateway sees them, and the HTTP status.

    Args:
        endpoints: paths that this gateway serves.
    """
    reasons = gateway.not_ready()
    connected = gateway.bus.connected
    routed = connected and gateway.has_routers
    unrouted = "its consumers are missing on the broker" if gateway.lacks_consumer else "none takes requests"
    components = [
        _component("gateway", "it is shutting down" if gateway.draining else ""),
        _component("broker", "" if connected else "it is not connected"),
        _component("routers", "" if routed else unrouted if connected else "the broker is not connected"),
    ]
    for registration, reason in gateway.fleet.workers()[:MOST_WORKERS]:
        name = registration.name or registration.worker
        components.append(Component(name, not reason, reason, registration.role, registration.model))
    status = "not ready" if reasons else "ready"
    return HealthAnswer(Health(status, reasons, components, endpoints), 503 if reasons else 200)


def _component(name: str, reason: str) -> Component:
    return Component(name, not reason, reason)
