"""The engine over a server that the test plays: what it is asked, and what becomes of its answers and failures."""

import contextlib
import json
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model import modeldir
from penstock.infra.process.class_queue import StartShare
from penstock.schemas.done import Usage
from penstock.schemas.errors import Code
from penstock.schemas.requests import CARRIED_CHAT, Sampling, Stop
from penstock.workers.engines.engine_protocol import EngineAway, EngineError, RequestError, SequenceRequest
from penstock.workers.engines.openai.server import KEY_VARIABLE, from_settings
from tests.properties import some
from tests.workers.engines.contract import Driver

Answer = Callable[["Handler", dict[str, Any]], None]
PROMPT = array("I", [20, 21, 22])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Played"

    def log_message(self, *_: Any) -> None:
        """Tests say what they want to."""

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("authorization", ""))
        self.whole(200, {"data": [{"id": name, "max_model_len": 256} for name in self.server.names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.probing or not body.get("stream"):
            self.server.probe(self, body)
            return
        with self.server.lock:
            self.server.asked.append(body)
            number = len(self.server.asked) - 1
        self.server.answers[min(number, len(self.server.answers) - 1)](self, body)

    def whole(self, status: int, body: dict[str, Any], **headers: str) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def text(self, text: str) -> None:
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def stream(self, *chunks: dict[str, Any], ended: bool = True) -> None:
        self.lines(*(json.dumps(each) for each in chunks), *(["[DONE]"] if ended else []))

    def lines(self, *data: str) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked may have left
            for each in data:
                self.wfile.write(f"data: {each}\r\n\r\n".encode())
            self.wfile.flush()


class Played(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.names = ["there"]
        self.keys: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.answers: list[Answer] = []
        self.probe: Answer = ids
        self.probing = False  # streams are no answers yet

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def usage_of(text: str) -> dict[str, Any]:
    return {"prompt_tokens": len(modeldir.load(modeldir.TINY).tokenizer.encode(text).ids)}


def ids(handler: Handler, body: dict[str, Any]) -> None:
    """Takes and sends token ids."""
    choice = {"text": "x", "token_ids": [7]} if body.get("return_token_ids") else {"text": "x"}
    text = body["prompt"]
    handler.whole(200, {"choices": [choice], "usage": usage_of(text) if isinstance(text, str) else {}})


def texts(handler: Handler, body: dict[str, Any]) -> None:
    """Takes text only, and has another tokenizer."""
    if isinstance(body["prompt"], str):
        handler.whole(200, {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 3}})
    else:
        handler.whole(400, {"error": {"message": "a prompt is a string"}})


def chats(*refused: str, continued: int = 21, again: int = 26, says: str = '{"a": 1}') -> Answer:
    """Takes chats only, and none with the options that are refused; it counts prompts as ``continues`` reads them, and
    answers to all schemas the same."""

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if "messages" not in body:
            handler.whole(404, {"error": {"message": "this is a chat model"}})
        elif found := [name for name in refused if name in body]:
            handler.whole(400 if found[0] != "min_p" else 500, {"error": {"message": f"unknown {found[0]}"}})
        elif body.get("stream"):
            handler.stream()
        else:
            begun = len(body["messages"]) > 1
            count = continued if "continue_final_message" in body else again if begun else 20
            handler.whole(200, {"choices": [{"message": {"content": says}}], "usage": {"prompt_tokens": count}})

    return answer


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}


def ask_chat(key: object, count: int = 40, generated: tuple[int, ...] = ()) -> SequenceRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": count}
    asked = ask(key, count, generated)
    return msgspec.structs.replace(asked, chat=json.dumps(body).encode())


def said(*tokens: int, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish}]}


def says(*chunks: dict[str, Any], ended: bool = True) -> Answer:
    return lambda handler, body: handler.stream(*chunks, ended=ended)


def busy(handler: Handler, body: dict[str, Any]) -> None:
    handler.whole(429, {"error": {"message": "too many"}}, retry_after="1")


