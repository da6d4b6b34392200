"""Stands in for a gateway, router or worker: the least that ``penstock up`` looks for, on a real broker."""

import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

from penstock.configs.flags import parse
from penstock.configs.settings import GatewaySettings, RouterSettings, WorkerSettings
from penstock.schemas import fleet, wire
from penstock.schemas.control import DRAINED
from penstock.schemas.subjects import Subjects


class Answers(BaseHTTPRequestHandler):
    closed = False  # it wants an API key

    def do_GET(self) -> None:
        body = {"/v1/models": b'{"data":[{"id":"fake"}]}', "/health/ready": b'{"status":"ready"}'}.get(self.path, b"ok")
        self.send_response(401 if self.closed and self.path == "/v1/models" else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


async def register(settings: WorkerSettings) -> None:
    import asyncio  # late: the others start faster without it

    import nats

    nc = await nats.connect(settings.nats_url, inbox_prefix="_INBOX_worker", max_reconnect_attempts=-1)
    me = fleet.Registration(
        "w" + str(os.getpid()), "fake", "aggregated", "mock", time.time_ns(), 32, 1, 1, 64, name=settings.name
    )
    while True:
        await nc.jetstream().publish(Subjects(settings.namespace).lease(me.worker), wire.encode(me))
        await asyncio.sleep(1)


def serve(gateway: GatewaySettings) -> None:
    """On the inherited socket, and on a port of its own if that is another one."""
    Answers.closed = gateway.require_keys
    shared = HTTPServer((gateway.http_host, 0), Answers, bind_and_activate=False)
    shared.socket = socket.socket(fileno=gateway.listen_fd)
    if shared.socket.getsockname()[1] != gateway.http_port:
        own = HTTPServer((gateway.http_host, gateway.http_port), Answers)
        threading.Thread(target=own.serve_forever, daemon=True).start()
    shared.serve_forever()


def main() -> None:
    role, argv = sys.argv[1], sys.argv[2:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(DRAINED))
    if os.environ.get("FAKE_BAD") == role:
        print("cannot use these settings")
        sys.exit(2)
    print(f"{role} runs", flush=True)
    if role == "gateway":
        gateway = parse(GatewaySettings, argv, prog=role)
        serve(gateway)
    elif role == "worker":
        import asyncio

        asyncio.run(register(parse(WorkerSettings, argv, prog=role)))
    else:
        parse(RouterSettings, argv, prog=role)
        signal.pause()


if __name__ == "__main__":
    main()
