"""The documented HAProxy in front of three cells, which are small servers here: where it sends what, and what again."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from penstock.schemas.requests import new_request_id

CONFIGURATION = Path("infra/deploy/cells/haproxy.cfg").read_text()
GATEWAYS = Path("docs/cells.md").read_text().partition("```text\nlisten ")[2].partition("```")[0]
ADDRESSES = ("127.0.0.1:9000", "127.0.0.1:9010", "127.0.0.1:9020")  # of the cells in the file
CHAT = "/v1/chat/completions"
KEY = "pst-aaaaaaaaaaaa-x"
SIZE = 20_000  # bytes of a body: more than arrives at once

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")


class Cell:
    """A server that answers with ``status``; 0: it closes the connection instead. ``asked``: paths.

    While ``hangs`` is set, it accepts connections and says nothing.
    """

    def __init__(self) -> None:
        self.status = 200
        self.hangs = False
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0))
            path = head.split()[1]
            if path != "/health/ready":
                self.asked.append(path)
            if self.hangs:
                await reader.read()  # until HAProxy gives it up
            elif path == "/health/ready":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            elif self.status:
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % self.status)
        writer.close()


class Cells:
    """Three of them, and a client of HAProxy."""

    def __init__(self, cells: list[Cell], servers: list[asyncio.Server], http: httpx.AsyncClient) -> None:
        self.cells, self.servers, self.http = cells, servers, http

    async def ask(self, path: str = CHAT, key: str = KEY, **more: object) -> tuple[int, list[int]]:
        """The status, and the numbers of the cells that were asked."""
        before = [len(cell.asked) for cell in self.cells]
        headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}  # type: ignore[dict-item]
        body = {"model": "m", "padding": "x" * SIZE, **more}
        answer = await (
            self.http.get(path, headers=headers)
            if path.count("/") > 2 and path != CHAT
            else self.http.post(path, headers=headers, json=body)
        )
        if answer.status_code == 503 and answer.content:
            assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("broker_unavailable", "2")
        elif answer.status_code == 504 and answer.content:
            assert answer.json()["error"]["code"] == "deadline_exceeded"
        return answer.status_code, [n for n in range(3) if len(self.cells[n].asked) > before[n]]


@pytest.fixture
async def cells(tmp_path: Path) -> AsyncIterator[Cells]:
    async with three_cells(CONFIGURATION, tmp_path) as made:
        yield made


@asynccontextmanager
async def three_cells(text: str, folder: Path) -> AsyncIterator[Cells]:
    async with AsyncExitStack() as stack:
        made = [Cell() for _ in ADDRESSES]
        servers = [await asyncio.start_server(cell.serve, "127.0.0.1", 0) for cell in made]
        for address, server in zip(ADDRESSES, servers, strict=True):
            stack.callback(server.close)
            assert text.count(address) == 2  # in both backends
            text = text.replace(address, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield Cells(made, servers, await stack.enter_async_context(haproxy(text, "127.0.0.1:8000", folder)))


@asynccontextmanager
async def haproxy(text: str, address: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run it with a configuration; a client of what it binds to ``address`` there."""
    with socket.create_server(("127.0.0.1", 0)) as listening, (folder / "haproxy.log").open("w+") as log:
        assert text.count(f"bind {address}\n") == 1
        text = text.replace(f"bind {address}\n", f"bind fd@{listening.fileno()}\n")
        (folder / "haproxy.cfg").write_text(text)
        process = await asyncio.create_subprocess_exec(
            "haproxy", "-f", folder / "haproxy.cfg", pass_fds=[listening.fileno()], stdout=log, stderr=log
        )
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as http:
            yield http
        process.kill()
        await process.wait()
        log.seek(0)
        assert "[ALERT]" not in log.read()


def test_every_server_ends_connections_on_which_nothing_is_acknowledged() -> None:
    """Of a machine that has vanished. By hand, with the link of a namespace down: 10 s instead of 610."""
    servers = [line for line in CONFIGURATION.splitlines() if line.startswith("    server cell-")]
    assert len(servers) == 2 * len(ADDRESSES)
    assert [line for line in servers if not line.endswith(" tcp-ut 10s")] == []


async def test_each_request_goes_to_the_cell_of_its_key_or_to_that_of_its_id(cells: Cells) -> None:
    homes = {key: await cells.ask(key=key) for key in (f"pst-{n:012d}-secret" for n in range(12))}
    assert {home for _, [home] in homes.values()} == {0, 1, 2}
    strangers = [await cells.ask(key=f"sk-{n}") for n in range(8)]  # not ours: the client's address counts
    assert strangers.count(strangers[0]) == 8
    for key, home in homes.items():
        assert await cells.ask("/v1/messages", key=key.replace("secret", "other")) == home  # the public part counts
        for number in range(3):
            made = new_request_id(cell=number)
            for kind, rest in (("responses/resp_", "/input_items"), ("requests/chatcmpl-", ""), ("files/", "-0-0.png")):
                assert await cells.ask(f"/v1/{kind}{made}{rest}", key=key) == (200, [number])
            assert await cells.ask("/v1/responses", key=key, previous_response_id=f"resp_{made}") == (200, [number])
        assert await cells.ask("/v1/responses", key=key, previous_response_id=None) == home