@pytest.fixture
def far() -> Iterator[Played]:
    with Played() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def drive(far: Played, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Driver]]:
    monkeypatch.setattr("penstock.workers.engines.openai.server.BUSY_S", 0.05)
    with contextlib.ExitStack() as undo:

        def one(**options: Any) -> Driver:
            given: dict[str, Any] = {"engine": "openai", "url": far.url, "max_running": 4} | options
            far.probing = True
            driver = Driver(from_settings(WorkerSettings(**given), modeldir.TINY))
            far.probing = False
            undo.callback(driver.engine.close)
            return driver

        yield one


def ask(key: object, count: int = 4, generated: tuple[int, ...] = (), tenant: str = "a") -> SequenceRequest:
    return SequenceRequest(
        key,
        PROMPT,
        Sampling(temperature=0.0),
        Stop(count),
        generated=array("I", generated),
        share=StartShare(1, tenant),
    )


def test_an_answer_of_ids_and_what_the_server_is_asked(far: Played, drive: Callable[..., Driver]) -> None:
    far.answers = [says(said(30), said(31, 32), said(33, finish="length"))]
    driver = drive()
    info = driver.engine.info
    assert (info.max_model_len, info.kv_events, info.slots) == (256, False, 4)
    assert driver.answer(ask(1)) == [30, 31, 32, 33]
    assert (far.asked[0]["prompt"], far.asked[0]["model"], far.asked[0]["max_tokens"]) == ([20, 21, 22], "there", 4)
    assert driver.engine.stats().running == 0


def test_a_server_without_ids_is_sent_text_and_its_text_becomes_tokens(
    far: Played, drive: Callable[..., Driver]
) -> None:
    far.probe = texts
    pieces = [{"choices": [{"text": text, "finish_reason": None}]} for text in (" wait", " when", " lo", "udly")]
    far.answers = [says(*pieces, {"choices": [{"text": "", "finish_reason": "stop"}]})]
    tokens = drive().answer(ask(1, 50))
    tokenizer = modeldir.load(modeldir.TINY).tokenizer
    assert tokenizer.decode(tokens) == " wait when loudly"
    assert tokens[-1] in modeldir.load(modeldir.TINY).eos_token_ids
    assert far.asked[0]["prompt"] == tokenizer.decode(list(PROMPT), skip_special_tokens=False)


def test_a_server_that_fails_on_what_it_does_not_know_is_not_sent_it(far: Played, drive: Callable[..., Driver]) -> None:
    """llama-cpp-python answers a prompt of ids with 500."""

    def probe(handler: Handler, body: dict[str, Any]) -> None:
        if isinstance(body["prompt"], str) and "min_p" not in body:
            handler.whole(200, {"choices": [{"text": "x"}], "usage": usage_of(body["prompt"])})
        else:
            handler.whole(500, {"error": {"message": "validation errors"}})

    far.probe, far.answers = probe, [says({"choices": [{"text": " wait", "finish_reason": "stop"}]})]
    driver = drive()
    assert driver.engine.info.ignored_options == ("min_p",)
    driver.answer(ask(1, 50))
    assert isinstance(far.asked[0]["prompt"], str)


def test_what_an_earlier_attempt_said_is_part_of_the_prompt(far: Played, drive: Callable[..., Driver]) -> None:
    far.answers = [says(said(33, finish="length"))]
    assert drive().answer(ask(1, 4, (30, 31, 32))) == [33]
    assert (far.asked[0]["prompt"], far.asked[0]["max_tokens"]) == ([20, 21, 22, 30, 31, 32], 1)


def test_an_answer_whose_connection_breaks_continues_after_what_came(far: Played, drive: Callable[..., Driver]) -> None:
    far.answers = [
        says(said(30), said(31), ended=False),
        lambda handler, body: handler.whole(500, {"error": "restarting"}),
        says(said(32), said(33, finish="length")),
    ]
    assert drive().answer(ask(1)) == [30, 31, 32, 33]
    assert [body["prompt"] for body in far.asked] == [[20, 21, 22], *[[20, 21, 22, 30, 31]] * 2]


