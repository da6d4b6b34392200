"""The dashboard's actions on requests: terminate one, or send one again.

The dashboard's token only lets one read. So each of these asks for the operator's password of the broker, which the
broker itself checks, and which is not kept. A form that another site sends has neither that, nor the mark that the
form's own page has.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

import structlog
from nats.errors import Error as NatsError
from starlette.requests import Request

from penstock.infra.bus.audit import recorded
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import get_last
from penstock.infra.bus.publisher import Publisher
from penstock.infra.nats_server.permissions import SECOND
from penstock.log_tools.export.export import workers
from penstock.log_tools.export.recording import RecordedRun, move_media
from penstock.log_tools.replay.comparison import Changes, as_new
from penstock.log_tools.replay.nats import REPLAYS, naming_inputs
from penstock.log_tools.sources.open_log import Log
from penstock.schemas import control, requests, wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, new_request_id

log = structlog.get_logger("dashboard")

OPERATOR = "operator"
MOST_BYTES = 8192  # of a form
CONNECT_S = 5.0
REFUSED_S = 1.0  # after a password that is wrong, in which no other one is tried
ENDS_S = 10.0  # for a request to end once it is terminated
AGAIN_S = 0.5  # the order to terminate is not stored, so it is repeated
MEDIA_S = 3600.0  # for which its images are kept again


class ActionRefused(Exception):
    """This form may not act; the text says why."""


class Forms:
    """Checks the forms of this dashboard.

    Args:
        token: of the dashboard, from which the mark of its forms is made.
    """

    def __init__(self, token: str) -> None:
        self.mark = hmac.new(token.encode(), b"form", hashlib.sha256).hexdigest()

    async def read(self, request: Request) -> Mapping[str, str]:
        """The fields of a form that a page of this dashboard has sent.

        Raises:
            ActionRefused: it comes from elsewhere, or is too long.
        """
        origin = request.headers.get("origin", "")
        elsewhere = request.headers.get("sec-fetch-site", "same-origin") != "same-origin"
        if elsewhere or (origin and urlsplit(origin).netloc != request.headers.get("host", "")):
            raise ActionRefused("this form was sent by another site: use the one on the request's page")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise ActionRefused(f"this form has more than {MOST_BYTES} bytes")
        fields = {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}
        if not hmac.compare_digest(fields.get("mark", "").encode(), self.mark.encode()):
            raise ActionRefused("this form is not of this dashboard's pages: open the request's page again")
        return fields


class OperatorLogin:
    """Connections as the operator, one at a time."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def bus(self, there: Log, password: str) -> AsyncIterator[Bus]:
        """A connection to the broker of a log, which ends with the context.

        Args:
            password: of the operator, or a URL with other credentials.
        Raises:
            ActionRefused: the broker refuses it.
        """
        if not password:
            raise ActionRefused("give the operator's password: it is in secrets.json of the data folder")
        async with self._one:
            bus = await self._connected(there, password)
            try:
                yield bus
            finally:
                await bus.close()

    async def _connected(self, there: Log, password: str) -> Bus:
        url, problem = there.url, "the log is of no running broker"
        given = "://" in password
        for user in ("",) if given else (OPERATOR, OPERATOR + SECOND):
            try:
                return await connect(
                    password if given else with_login(url, user, password),
                    role=OPERATOR,
                    name="dashboard-operator",
                    namespace=there.bus.subjects.namespace,
                    timeout=CONNECT_S,
                    end_process=_stay,  # type: ignore[arg-type]
                    max_reconnect_attempts=1,
                )
            except ServingError as error:
                problem = error.message
        log.warning("operator_refused", why=problem)
        await asyncio.sleep(REFUSED_S)
        raise ActionRefused("the broker does not take this as the operator's password")


def _stay(status: int) -> None:
    """The dashboard survives the loss of such a connection."""


def with_login(url: str, user: str, password: str) -> str:
    """The servers of a URL, with another login."""
    found = []
    for each in url.split(","):
        parts = urlsplit(each)
        place = parts.netloc.rpartition("@")[2]
        found.append(urlunsplit(parts._replace(netloc=f"{quote(user)}:{quote(password, safe='')}@{place}")))
    return ",".join(found)


async def terminate(bus: Bus, request: GenerateRequest) -> bool:
    """Have a request end as cancelled; False: it has not ended within ``ENDS_S``, and may yet.

    Raises:
        ServingError: the broker did not answer, or does not take the entry of the audit log.
    """
    subject = bus.subjects.done(request.tenant, request.recorded_under, request.id)
    order = wire.encode(control.Cancel(request.id, "terminated by the operator"))
    async with recorded(bus.nc, bus.subjects, "terminate", request.id):
        for _ in range(int(ENDS_S / AGAIN_S)):
            try:
                await bus.nc.publish(bus.subjects.cancel, order)
            except NatsError as error:
                raise ServingError(Code.broker_unavailable, f"the broker does not take the order ({error!r})") from None
            if await get_last(bus, bus.subjects.stream("DONE"), subject) is not None:
                return True
            await asyncio.sleep(AGAIN_S)
        return False


async def send_again(there: Log, bus: Bus, request: GenerateRequest, cell: int) -> str:
    """Send a recorded request as a new one, without waiting for its end. Returns its id.

    Args:
        bus: of the operator.
        cell: for its id; -1: the deployment has only one.
    Raises:
        ActionRefused: its content is gone, or no worker serves its model.
        ServingError: the broker did not answer.
    """
    if request.no_store or (not request.prompt and request.output == ""):
        raise ActionRefused("its prompt is not in the log: it was made with no_store, or is too old")
    if await move_media(there.bus, bus, [RecordedRun(request.id, request, stored={})], MEDIA_S):
        raise ActionRefused("its images are gone: deployments keep them for 2 hours")
    try:
        inputs = naming_inputs(request.model, await workers(bus), Changes())
    except ValueError as error:
        raise ActionRefused(str(error)) from None
    now_ns = time.time_ns()
    name = new_request_id(now_ns, cell=cell)
    again = as_new(request, name, f"{REPLAYS}{secrets.token_hex(4)}", now_ns, inputs, Changes())
    subject = bus.subjects.request(again.model, again.priority.value, name)
    async with recorded(bus.nc, bus.subjects, "send again", request.id, f"as {name}"), Publisher(bus) as publisher:
        await publisher.publish(subject, wire.encode(again), name, headers=requests.HEADERS, timeout=CONNECT_S)
    return name
