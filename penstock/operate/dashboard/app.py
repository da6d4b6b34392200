"""``penstock dashboard``: its pages and its stream of changes, served over HTTP until Ctrl-C.

The operator's token gives access, from a link on.
"""

import argparse
import asyncio
import contextlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import uvicorn
from markupsafe import Markup
from nats.errors import Error as NatsError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from penstock.cli.figures import clock, duration_ns, moment_ns
from penstock.configs.flags import Parser
from penstock.infra.bus.connection import refusals, why_unreachable
from penstock.infra.nats_server.datadir import prepare
from penstock.infra.process.sockets import CannotListen, bind
from penstock.launch.readiness import base_url
from penstock.launch.state import TOKEN_FILE, stored_token
from penstock.log_tools.requests import inspection_page
from penstock.log_tools.requests.describe import Texts
from penstock.log_tools.requests.find_requests import LoggedRequest, ended, merged, summaries, unfinished
from penstock.log_tools.requests.inspection import inspect
from penstock.log_tools.requests.leases import leases, stopped_ns
from penstock.log_tools.requests.list_requests import SLOWEST_PERCENT, WHY, match_in
from penstock.log_tools.requests.neighbours import read_neighbours
from penstock.log_tools.requests.slow import Samples
from penstock.log_tools.sources.open_log import REQUEST_STREAMS, Log, LogSource, add_flags, in_order, run_command
from penstock.log_tools.timeline.read import ID, read_timeline, whole_id
from penstock.log_tools.timeline.request_timeline import RequestTimeline
from penstock.operate.dashboard import pages
from penstock.operate.dashboard.actions import ActionRefused, Forms, OperatorLogin, send_again, terminate
from penstock.operate.dashboard.live import Live, Moment
from penstock.operate.observe import observed
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import cell_in, request_of_answer
from penstock.schemas.summary import Criteria

PORT = 8480
INTERVAL_S = 1.0
STREAMS = (*REQUEST_STREAMS, "TOKENS")  # what its pages read
CLOSE_S = 1  # for open pages, at the end


def run(argv: Sequence[str]) -> int:
    """Serve the dashboard; the exit status."""
    parser = Parser(
        prog="penstock dashboard",
        description="show a deployment in the browser: live workers, queues and streams, and every request with what "
        "happened to it. It only reads, but for requests that are terminated or sent again with the operator's "
        "password. A stopped deployment's requests are shown as they were.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="0: any free one (default: %(default)s)")
    parser.add_argument(
        "--token", default="", help="what browsers must bring; default: that of the data folder, made if there is none"
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    return run_command("dashboard", lambda: _run(args))


async def _run(args: argparse.Namespace) -> None:
    source = LogSource.of(args)
    try:
        listener = bind(args.host, args.port, port_flag="--port", host_flag="--host")
    except CannotListen as error:
        raise ValueError(str(error)) from None
    port = listener.getsockname()[1]
    with contextlib.closing(listener):
        token = args.token or (secrets.token_urlsafe(18) if args.nats_url else _token_of(source))
        opening = observed(source, name="dashboard", role="reader", streams=STREAMS, patient=True)
        async with opening as (logs, observer):
            live = Live(observer, INTERVAL_S) if observer is not None else None
            app = Dashboard(logs, live, Access(token, port)).application()
            config = uvicorn.Config(
                app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=CLOSE_S
            )
            listener.listen()  # a browser that is opened at once waits until it is served
            print(f"dashboard: {base_url(args.host, port)}/?token={token}", flush=True)
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(live.run(), name="look") if live is not None else None
                await uvicorn.Server(config).serve([listener])
                if looking is not None:
                    looking.cancel()


def _token_of(source: LogSource) -> str:
    prepare(source.data_dir.resolve())
    return stored_token(source.data_dir)


COOKIE_S = 30 * 86400


class Access:
    """Checks requests.

    Args:
        token: what they must bring.
        port: of the dashboard; browsers do not separate cookies by port, so it is part of the cookie's name.
    """

    def __init__(self, token: str, port: int) -> None:
        self.token = token
        self._cookie = f"penstock-{port}"

    def refusal(self, request: Request) -> Response | None:
        """None: the request may pass. A link with the token is answered with a cookie and the link without it."""
        token = request.query_params.get("token")
        if token is not None and self._is_token(token):
            query = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "token"])
            answer = RedirectResponse(request.url.path + (f"?{query}" if query else ""), 303)
            answer.set_cookie(self._cookie, token, max_age=COOKIE_S, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(self._cookie, "")) or self._is_token(bearer):
            return None
        return PlainTextResponse(
            "This dashboard needs the operator's token: open the link that `penstock up` or `penstock dashboard` has "
            f"printed. The token is in {TOKEN_FILE} in the data folder.\n",
            401,
            {"WWW-Authenticate": "Bearer"},
        )

    def _is_token(self, given: str) -> bool:
        return bool(given) and hmac.compare_digest(given.encode(), self.token.encode())