async def test_a_batch_and_its_files_are_in_the_cell_of_its_input(cells: Cells) -> None:
    _, [home] = await cells.ask("/v1/files")  # an upload goes to the cell of its key
    for number in range(3):
        made = new_request_id(cell=number)
        assert await cells.ask("/v1/batches", input_file_id=f"file-{made}", endpoint=CHAT) == (200, [number])
        for path in (
            f"files/file-{made}/content",
            f"batches/batch_{made}",
            f"batches/batch_{made}/cancel",
            f"messages/batches/msgbatch_{made}/results",
        ):
            assert await cells.ask(f"/v1/{path}") == (200, [number])
    cells.cells[home].status = 503  # its input is nowhere else
    assert await cells.ask("/v1/batches", input_file_id=f"file-{new_request_id(cell=home)}") == (503, [home])
    status, asked = await cells.ask("/v1/messages/batches")
    assert (status, len(asked)) == (200, 2)


@pytest.mark.parametrize("path", ["/", "/metrics", "/%6detrics", "/version", "/health/ready", "/%68ealth"])
async def test_what_speaks_of_one_gateway_is_not_passed_on(cells: Cells, path: str) -> None:
    assert await cells.ask(path) == (404, [])


async def test_what_a_cell_refuses_or_loses_goes_to_another_one_once_if_it_may(cells: Cells) -> None:
    _, [home] = await cells.ask()
    for cells.cells[home].status in (503, 0):
        status, asked = await cells.ask()
        assert (status, len(asked), home in asked) == (200, 2, True)
    cells.cells[home].status = 503
    for refused in (
        await cells.ask(headers={"Idempotency-Key": "once"}),
        await cells.ask("/v1/responses", previous_response_id=f"resp_{new_request_id(cell=home)}"),
        await cells.ask(f"/v1/responses/resp_{new_request_id(cell=home)}"),
    ):
        assert refused == (503, [home])
    for cells.cells[home].status in (400, 404, 429, 500, 504):
        assert await cells.ask() == (cells.cells[home].status, [home])
    for cell in cells.cells:
        cell.status = 503
    status, asked = await cells.ask()
    assert (status, len(asked)) == (503, 2)


async def test_a_cell_that_is_down_is_replaced_except_for_what_only_it_has(cells: Cells) -> None:
    _, [home] = await cells.ask()
    cells.servers[home].close()
    status, [other] = await cells.ask()
    assert status == 200
    assert other != home
    for alone in (
        await cells.ask(headers={"Idempotency-Key": "once"}),
        await cells.ask("/v1/responses", previous_response_id=f"resp_{new_request_id(cell=home)}"),
        await cells.ask(f"/v1/requests/{new_request_id(cell=home)}"),
    ):
        assert alone == (503, [])
    assert await cells.ask(f"/v1/requests/{new_request_id(cell=other)}") == (200, [other])


async def test_what_only_a_cell_that_hangs_can_do_waits_for_its_timeout_and_is_asked_nowhere_else(
    tmp_path: Path,
) -> None:
    assert CONFIGURATION.count("timeout server 610s") == 1
    text = CONFIGURATION.replace("timeout server 610s", "timeout server 500ms")
    async with three_cells(text, tmp_path) as cells:
        once = {"Idempotency-Key": "once"}
        _, [home] = await cells.ask(headers=once)
        cells.cells[home].hangs = True
        assert await cells.ask(headers=once) == (504, [home])
        cells.cells[home].hangs = False
        assert await cells.ask(headers=once) == (200, [home])
        cells.cells[home].status = 0
        async with httpx.AsyncClient(base_url=cells.http.base_url, trust_env=False) as first:
            answer = await first.post(CHAT, headers=once | {"x-api-key": KEY}, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "broker_unavailable")
        with pytest.raises(httpx.RemoteProtocolError):  # on a connection that had an answer, HAProxy says nothing
            await cells.ask(headers=once)
        assert len(cells.cells[home].asked) == 5
        assert not any(cell.asked for cell in cells.cells if cell is not cells.cells[home])


async def test_what_a_dead_gateway_of_a_cell_refuses_goes_to_another_one_of_this_cell(tmp_path: Path) -> None:
    gateways = [Cell(), Cell()]
    servers = [await asyncio.start_server(gateway.serve, "127.0.0.1", 0) for gateway in gateways]
    text = CONFIGURATION.partition("frontend api")[0] + "listen " + GATEWAYS
    for number, server in enumerate(servers, 1):
        text = text.replace(f"10.0.0.{number}:8000", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with haproxy(text, "unix@/run/haproxy/cell-000.sock mode 600", tmp_path) as http:
        assert (await http.get("/v1/models")).status_code == 200
        servers[0].close()
        answers = await asyncio.gather(*(http.get(f"/v1/requests/{new_request_id(cell=0)}") for _ in range(8)))
    servers[1].close()
    assert {answer.status_code for answer in answers} == {200}
    assert len(gateways[1].asked) >= len(answers)