def test_a_server_that_is_gone_ends_the_engine_so_that_others_continue(
    far: Played, drive: Callable[..., Driver]
) -> None:
    driver = drive()

    def gone(handler: Handler, body: dict[str, Any]) -> None:
        far.names = []
        handler.server.socket.close()
        handler.stream(said(30), ended=False)

    far.answers = [gone]
    driver.engine.submit(ask(1))
    with pytest.raises(EngineError, match="is gone"):
        driver.until(lambda: False, "the error")
    assert driver.seen.tokens(1) == [30]


def test_a_request_that_a_server_fails_on_does_not_end_those_that_it_answers(
    far: Played, drive: Callable[..., Driver]
) -> None:
    """Else one client could end each worker, again and again."""
    failed, went_on = threading.Semaphore(0), threading.Semaphore(0)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if body["max_tokens"] == 7:
            failed.release()
            assert went_on.acquire(timeout=20)
            handler.whole(500, {"error": "sk-12"})
            return
        handler.close_connection = True
        handler.send_response(200)
        handler.end_headers()
        for token in (30, 31, 32):
            assert failed.acquire(timeout=20)
            handler.wfile.write(f"data: {json.dumps(said(token))}\n\n".encode())
            went_on.release()
        handler.wfile.write(f"data: {json.dumps(said(33, finish='length'))}\n\n".encode())

    far.answers = [answer]
    seen = drive().run(ask("good", 4), ask("bad", 7))
    (failure,) = seen.failures
    assert (failure.key, failure.code) == ("bad", Code.engine_error)
    assert "sk-12" not in failure.message
    assert seen.tokens("good") == [30, 31, 32, 33]


def test_a_busy_server_is_asked_again_and_gets_fewer(far: Played, drive: Callable[..., Driver]) -> None:
    """The others wait in the worker, where tenants share."""
    arrived = threading.Semaphore(0)
    go = threading.Event()

    def late(handler: Handler, body: dict[str, Any]) -> None:
        arrived.release()
        assert go.wait(20)
        handler.stream(said(30, finish="length"))

    far.answers = [busy, late]
    driver = drive(max_running=3)
    for number in range(5):
        driver.engine.submit(ask(number, 1))
    for _ in range(2):  # that were not refused; the third asks again when the server has room
        assert arrived.acquire(timeout=20)
    assert driver.engine.stats().waiting + driver.engine.stats().running == 5
    go.set()
    driver.until(lambda: driver.seen.ended() == set(range(5)), "all ends")
    assert len(far.asked) == 6
    assert driver.seen.failures == []


def test_what_a_server_refuses_is_refused_with_its_words(far: Played, drive: Callable[..., Driver]) -> None:
    far.answers = [lambda handler, body: handler.whole(400, {"error": {"message": "no such thing"}})]
    (failure,) = drive().run(ask(1)).failures
    assert failure.code == Code.invalid_request
    assert "no such thing" in failure.message


def test_a_long_refusal_is_read_only_as_far_as_it_is_passed_on(far: Played, drive: Callable[..., Driver]) -> None:
    over = threading.Event()

    def wordy(handler: Handler, body: dict[str, Any]) -> None:
        handler.close_connection = True
        handler.send_response(400)
        handler.send_header("content-length", str(1 << 40))
        handler.end_headers()
        handler.wfile.write(b"no" * 1000)
        over.wait(20)

    far.answers = [wordy]
    (failure,) = drive().run(ask(1)).failures
    over.set()
    assert failure.code == Code.invalid_request
    assert 300 < len(failure.message) < 400