MAX_WATCHERS = 64
SEARCH_S = 5.0
FILTERS = ("state", "since", "until", "at", "model", "tenant", "worker", "code", "min_duration", "min_ttft")
# Nothing from elsewhere, and no script but ours: a prompt on a page must not become one.
POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

Endpoint = Callable[[Request], Awaitable[Response]]


class Dashboard:
    """Answers from the open logs of a deployment's cells.

    Args:
        live: None for a stopped deployment.
    """

    def __init__(self, logs: Sequence[Log], live: Live | None, access: Access) -> None:
        self._logs = logs
        self._stopped = live is None
        self._live = live
        self._access = access
        self._namespace = logs[0].bus.subjects.namespace
        self._forms = Forms(access.token)
        self._login = OperatorLogin()
        self._texts = Texts()

    def application(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/", self._guarded(self._overview)),
            Route("/live", self._guarded(self._follow)),
            Route("/requests", self._guarded(self._requests)),
            Route("/requests/{id}", self._guarded(self._request)),
            Route("/requests/{id}/terminate", self._guarded(self._terminate), methods=["POST"]),
            Route("/requests/{id}/again", self._guarded(self._again), methods=["POST"]),
            Route("/slow", self._guarded(self._slow)),
            Route("/find", self._guarded(self._find)),
            Route("/leases", self._guarded(self._leases)),
            Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
        ]
        return Starlette(routes=routes)

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            refusal = self._access.refusal(request)
            if refusal is not None:
                return refusal
            try:
                with contextlib.ExitStack() as stack:
                    for bus in (log.bus for log in self._logs):
                        stack.enter_context(refusals(bus.on_refused, bus.user, "dashboard", "reader"))
                    response = await endpoint(request)
            except ActionRefused as error:
                response = self._problem("Not done", str(error), 403)
            except ServingError as error:
                refused = error.code is Code.permission_denied
                title = "Not for this role" if refused else "The broker does not answer"
                response = self._problem(title, error.message, 403 if refused else 503)
            except (NatsError, OSError, TimeoutError) as error:
                response = self._problem("The broker does not answer", why_unreachable(error), 503)
            response.headers["Content-Security-Policy"] = POLICY
            response.headers["Referrer-Policy"] = "no-referrer"
            response.headers["Cache-Control"] = "no-store"
            return response

        return answer

    def _problem(self, title: str, text: str, status: int) -> Response:
        return HTMLResponse(pages.problem(title, text, namespace=self._namespace), status)

    # --- pages ---

    async def _overview(self, request: Request) -> Response:
        moment = self._live.now if self._live is not None else Moment(())
        return HTMLResponse(pages.overview(moment, stopped=self._stopped, namespace=self._namespace))

    async def _requests(self, request: Request) -> Response:
        query = {name: request.query_params.get(name, "").strip() for name in (*FILTERS, "text", "before")}
        try:
            criteria, before = _criteria(query), _sequences(query["before"], len(self._logs))
        except ValueError as error:
            page = pages.requests([], query, older="", error=str(error), namespace=self._namespace)
            return HTMLResponse(page, 400)
        found: list[LoggedRequest] = []
        search = TextSearch(self._texts, query["text"])
        for log in self._logs if not query["before"] else ():
            found += [
                each for each in await unfinished(log.bus, criteria, stopped=log.stopped) if await search.matches(each)
            ]
        found.sort(key=lambda each: each.summary.created_ns, reverse=True)
        older = ""
        async with contextlib.AsyncExitStack() as stack:
            parts = [
                _ended(at, log, criteria, before[at], prompts=bool(query["text"])) for at, log in enumerate(self._logs)
            ]
            for part in parts:
                await stack.enter_async_context(contextlib.aclosing(part))
            async for at, seq, each in merged(parts, lambda item: item[2].summary.ended_ns):
                if len(found) >= pages.PER_PAGE or search.over:
                    older = ".".join(map(str, before))
                    break
                if await search.matches(each):
                    found.append(each)
                before[at] = seq
        page = pages.requests(found, query, older=older, error=search.problem, namespace=self._namespace, search=search)
        return HTMLResponse(page)

    async def _slow(self, request: Request) -> Response:
        query = {name: request.query_params.get(name, "").strip() for name in FILTERS}
        query["why"] = why = request.query_params.get("why", "slow")
        try:
            criteria, samples = _criteria(query), Samples(WHY[why])
        except (ValueError, KeyError) as error:
            page = pages.slow(None, None, query, note="", error=str(error), namespace=self._namespace)
            return HTMLResponse(page, 400)
        until, note = time.monotonic() + SEARCH_S, ""
        async with contextlib.AsyncExitStack() as stack:
            parts = [summaries(log.bus, criteria) for log in self._logs]
            for part in parts:
                await stack.enter_async_context(contextlib.aclosing(part))
            async for each in merged(parts, lambda summary: summary.ended_ns):
                samples.add(each, cell_in(each.id) if len(self._logs) > 1 else None)
                if len(samples) % 100 == 0 and time.monotonic() > until:
                    note = f"The last {len(samples):,} requests: more were not read within {SEARCH_S:g} s."
                    break
        compared = heat = None
        missing = ""
        try:
            compared = await asyncio.to_thread(samples.slowest, SLOWEST_PERCENT)
        except ModuleNotFoundError:
            missing = "Comparing needs numpy: pip install 'penstock[router]'."
        except ValueError as problem:
            missing = str(problem)
        if len(samples) and "numpy" not in missing:
            heat = await asyncio.to_thread(samples.heat_map)
        return HTMLResponse(pages.slow(compared, heat, query, note=note, error=missing, namespace=self._namespace))

    async def _request(self, request: Request) -> Response:
        request_id = request_of_answer(request.path_params["id"])
        problem: ValueError | None = None
        if len(request_id) < ID:
            try:
                return RedirectResponse(f"/requests/{await whole_id(self._logs, request_id)}", 303)
            except ValueError as error:
                return self._problem("Not found", str(error), 404)
        for log in in_order(self._logs, request_id):
            try:
                timeline = await read_timeline(log.bus, request_id, with_tokens=True)
                beside = request.query_params.get("neighbours") is not None
                neighbours = await read_neighbours(log.bus, timeline, stopped=log.stopped) if beside else None
                break
            except ValueError as error:
                problem = problem or error
        else:
            return self._problem("Not found", str(problem), 404)
        inspection = msgspec.structs.replace(inspect(timeline), neighbours=neighbours)
        body = inspection_page.body(inspection, links=True)
        acts = [] if self._stopped else ["again"] if timeline.done is not None else ["terminate", "again"]
        page = pages.request(request_id, Markup(body), acts=acts, mark=self._forms.mark, namespace=self._namespace)
        return HTMLResponse(page)

    # --- what the operator does ---

    async def _terminate(self, request: Request) -> Response:
        fields = await self._forms.read(request)
        there, timeline = await self._found(request.path_params["id"])
        async with self._login.bus(there, fields.get("password", "")) as bus:
            if timeline.done is None and not await terminate(bus, timeline.request):
                raise ActionRefused("the request was cancelled but has not ended yet: open its page again in a minute")
        return RedirectResponse(f"/requests/{timeline.request_id}", 303)

    async def _again(self, request: Request) -> Response:
        fields = await self._forms.read(request)
        there, timeline = await self._found(request.path_params["id"])
        async with self._login.bus(there, fields.get("password", "")) as bus:
            cell = there.cell if len(self._logs) > 1 else -1
            return RedirectResponse(f"/requests/{await send_again(there, bus, timeline.request, cell)}", 303)

    async def _found(self, request_id: str) -> tuple[Log, RequestTimeline]:
        if self._stopped:
            raise ActionRefused("the deployment is stopped")
        for there in in_order(self._logs, request_id):
            with contextlib.suppress(ValueError):
                return there, await read_timeline(there.bus, request_id)
        raise ActionRefused(f"the log does not have request {request_id}")

    async def _find(self, request: Request) -> Response:
        request_id = request.query_params.get("id", "").strip()
        return RedirectResponse(f"/requests/{request_id}" if request_id and "/" not in request_id else "/requests", 303)

    async def _leases(self, request: Request) -> Response:
        now_ns = max([await stopped_ns(log.bus) for log in self._logs]) if self._stopped else time.time_ns()
        by_ticket = {ticket: each for log in self._logs for ticket, each in (await leases(log.bus, now_ns)).items()}
        return HTMLResponse(pages.leases(by_ticket, now_ns, stopped=self._stopped, namespace=self._namespace))

    # --- changes ---

    async def _follow(self, request: Request) -> Response:
        if self._live is None:
            return PlainTextResponse("the deployment is stopped\n", 404)
        if self._live.watchers >= MAX_WATCHERS:
            return PlainTextResponse(f"{MAX_WATCHERS} browsers watch already\n", 503, {"Retry-After": "10"})
        return StreamingResponse(_events(self._live), media_type="text/event-stream")


