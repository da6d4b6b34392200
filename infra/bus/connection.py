"""The connection to the broker: reconnects without limit and runs hooks after each reconnect.

nats-py closes a connection for good on some server errors, whatever the reconnect settings. The process would never
receive a message again, so it exits and its supervisor restarts it.
"""

import asyncio
import contextlib
import importlib.util
import math
import os
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

import structlog
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, SlowConsumerError, UnexpectedEOF
from nats.js import JetStreamContext

from penstock.infra.bus.client import BusClient, refuses_login
from penstock.infra.bus.clock import BrokerClock
from penstock.infra.bus.jetstream import BUSY, STREAM_NOT_FOUND
from penstock.infra.bus.tasks import Failed, Tasks
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.streams import HEADROOM, MAX_PAYLOAD
from penstock.schemas.subjects import Subjects, inbox_prefix

log = structlog.get_logger("bus")

EXIT_BROKER_LOST = 75  # EX_TEMPFAIL: a supervisor should start the process again
CONNECT_S = 10.0
# How long a process that serves waits for its broker: where all start at once, the broker's pod may need minutes. Each
# failed start would double the time until Kubernetes tries again, up to five minutes.
START_S = 120.0
CLOSE_S = 3.0
LOGIN_S = 30.0  # of refused logins; then the process ends, as a new start may be given other credentials
MAX_CONTROL_LINE = 4096  # nats-server's default
DROPPED_S = 0.25
# In a cluster, a client leaves a hanging server after 2 to 3 s, before an election (4 to 9 s) can be over: a deposed
# leader that resumes must have no clients.
_QUICK: dict[str, Any] = {"ping_interval": 1, "connect_timeout": 1}
COMMAND_ROLES = ("viewer", "reader", "planner", "keys")  # which may log in with credentials of another role
SAME_ERROR_S = 5.0  # least time between two logged errors of one kind
ERROR_KINDS = 64
# OpenSSL's X509_V_ERR_…: the certificate is for another host or address; it is not valid yet, or has expired
_OTHER_NAME, _OUT_OF_DATE = (62, 64), (9, 10)
_REFUSED = "permissions violation"
_QUOTED = re.compile('"[^"]*"')  # the subject in an error of the broker

Hook = Callable[[], Awaitable[None]]
Refused = Callable[[str], object]