def test_a_fault_of_the_worker_ends_its_own_sequence_only(
    far: Played, drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    far.answers = [says(said(30, finish="length"))]
    driver = drive()
    with monkeypatch.context() as patched:
        patched.delattr("penstock.workers.engines.openai.server.body_of")
        (failure,) = driver.run(ask(1)).failures
    assert failure.code == Code.engine_error
    assert "its log has the error" in failure.message
    assert driver.answer(ask(2, 1)) == [30]


@pytest.mark.parametrize("asked", ["\xb2", "9" * 5000, "0", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_busy_server_that_names_no_seconds_is_asked_again(
    far: Played, drive: Callable[..., Driver], asked: str
) -> None:
    far.answers = [lambda handler, body: handler.whole(429, {}, retry_after=asked), says(said(30, finish="length"))]
    assert drive().answer(ask(1, 1)) == [30]


@pytest.mark.parametrize("status", [307, 401, 403, 404])
def test_a_refusal_of_the_worker_is_no_fault_of_its_client(
    far: Played, drive: Callable[..., Driver], status: int
) -> None:
    far.answers = [
        lambda handler, body: handler.whole(status, {"error": "wrong key sk-12"}, location="/elsewhere"),
        says(said(30, finish="length")),
    ]
    driver = drive()
    (failure,) = driver.run(ask(1)).failures
    assert failure.code == Code.engine_error
    assert str(status) in failure.message
    assert "sk-12" not in failure.message
    assert driver.answer(ask(2, 1)) == [30]


@pytest.mark.parametrize(
    "data",
    some(
        [
            *("[]", "7", "null", "{", '{"choices": [null]}', '{"choices": 5}', '{"choices": [{"token_ids": ["x"]}]}'),
            *('{"choices": [{"token_ids": 7}]}', '{"choices": [{"token_ids": [-1]}]}'),
            *('{"choices": [{"token_ids": [1e9]}]}', '{"choices": [{"token_ids": [4096]}]}'),
            *("[" * 100_000, '{"filler": "' + "x" * (2 << 20) + '"}'),
        ],
        *("null", '{"choices": [{"token_ids": [4096]}]}', "[" * 100_000),
    ),
)
def test_a_malformed_event_ends_its_own_sequence_only(far: Played, drive: Callable[..., Driver], data: str) -> None:
    far.answers = [lambda handler, body: handler.lines(data), says(said(30, finish="length"))]
    driver = drive()
    (failure,) = driver.run(ask(1)).failures
    assert failure.code == Code.engine_error
    assert "the server sent" in failure.message
    assert len(failure.message) < 300
    assert driver.answer(ask(2, 1)) == [30]


def test_separators_of_unicode_within_a_text_end_no_event(far: Played, drive: Callable[..., Driver]) -> None:
    """vLLM and others write them as they are."""
    far.probe = texts
    text = " one\u2028two\u2029three\x85 four"
    piece = json.dumps({"choices": [{"text": text, "finish_reason": None}]}, ensure_ascii=False)
    far.answers = [lambda handler, body: handler.lines(piece, '{"choices": [{"text": "", "finish_reason": "stop"}]}')]
    assert modeldir.load(modeldir.TINY).tokenizer.decode(drive().answer(ask(1, 90))) == text


def test_a_cancelled_sequence_closes_its_connection(far: Played, drive: Callable[..., Driver]) -> None:
    left = threading.Event()

    def endless(handler: Handler, body: dict[str, Any]) -> None:
        handler.close_connection = True
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(2000):
                handler.wfile.write(f"data: {json.dumps(said(30))}\n\n".encode())
                time.sleep(0.005)
        left.set()

    far.answers = [endless]
    driver = drive()
    driver.engine.submit(ask(1, 200))
    driver.until(lambda: len(driver.seen.outputs) > 2, "some tokens")
    assert driver.engine.cancel(1)
    assert left.wait(10)


def test_the_key_comes_from_a_file_or_a_variable(
    far: Played, drive: Callable[..., Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "of-a-variable")
    drive()
    (tmp_path / "key").write_text("of-a-file\n")
    drive(url_key_file=str(tmp_path / "key"))
    assert far.keys == ["Bearer of-a-variable", "Bearer of-a-file"]
    with pytest.raises(BadArguments, match="--url-key-file"):
        drive(url_key_file=str(tmp_path / "none"))


@pytest.mark.parametrize("key", ["sk-12\nsk-34", "sk-12\0", "sk-12ü"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(
    drive: Callable[..., Driver], tmp_path: Path, key: str
) -> None:
    (tmp_path / "key").write_text(key)
    with pytest.raises(BadArguments, match="printable ASCII") as refused:
        drive(url_key_file=str(tmp_path / "key"))
    assert "sk-" not in str(refused.value)


def test_a_variable_s_key_ends_before_its_line_feed(
    far: Played, drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As secrets have it that were made of files."""
    monkeypatch.setenv(KEY_VARIABLE, "of-a-variable\n")
    drive()
    assert far.keys == ["Bearer of-a-variable"]


def test_no_proxy_is_asked_for_a_server_of_this_machine(
    far: Played, drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    drive()
    assert len(far.keys) == 1


def test_a_password_in_the_url_is_sent_and_not_shown(
    far: Played, drive: Callable[..., Driver], capsys: pytest.CaptureFixture[str]
) -> None:
    secret = far.url.replace("//", "//me:sk-12@")
    far.answers = [says(said(30, finish="length"))]
    assert drive(url=secret).answer(ask(1, 1)) == [30]
    assert far.keys[0] == "Basic bWU6c2stMTI="
    far.names = []
    for url in (secret, "http://me:sk-12@127.0.0.1:1"):
        with pytest.raises((BadArguments, EngineError)) as failed:
            drive(url=url)
        assert "sk-12" not in str(failed.value)
    assert "sk-12" not in "".join(capsys.readouterr())
    with pytest.raises(BadArguments, match="--url: "):
        drive(url="http://host:port")


@pytest.mark.parametrize("answer", ["[]", "text", '{"choices": []}'])
def test_a_server_that_sends_no_completions_is_refused_at_the_start_or_sends_no_ids(
    far: Played, drive: Callable[..., Driver], answer: str
) -> None:
    def probe(handler: Handler, body: dict[str, Any]) -> None:
        handler.text(answer)

    far.probe = probe
    if answer.startswith("{"):
        drive()
    else:
        with pytest.raises(EngineError, match="answers with no completion"):
            drive()


def test_what_does_not_fit_the_server_is_said_at_the_start(far: Played, drive: Callable[..., Driver]) -> None:
    with pytest.raises(BadArguments, match="name the server with --url"):
        drive(url="")
    far.names = ["one", "two"]
    with pytest.raises(BadArguments, match="has one, two"):
        drive()
    far.answers = [says(said(7, finish="length"))]
    assert drive(url_model="two").answer(ask(1, 1)) == [7]
    far.probe = lambda handler, body: handler.whole(404, {"error": "only chat"})
    with pytest.raises(BadArguments, match=r"takes no prompt.*\n.*takes no chat"):
        drive(url_model="one")
    with pytest.raises(EngineAway, match="cannot be used"):  # it may be there at the next start
        drive(url="http://127.0.0.1:1")


def test_an_answer_that_the_server_aborts_continues_after_what_came(far: Played, drive: Callable[..., Driver]) -> None:
    far.answers = [
        says(said(30), said(31, finish="abort")),
        says(said(finish="abort")),
        says(said(32), said(33, finish="length")),
    ]
    assert drive().answer(ask(1)) == [30, 31, 32, 33]
    assert [body["prompt"] for body in far.asked] == [[20, 21, 22], *[[20, 21, 22, 30, 31]] * 2]


def test_a_server_that_aborts_an_answer_each_time_fails_that_one_only(
    far: Played, drive: Callable[..., Driver]
) -> None:
    far.answers = [says(said(finish="abort"))] * 3 + [says(said(30, finish="length"))]
    driver = drive()
    (failure,) = driver.run(ask(1)).failures
    assert (failure.code, len(far.asked)) == (Code.engine_error, 3)
    assert driver.answer(ask(2, 1)) == [30]


def falls_back(key: object, patience_s: float = 30.0, generated: tuple[int, ...] = ()) -> SequenceRequest:
    asked = ask(key, 4, generated)
    asked.falls_back, asked.patience_s = True, patience_s
    return asked


def test_a_failure_is_left_to_the_fallback_at_once_unless_an_answer_has_begun(
    far: Played, drive: Callable[..., Driver]
) -> None:
    far.answers = [
        lambda handler, body: handler.whole(500, {"error": "broken"}),
        lambda handler, body: handler.whole(500, {"error": "broken"}),
        says(said(31), said(32), said(33, finish="length")),
    ]
    driver = drive()
    (failure,) = driver.run(falls_back(1)).failures
    assert (failure.code, len(far.asked)) == (Code.engine_error, 1)
    assert driver.answer(falls_back(2, generated=(30,))) == [31, 32, 33]


def test_a_busy_server_is_waited_for_no_longer_than_until_the_fallback_may_run(
    far: Played, drive: Callable[..., Driver]
) -> None:
    far.answers = [
        lambda handler, body: handler.whole(429, {}, retry_after="1"),
        says(said(30, finish="length")),
        lambda handler, body: handler.whole(429, {}, retry_after="120"),
    ]
    driver = drive()
    assert driver.answer(falls_back(1, patience_s=5.0)) == [30]
    (failure,) = driver.run(falls_back(2, patience_s=5.0)).failures
    assert failure.code == Code.overloaded
    assert "wait for 1" in failure.message


def test_a_server_shows_how_many_it_takes_and_gets_no_more_at_once(
    far: Played, drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.engines.openai.protocol.LATE_S", 3600.0)  # this machine may be busy
    far.answers = [says(said(30, finish="length"))]
    driver = drive(max_running=64)
    assert driver.engine.stats().slots == 4, "as long as nothing is known"
    for wave in range(4):
        driver.run(*(ask(f"{wave}-{number}", 1) for number in range(16)))
    assert 4 < driver.engine.stats().slots <= 64


def test_a_server_that_refuses_names_it_does_not_know_is_sent_none_of_them(
    far: Played, drive: Callable[..., Driver]
) -> None:
    """A model's own defaults name some of them: it would refuse each request."""
    known = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stream", "repetition_penalty"}

    def strict(handler: Handler, body: dict[str, Any]) -> None:
        if unknown := body.keys() - known:
            handler.whole(422, {"detail": f"Unexpected fields in the request: {unknown}"})
        elif body.get("stream"):
            handler.stream(said(finish="stop"))
        else:
            handler.whole(200, {"choices": [{"text": "x"}], "usage": usage_of(str(body["prompt"]))})

    far.probe, far.answers = strict, [strict]
    driver = drive()
    assert driver.engine.info.ignored_options == ("min_p", "top_k")
    asked = ask(1)
    asked.sampling = Sampling(temperature=0.7, top_k=20, min_p=0.1, repetition_penalty=1.05, seed=3)
    assert driver.run(asked).failures == []
    assert far.asked[0]["repetition_penalty"] == 1.05


def text_of(tokens: list[int]) -> str:
    return str(modeldir.load(modeldir.TINY).tokenizer.decode(tokens))


def test_a_server_that_has_chats_only_is_asked_for_chats(far: Played, drive: Callable[..., Driver]) -> None:
    far.probe = chats("top_k", "min_p", "max_tokens")
    far.answers = [says(delta(role="assistant"), delta(content=" wait"), delta("stop"), USAGE)]
    driver = drive()
    assert driver.engine.info.logits_processors == (CARRIED_CHAT,)
    assert driver.engine.info.ignored_options == ("min_p", "top_k"), "a server may also fail on what it does not know"
    tokens = driver.answer(ask_chat(1))
    assert (text_of(tokens[:-1]), tokens[-1]) == (" wait", modeldir.load(modeldir.TINY).eos_token_ids[0])
    assert [each.usage for each in driver.seen.counted] == [Usage(9, 5, 0, foreign=True)]
    (asked,) = far.asked
    assert (asked["messages"], asked["max_completion_tokens"]) == ([{"role": "user", "content": "hi"}], 40)
    assert not {"prompt", "max_tokens"} & asked.keys()


def test_a_server_that_lists_no_models_is_asked_for_the_one_that_was_named(
    far: Played, drive: Callable[..., Driver]
) -> None:
    far.names = []
    far.answers = [says(said(30, finish="length"))]
    assert drive(url_model="named").answer(ask(1, 1)) == [30]
    assert far.asked[0]["model"] == "named"
    with pytest.raises(BadArguments, match="no model"):
        drive()


def test_a_chat_continues_after_what_came_where_the_server_continues_messages(
    far: Played, drive: Callable[..., Driver]
) -> None:
    far.probe = chats()
    far.answers = [
        says(delta(content=" wait"), delta(content=" when"), ended=False),
        says(delta("length", content=" loudly"), USAGE),
    ]
    driver = drive(url_api="chat")
    assert text_of(driver.answer(ask_chat(1))) == " wait when loudly"
    assert far.asked[1]["messages"][-1] == {"role": "assistant", "content": " wait when"}
    assert far.asked[1]["continue_final_message"] is True
    assert driver.seen.counted == [], "what it counts is a part"


@pytest.mark.parametrize(
    ("server", "refused"), [(chats(), False), (chats(says="1"), True), (chats("response_format"), True)]
)
def test_a_schema_is_refused_where_the_server_was_seen_to_pass_over_it(
    far: Played, drive: Callable[..., Driver], server: Answer, refused: bool
) -> None:
    far.probe, far.answers = server, [says(delta("stop"), USAGE)]
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_schema"}}
    driver = drive()
    asked = msgspec.structs.replace(ask(1), chat=json.dumps(body).encode())
    if not refused:
        assert len(driver.answer(asked)) == 1
        return
    with pytest.raises(RequestError, match="JSON schemas"):
        driver.engine.submit(asked)


@pytest.mark.parametrize("begun", [{"content": " wait"}, {"reasoning_content": "hm"}])
def test_a_chat_that_cannot_continue_says_so_and_one_of_which_nothing_came_starts_again(
    far: Played, drive: Callable[..., Driver], begun: dict[str, str]
) -> None:
    far.probe = chats(continued=26) if "content" in begun else chats()
    far.answers = [says(ended=False), says(delta(**begun), ended=False)]
    driver = drive(url_api="chat")
    (failure,) = driver.run(ask_chat(1)).failures
    assert failure.code == Code.worker_lost
    assert "cannot continue such an answer" in failure.message
    assert [len(body["messages"]) for body in far.asked] == [1, 1]


def test_a_request_on_which_an_idle_server_fails_does_not_end_the_worker(
    far: Played, drive: Callable[..., Driver]
) -> None:
    far.probe = chats()
    far.answers = [lambda handler, body: handler.whole(500, {"error": "sk-12"})] * 3 + [says(delta("stop"), USAGE)]
    driver = drive()
    (failure,) = driver.run(ask_chat(1)).failures
    assert (failure.code, len(far.asked)) == (Code.engine_error, 3)
    assert len(driver.answer(ask_chat(2))) == 1


def test_counts_that_do_not_come_hold_an_answer_for_a_moment_only(
    far: Played, drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.engines.openai.server.COUNTS_S", 0.1)
    over, waited = threading.Event(), list[bool]()

    def stays(handler: Handler, body: dict[str, Any]) -> None:
        handler.stream(delta(content=" wait"), delta("stop"))
        waited.append(over.wait(20.0))

    far.probe, far.answers = chats(), [stays]
    driver = drive()
    try:
        assert text_of(driver.answer(ask_chat(1))[:-1]) == " wait"
        assert (driver.seen.counted, waited) == ([], [])
    finally:
        over.set()


@pytest.mark.parametrize("drip", [True, False])
def test_a_list_of_models_without_end_is_no_answer(
    drip: bool, far: Played, drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.engines.openai.server.ANSWERS_S", 0.5 if drip else 30.0)
    monkeypatch.setattr("penstock.workers.engines.openai.server.MOST_ANSWER_BYTES", 1 << 20)
    over = threading.Event()

    def endless(handler: Handler) -> None:
        handler.close_connection = True
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not over.wait(0.05 if drip else 0.0):
                handler.wfile.write(b" " if drip else b" " * 65536)

    monkeypatch.setattr(Handler, "do_GET", endless)
    try:
        with pytest.raises(EngineError, match=r"has not answered within 0\.5 s" if drip else "more than 1 MiB"):
            drive()
    finally:
        over.set()