class TextSearch:
    """Looks for a text in prompts and answers, without regard to case, for ``SEARCH_S`` a page.

    Args:
        text: "": every request matches.
    Attributes:
        found: by request, the text with its surroundings.
        last_ns: when the last request that was searched had ended.
        problem: why texts could not be searched; "": they could.
    """

    def __init__(self, texts: Texts, text: str) -> None:
        self._texts = texts
        self._wanted = re.compile(re.escape(text), re.IGNORECASE) if text else None
        self._until = time.monotonic() + SEARCH_S
        self.found: dict[str, str] = {}
        self.last_ns = 0
        self.problem = ""

    @property
    def over(self) -> bool:
        """Whether the time of a page is over."""
        searched = self.last_ns and time.monotonic() > self._until  # each page gets on by one at least
        return self._wanted is not None and bool(searched or self.problem)

    async def matches(self, request: LoggedRequest) -> bool:
        if self._wanted is None:
            return True
        try:
            match = await asyncio.to_thread(match_in, self._wanted, self._texts, request)
        except ValueError as error:
            self.problem = str(error)
            return False
        self.last_ns = request.summary.ended_ns or self.last_ns
        if match is not None:
            self.found[request.summary.id] = match
        return match is not None


async def _events(live: Live) -> AsyncGenerator[bytes, None]:
    yield b"retry: 2000\n\n"
    async for moment in live.follow():
        if not moment.history:
            continue
        now_ns = time.time_ns()
        event = {"clock": clock(now_ns, now_ns)[:8], "sections": pages.live_sections(moment)}
        yield b"event: live\ndata: " + msgspec.json.encode(event) + b"\n\n"