class Bus:
    """One connection.

    Guarantees: it reconnects for as long as the process runs, or ends the process if nats-py gives up. After each
    reconnect the hooks run in order, in a task of their own; an error of a hook is logged, and the next one runs.

    Use it as a context manager, or call ``close``.

    Attributes:
        tasks: the process's background tasks. Components spawn theirs in it, or in a group of it.
        on_reconnect: the hooks. Register one for every request or subscription whose answer a broken link can lose.
        clock: the broker's time, once a process follows it.
        closing: ``close`` was called.
        last_error: the last one that nats-py reported.
        user: the user that it logs in as; "": given by a file or a certificate.
        on_refused: each is called with the broker's message when it refuses a subject to this user.
    """

    def __init__(
        self,
        client: BusClient,
        subjects: Subjects,
        tasks: Tasks | None = None,
        *,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self.nc = client
        self.tasks = tasks if tasks is not None else Tasks("process")  # an empty group is false
        self.js: JetStreamContext = client.jetstream()
        self.subjects = subjects
        self.clock = BrokerClock()
        self.on_reconnect: list[Hook] = []
        self.closing = False
        self._opened = False  # until then nats-py's callbacks are about the first connect, which raises by itself
        self._end_process = end_process
        self._recovery: asyncio.Task[None] | None = None
        self.last_error: Exception | None = None
        self.user = ""
        self.on_refused: list[Refused] = []
        self._logged_errors: dict[str, float] = {}  # by kind: when it was logged
        self._refused_since: float | None = None  # every login since then was refused

    async def __aenter__(self) -> "Bus":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def follow_clock(self) -> None:
        """Use the broker's time from now on if this machine's differs; if the broker does not answer yet, later."""
        await self.clock.follow(self.nc, self.tasks, self.subjects.awaited)

    async def await_streams(self, wait_s: float) -> None:
        """Wait until there are streams, for this time at most: they are made when the broker has started.

        A cluster of brokers that has just started knows of none before it has elected a leader.
        """
        until, logged = time.monotonic() + wait_s, False
        while time.monotonic() < until:
            try:
                reply = await self.nc.request(f"$JS.API.STREAM.INFO.{self.subjects.awaited}", b"", timeout=CONNECT_S)
                if not any(f'"err_code":{code}'.encode() in reply.data for code in (STREAM_NOT_FOUND, *BUSY)):
                    return
            except NoRespondersError:
                pass
            except (NatsError, OSError, TimeoutError):  # the first use of a stream reports what is wrong with it
                return
            if not logged:
                log.warning("streams_awaited", missing=self.subjects.awaited, fix="penstock streams apply")
                logged = True
            await asyncio.sleep(1.0)

    @property
    def connected(self) -> bool:
        return bool(self.nc.is_connected)

    @property
    def reconnects(self) -> int:
        """The number of reconnects; counted before anything can be sent on the new link."""
        return int(self.nc.stats["reconnects"])

    @property
    def clustered(self) -> bool:
        """Whether the server is part of a cluster: streams may have replicas, and leaders that change."""
        return bool(self.nc._server_info.get("cluster"))  # of the last connect; nats-py has no public attribute for it

    @property
    def server(self) -> str:
        """The id of the current or last server; a server gets a new id when it restarts."""
        return str(self.nc._server_info.get("server_id", ""))

    @property
    def max_message(self) -> int:
        """Largest body, in bytes, that leaves room for headers."""
        return min(int(self.nc.max_payload), MAX_PAYLOAD) - HEADROOM

    def recover(self) -> None:
        """Run the reconnect hooks. A recovery that still runs is cancelled: it used the old connection."""
        if self._recovery is not None:
            self._recovery.cancel()
        self._recovery = self.tasks.spawn(self._recover(), name="bus-recovery")

    def recover_soon(self) -> None:
        """Run the reconnect hooks because messages were dropped on a working link; once for a burst of drops."""
        if self._recovery is None or self._recovery.done():
            self._recovery = self.tasks.spawn(self._recover(after=DROPPED_S), name="bus-recovery")

    async def _recover(self, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        for hook in list(self.on_reconnect):
            try:
                await hook()
            except Exception as error:
                log.warning("reconnect_hook_failed", hook=getattr(hook, "__qualname__", "?"), error=repr(error))

    # --- what nats-py reports; these run in its read loop, so they must neither block nor raise ---

    async def _on_error(self, error: Exception) -> None:
        self.last_error = error
        text, now = repr(error)[:500], time.monotonic()
        # An absent broker is tried 10 times a second, and every message to a forbidden subject is a separate error.
        kind = _QUOTED.sub("", text)
        if now - self._logged_errors.get(kind, -SAME_ERROR_S) >= SAME_ERROR_S:
            if len(self._logged_errors) >= ERROR_KINDS:
                self._logged_errors.clear()
            self._logged_errors[kind] = now
            log.warning("bus_error", error=text)
        if isinstance(error, SlowConsumerError) and self._opened:
            self.recover_soon()
        note_refusal(error, self.on_refused)
        if refuses_login(text) and self._opened and not self.closing:
            self._refused_since = now if self._refused_since is None else self._refused_since
            if now - self._refused_since >= LOGIN_S:
                self._refused_since = math.inf  # reported once, if the process works without this connection
                self._end(f"the broker refuses the login: {why_unreachable(error)}")

    async def _on_closed(self) -> None:
        if self._opened and not self.closing:
            self._end(str(self.nc.last_error or "closed"))

    def _end(self, why: str) -> None:
        log.error("bus_closed", why=why, action="exiting; the supervisor starts this process again")
        self._end_process(EXIT_BROKER_LOST)

    async def _on_reconnected(self) -> None:
        self._refused_since = None
        log.info("bus_reconnected")
        if self._opened:
            self.recover()

    async def _on_disconnected(self) -> None:
        if self._opened and not self.closing:
            log.warning("bus_disconnected")

    async def close(self) -> None:
        """Send queued messages, end the tasks and close. Never raises; takes a few seconds at most."""
        self.closing = True
        await self.tasks.aclose()
        if self.connected:
            await _bounded(self.nc.flush(timeout=2))
        await _bounded(self.nc.close())


async def _bounded(step: Coroutine[Any, Any, None]) -> None:
    """Wait for a step at most ``CLOSE_S``. ``wait_for`` has no bound for a step that ignores its cancellation."""
    task = asyncio.ensure_future(step)
    await asyncio.wait([task], timeout=CLOSE_S)
    if not task.done():
        task.cancel()
        log.warning("close_incomplete")
    elif not task.cancelled() and task.exception() is not None:
        log.debug("close_failed", error=repr(task.exception()))


def note_refusal(error: Exception, on_refused: Iterable[Refused]) -> None:
    """Call each with the broker's message, if nats-py's error is that it refuses a subject to this user."""
    text = str(error)
    if _REFUSED in text.lower():
        for each in list(on_refused):
            each(text.removeprefix("nats: ").strip("'"))


@contextlib.contextmanager
def refusals(on_refused: list[Refused], user: str, command: str, role: str) -> Iterator[None]:
    """End the block at once if the broker refuses a subject, since a refused request gets no answer.

    Args:
        on_refused: of the connection that the block uses.
        user: the user that it logs in as; "": unknown.
        command: the command that needs the permission, without ``penstock``.
        role: the role with the fewest permissions that suffices.
    Raises:
        ServingError: a subject was refused (``permission_denied``); the text names the role needed.
    """
    task = asyncio.current_task()
    assert task is not None
    refused: list[str] = []

    def note(text: str) -> None:
        if not refused:
            task.cancel()
        refused.append(text)

    on_refused.append(note)
    try:
        yield
    except asyncio.CancelledError:
        if not refused:
            raise
        task.uncancel()
        raise ServingError(Code.permission_denied, _needs(user, command, role, refused[0])) from None
    except Exception as error:
        if not refused:
            raise
        task.uncancel()
        raise ServingError(Code.permission_denied, _needs(user, command, role, refused[0])) from error
    finally:
        on_refused.remove(note)


def _needs(user: str, command: str, role: str, refusal: str) -> str:
    wanted = role if role == "operator" else f"{role} or operator"
    return (
        f"the broker refuses {user or 'this user'} what `penstock {command}` needs ({refusal}): set "
        f"PENSTOCK_NATS_URL to one with the credentials of the role {wanted}; docs/roles.md says what each role may do"
    )


def _is_long(credentials: Mapping[str, Any]) -> bool:
    try:
        return os.path.getsize(credentials["user_credentials"]) > MAX_CONTROL_LINE
    except (KeyError, OSError):
        return False


def why_unreachable(error: Exception, credentials: Mapping[str, Any] | None = None) -> str:
    """A text for users that says why connecting failed. ``credentials``: those of ``authenticate``."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "unknown host"
    if isinstance(error, ssl.SSLCertVerificationError):
        return _why_not_verified(error, os.environ.get("PENSTOCK_NATS_CA", ""))
    too_long = "maximum control line exceeded" in str(error).lower()
    # The server resets the connection, so its error message may be lost.
    too_long = too_long or (isinstance(error, (ConnectionError, UnexpectedEOF)) and _is_long(credentials or {}))
    if too_long:
        what = "the server takes shorter lines than we send"
        if "user_credentials" in (credentials or {}):
            what = (
                f"the user's JWT, with its rights, is longer than the {MAX_CONTROL_LINE} bytes that it takes by default"
            )
        return f"{error}; {what}: write max_control_line: 65536 into nats-server's configuration"
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)


def _why_not_verified(error: ssl.SSLCertVerificationError, authorities: str) -> str:
    if error.verify_code in _OTHER_NAME:
        fix = "connect to a name that is in the server's certificate"
    elif error.verify_code in _OUT_OF_DATE:
        fix = "replace the server's certificate, or set the clock of this machine"
    elif authorities:
        fix = f"it is signed by none of the authorities in {authorities}, which PENSTOCK_NATS_CA names"
    else:
        fix = "set PENSTOCK_NATS_CA to a file with the authority that has signed it"
    return f"certificate verify failed: {error.verify_message.rstrip('.')}; {fix}"


def authenticate(client: BusClient, url: str, role: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options that log a client in: the URL's credentials, else those in files that the environment names.

    ``PENSTOCK_NATS_CREDS`` is a credentials file (JWT and seed), ``PENSTOCK_NATS_NKEY`` one with an nkey's seed,
    ``PENSTOCK_NATS_CERT`` and ``PENSTOCK_NATS_KEY`` are a client certificate and its key, ``PENSTOCK_NATS_CA`` has the
    authorities that sign the servers' certificates. For the user of the system account the names begin with
    ``PENSTOCK_SYS_NATS_``, except that of the authorities. Files are read again at every reconnect, so that they can be
    rotated.

    Raises:
        ServingError: a file, or the package that signs, is missing; or the URL is one of WebSocket.
    """
    environ = os.environ if environ is None else environ
    if url.startswith(("ws://", "wss://")):
        scheme, _, rest = url.partition("://")
        text = f"{scheme}://{rest.rpartition('@')[2]}: name the server's nats:// or tls:// address, not its WebSocket"
        raise ServingError(Code.invalid_request, text)
    prefix = "PENSTOCK_SYS_NATS_" if role == "sys" else "PENSTOCK_NATS_"
    names = {kind: f"{prefix}{kind}" for kind in ("CREDS", "NKEY", "CERT", "KEY")} | {"CA": "PENSTOCK_NATS_CA"}
    files = {kind: environ[name] for kind, name in names.items() if environ.get(name)}
    for kind, path in files.items():
        if not os.access(path, os.R_OK):
            raise ServingError(Code.broker_unavailable, f"{names[kind]}: {path} is missing or cannot be read")
    if ("CERT" in files) != ("KEY" in files):
        raise ServingError(Code.broker_unavailable, f"{names['CERT']} and {names['KEY']} belong together: set both")
    if files.keys() & {"CA", "CERT"}:
        client.tls_context = partial(_tls_context, files.get("CA"), files.get("CERT"), files.get("KEY"))
    # As options, because nats-py does not use a URL's credentials for servers that it discovers later.
    parts = urlsplit(url)
    if parts.username and parts.password is not None:
        return {"user": unquote(parts.username), "password": unquote(parts.password)}
    if parts.username:
        return {"token": unquote(parts.username)}
    signing = next((kind for kind in ("CREDS", "NKEY") if kind in files), "")
    if signing and importlib.util.find_spec("nkeys") is None:
        raise ServingError(Code.broker_unavailable, f"{names[signing]} needs nkeys: pip install 'penstock[nkeys]'")
    return {{"CREDS": "user_credentials", "NKEY": "nkeys_seed"}[signing]: files[signing]} if signing else {}


def _tls_context(authorities: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=authorities)
    except ssl.SSLError as error:
        raise ssl.SSLError(
            f"PENSTOCK_NATS_CA: no certificates can be read from {authorities} ({error.reason})"
        ) from None
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context


def _role_of(user: str, role: str) -> str:
    """The role whose inbox a user may use: the role that the user is named after, if there is one."""
    named = user.removesuffix("-2")  # each role has two users
    return named if named in COMMAND_ROLES else role


async def connect(
    url: str,
    *,
    role: str,
    name: str,
    namespace: str = "ps",
    timeout: float = CONNECT_S,
    wait_s: float = 0.0,
    end_process: Callable[[int], NoReturn] = os._exit,
    on_fatal: Failed | None = None,
    **options: Any,
) -> Bus:
    """Open the connection of one process.

    Args:
        url: one or more servers, comma-separated, with credentials.
        role: the broker user's role; names the private inbox that its permissions allow.
        name: shown in the broker's monitoring and in its disconnect events.
        wait_s: how long to wait, if more than ``timeout``, for a server that is not there or has no name yet.
            A server that refuses the login or has another certificate is not waited for.
        end_process: called with an exit status when nats-py has closed the connection for good.
        on_fatal: called when a background task failed; stops the process in order (``Stop.failed``).
        options: of nats-py's ``connect``; they take precedence over the ones chosen here.
    Raises:
        ServingError: no server answered in this time, or it refused the credentials, or they are missing.
    """
    link = _Link(url, role, name, namespace, end_process, on_fatal, options)
    wait_s = max(timeout, wait_s)
    opening = asyncio.ensure_future(link.bus.nc.connect_within(wait_s, link.urls, **link.options))
    try:
        awaited = False
        while not (await asyncio.wait([opening], timeout=timeout))[0] and wait_s > timeout:
            failed = link.failed(TimeoutError(), timeout)
            if isinstance(link.bus.last_error, ssl.SSLError) or refuses_login(repr(link.bus.last_error)):
                raise failed  # also if the broker came late
            if not awaited:
                log.warning("broker_awaited", why=str(failed), wait_s=wait_s)
            awaited = True
        await opening
    except ServingError:
        raise
    except Exception as error:
        raise link.failed(error, wait_s) from None
    finally:
        opening.cancel()
    link.opened()
    return link.bus


async def connect_while_running(
    url: str,
    *,
    role: str,
    name: str,
    namespace: str = "ps",
    timeout: float = CONNECT_S,
    on_fatal: Failed | None = None,
    **options: Any,
) -> tuple[Bus, "asyncio.Task[None]"]:
    """As ``connect``, for a broker that the process can work without: tries again in the background.

    Returns: the bus, and a task that ends when it is connected; within ``timeout`` seconds, if a server answers.
    Raises:
        ServingError: credentials are missing.
    """
    link = _Link(url, role, name, namespace, os._exit, on_fatal, options)

    async def opening() -> None:
        await link.bus.nc.connect(link.urls, **link.options)
        link.opened()

    task = link.bus.tasks.spawn(opening(), name="connect")
    await asyncio.wait([task], timeout=timeout)
    if not task.done():
        log.warning("broker_away", namespace=namespace, why=str(link.failed(TimeoutError(), timeout)))
    return link.bus, task


class _Link:
    """A connection that is about to be opened."""

    def __init__(
        self,
        url: str,
        role: str,
        name: str,
        namespace: str,
        end_process: Callable[[int], object],
        on_fatal: Failed | None,
        options: Mapping[str, Any],
    ) -> None:
        client = BusClient()
        self.bus = bus = Bus(client, Subjects(namespace), Tasks(role, on_fatal), end_process=end_process)
        self.urls = url.split(",")
        self._credentials = credentials = authenticate(client, self.urls[0], role)
        if len(self.urls) > 1:
            options = _QUICK | dict(options)
        chosen = {
            "name": name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": 0.1,
            "ping_interval": 5,
            "pending_size": 32 << 20,
            "inbox_prefix": inbox_prefix(_role_of(str(credentials.get("user", "")), role)),
            "error_cb": bus._on_error,
            "closed_cb": bus._on_closed,
            "reconnected_cb": bus._on_reconnected,
            "disconnected_cb": bus._on_disconnected,
        }
        self.options = chosen | credentials | dict(options)

    def opened(self) -> None:
        self.bus._opened = True
        self.bus.user = str(self._credentials.get("user", ""))

    def failed(self, error: Exception, timeout: float) -> ServingError:
        where = ", ".join(part.rpartition("@")[2] for part in self.urls)
        reason = why_unreachable(self.bus.last_error or error, self._credentials)
        return ServingError(
            Code.broker_unavailable,
            f"no NATS server answers at {where} within {timeout:g} s ({reason}); "
            "start one with 'penstock nats', or check --nats-url and its credentials",
        )
