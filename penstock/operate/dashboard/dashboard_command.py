"""``penstock dashboard``: serve it until Ctrl-C."""

import argparse
import asyncio
import contextlib
import secrets
from collections.abc import Sequence

import uvicorn

from penstock.configs.flags import Parser
from penstock.infra.nats_server.datadir import prepare
from penstock.infra.process.sockets import CannotListen, bind
from penstock.launch.readiness import base_url
from penstock.launch.state import stored_token
from penstock.log_tools.sources.open_log import REQUEST_STREAMS, LogSource, add_flags, run_command
from penstock.operate.dashboard.app import Access, Dashboard
from penstock.operate.dashboard.live import Live
from penstock.operate.observe import observed

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