async def _ended(
    at: int, log: Log, criteria: Criteria, before: int, *, prompts: bool
) -> AsyncGenerator[tuple[int, int, LoggedRequest], None]:
    """With the place of the cell among the logs, and the sequence of the record.

    Args:
        prompts: they are wanted, too.
    """
    async with contextlib.aclosing(ended(log.bus, criteria, before=before, prompts=prompts)) as found:
        async for seq, each in found:
            yield at, seq, each


def _sequences(text: str, cells: int) -> list[int]:
    """Of a record in each cell, with dots between."""
    if not text:
        return [0] * cells
    parts = text.split(".")
    if len(parts) != cells or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise ValueError(f"before: {text[:40]!r} is not a sequence{'' if cells == 1 else ' for each cell'}")
    return list(map(int, parts))


def _criteria(query: Mapping[str, str]) -> Criteria:
    now_ns = time.time_ns()
    return Criteria(
        since_ns=moment_ns(query["since"], now_ns) if query["since"] else 0,
        until_ns=moment_ns(query["until"], now_ns) if query["until"] else 0,
        model=query["model"],
        tenant=query["tenant"],
        worker=query["worker"],
        states=frozenset([query["state"]] if query["state"] else []),
        code=query["code"],
        at_ns=moment_ns(query["at"], now_ns) if query["at"] else 0,
        min_ms=duration_ns(query["min_duration"]) / 1e6 if query["min_duration"] else 0.0,
        min_ttft_ms=duration_ns(query["min_ttft"]) / 1e6 if query["min_ttft"] else 0.0,
    )
