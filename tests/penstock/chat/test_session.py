"""Conversations with a server of the tests' own, which breaks streams off."""

import asyncio
import io
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from rich.console import Console

from penstock.chat import chat_command
from penstock.chat.chat_command import ChatOptions, Session, run
from penstock.chat.client import ChatClient, Conversation
from tests.penstock.chat.test_answer import event


class Server(ThreadingHTTPServer):
    """Streams ``parts``; the first answer breaks off after ``breaks`` events, and goes on where it is asked to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.parts: list[bytes] = []
        self.breaks = 1 << 30
        self.keys = False  # whether it needs one
        self.bodies: list[dict[str, Any]] = []
        self.resumed: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.server.keys:
            self._send(401, b'{"error": {"message": "send a key"}}')
            return
        if self.path == "/v1/models":
            self._send(200, b'{"data": [{"id": "m"}, {"id": "other"}]}')
            return
        after = self.headers.get("Last-Event-ID")
        self.server.resumed.append((self.path, after))
        self._send(200, b"".join(self.server.parts[int(after or 0) :]) + b"data: [DONE]\n\n")

    def do_POST(self) -> None:
        self.server.bodies.append(body := msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"]))))
        if body["messages"][-1]["content"] == "bad":
            self._send(400, b'{"error": {"message": "prompt: at most 3 words"}}')
            return
        parts = self.server.parts
        whole = b"" if self.server.breaks < len(parts) else b"data: [DONE]\n\n"
        self._send(200, b"".join(parts[: self.server.breaks]) + whole, more=not whole)

    def _send(self, status: int, data: bytes, *, more: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + more))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def log_message(self, *_args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def talk(server: Server, *lines: str, thoughts: bool = False) -> str:
    """What a session prints for these lines."""
    left = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    text = io.StringIO()
    client = ChatClient(server.url)
    with asyncio.Runner() as runner:
        options = ChatOptions({}, thoughts)
        Session(runner, client, Conversation(model="m"), Console(file=text, width=200), options, read).run()
        runner.run(client.aclose())
    return text.getvalue()


def test_an_answer_that_broke_off_continues_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.chat.client.RESUME_PAUSE_S", 0)
    with serving() as server:
        server.parts = [event(str(n), content=f"{n} ") for n in (1, 2, 3)] + [event("4", finish="stop")]
        server.breaks = 2
        assert "1 2 3 " in talk(server, "count")
    assert server.resumed == [("/v1/requests/r1/stream", "2")]


def test_a_refused_question_is_explained_and_taken_back() -> None:
    with serving() as server:
        server.parts = [event("1", content="fine", finish="stop")]
        printed = talk(server, "bad", "good", "/undo", "/undo", "/nosuch", "/model nosuch", "/model", "again")
    for line in ("at most 3 words", "no question to take back", "no command /nosuch", "served: m, other", "* m"):
        assert line in printed
    assert [body["messages"] for body in server.bodies[1:]] == [
        [{"role": "user", "content": "good"}],
        [{"role": "user", "content": "again"}],
    ]


def test_thoughts_are_folded_unless_they_are_asked_for_and_control_characters_never_reach_the_terminal() -> None:
    with serving() as server:
        server.parts = [event("1", reasoning_content="hm"), event("2", content="\x1b[2Jyes", finish="stop")]
        folded, printed = talk(server, "a"), talk(server, "a", thoughts=True)
    assert "hm" not in folded
    assert "hm" in printed
    assert "yes" in folded
    assert "\x1b[2J" not in folded


def test_errors_are_printed_without_control_characters() -> None:
    with serving() as server:
        server.parts = [event("1", content="begun"), b'data: {"error": {"message": "no\\u001b[2J room"}}\n\n']
        printed = talk(server, "a")
    assert "begun\nno\N{REPLACEMENT CHARACTER}[2J room" in printed


def test_the_result_of_a_tool_call_is_asked_for_and_sent() -> None:
    with serving() as server:
        call = {"index": 0, "id": "c1", "function": {"name": "find", "arguments": '{"city": "Oslo"}'}}
        server.parts = [event("1", tool_calls=[call], finish="tool_calls")]

        def stop_calling(_prompt: str) -> None:
            server.parts = [event("1", content="sunny", finish="stop")]

        lines = iter(["weather?", "21 degrees"])

        def read(prompt: str) -> str:
            if prompt.startswith("result of find"):
                stop_calling(prompt)
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        text, client = io.StringIO(), ChatClient(server.url)
        with asyncio.Runner() as runner:
            Session(runner, client, Conversation(model="m"), Console(file=text, width=200), ChatOptions({}), read).run()
            runner.run(client.aclose())
    assert '-> find(city="Oslo")' in text.getvalue()
    assert "sunny" in text.getvalue()
    assert server.bodies[1]["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"}


def test_the_command_answers_one_question_and_continues_with_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with serving() as server:
        server.parts = [event("1", content="17", finish="stop")]
        url = ["--url", server.url + "/v1"]
        assert run([*url, "12", "+", "5?", "--temperature", "0", "--system", "Be brief."]) == 0
        assert run([*url, "--continue", "and", "now?"]) == 0
        assert run([*url, "--model", "nosuch", "a"]) == 1
    assert run(["--data-dir", str(tmp_path), "a"]) == 1
    monkeypatch.setattr(chat_command, "read_state", Mock(side_effect=PermissionError(13, "denied", "/srv/state.json")))
    assert run(["--data-dir", "/srv", "a"]) == 1
    printed, errors = capfd.readouterr()
    assert "/srv/state.json: permission denied; run as its owner" in errors
    assert printed == "17\n17\n"
    assert "model 'nosuch' is not served; served: m, other" in errors
    assert "no deployment runs in" in errors
    first, second = server.bodies
    assert (first["temperature"], first["messages"][0]) == (0, {"role": "system", "content": "Be brief."})
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "12 + 5?", "17", "and now?"]


def test_a_user_without_a_home_folder_or_with_one_that_cannot_be_written_has_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unknown_user() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    with serving() as server:
        server.parts = [event("1", content="17", finish="stop")]
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        assert run(["--url", server.url, "12 + 5?"]) == 0
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setattr(Path, "home", unknown_user)
        assert run(["--url", server.url, "12 + 5?"]) == 0
        assert run(["--url", server.url, "--continue", "and now?"]) == 1
    printed, errors = capfd.readouterr()
    assert printed == "17\n17\n"
    assert errors.count("not kept for --continue: ") == 1
    assert "--continue: no conversation was kept" in errors


def test_a_file_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--url", "http://127.0.0.1:1", "--tools", "/nonexistent", "hello"]) == 1
    assert capsys.readouterr().err == "penstock chat: --tools /nonexistent: No such file or directory\n"
    assert run(["--url", "http://127.0.0.1:1", "--image", "/nonexistent.png", "hello"]) == 1
    assert capsys.readouterr().err == "penstock chat: image /nonexistent.png: No such file or directory\n"


def test_a_server_that_needs_a_key_is_asked_with_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.keys = True
        assert run(["--url", server.url, "hello"]) == 1
    assert capsys.readouterr().err == "penstock chat: send a key (here: --key KEY, or $OPENAI_API_KEY)\n"
