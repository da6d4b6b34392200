"""``penstock explain REQUEST_ID``: where a request went and why, from the log alone."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from infra.bus.connection import connect
from infra.terminal import stdout
from infra.timeline.read import read_timeline
from infra.timeline.show_timeline import show
from schemas.errors import ServingError

CONNECT_S = 3.0  # somebody is waiting at a terminal


def run(argv: Sequence[str]) -> int:
    """Print the timeline of one request; returns the exit status."""
    parser = argparse.ArgumentParser(prog="penstock explain", description="what happened to a request, and why")
    parser.add_argument("request_id", help="as in the X-Request-Id header or the answer's id")
    parser.add_argument("--tokens", action="store_true", help="also list the token batches, while TOKENS keeps them")
    parser.add_argument("--nats-url", default="", help="default: from state.json in the data directory")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--data-dir", default=".penstock")
    args = parser.parse_args(argv)
    console = stdout()
    state = _state(Path(args.data_dir))
    url = args.nats_url or state.get("nats_url", "nats://127.0.0.1:4222")
    namespace = args.namespace or state.get("namespace", "ps")
    request_id = args.request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    try:
        return asyncio.run(_explain(request_id, url, namespace, console, args.tokens))
    except (ValueError, ServingError) as error:
        console.print(f"[red]{error}[/]")
        return 1


async def _explain(request_id: str, url: str, namespace: str, console: Console, tokens: bool) -> int:
    bus = await connect(url, role="client", name="explain", namespace=namespace, timeout=CONNECT_S)
    try:
        show(await read_timeline(bus, request_id, with_tokens=tokens), console)
    finally:
        await bus.close()
    return 0


def _state(data_dir: Path) -> dict[str, str]:
    try:
        state = msgspec.json.decode((data_dir / "state.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return {key: value for key, value in state.items() if isinstance(value, str)}
