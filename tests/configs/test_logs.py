"""Logging: lines that machines and people can read, whoever writes them."""

import fcntl
import io
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import IO

import pytest
import structlog

from penstock.configs.logs import OutputStream, setup


def lines(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_loggers_that_wrote_in_one_test_follow_the_set_up_of_the_next() -> None:
    """Of tests, in one process; a program sets up its logging once, and its loggers are cached."""
    log, first, second = structlog.get_logger("x"), io.StringIO(), io.StringIO()
    setup("json", "error", stream=first)
    log.error("one")
    setup("json", "info", stream=second)
    log.info("two")
    assert [line["event"] for line in lines(first) + lines(second)] == ["one", "two"]


def test_json_lines_carry_event_fields_and_the_process_name() -> None:
    out = io.StringIO()
    setup("json", "info", name="router-0", stream=out)
    structlog.get_logger("bus").info("routed", request="r1", worker="w", sizes={3}, odd=object)
    (line,) = lines(out)
    assert (line["event"], line["level"], line["process"], line["logger"]) == ("routed", "info", "router-0", "bus")
    assert (line["request"], line["worker"]) == ("r1", "w")
    assert list(line)[:3] == ["timestamp", "level", "event"]


def test_what_libraries_log_comes_out_the_same_way() -> None:
    out = io.StringIO()
    setup("json", "info", name="g", stream=out)
    logging.getLogger("uvicorn.error").info("started on %s", 8000)
    logging.getLogger("uvicorn.access").info("GET /")
    logging.getLogger("nats").info("reconnecting")
    (line,) = lines(out)
    assert (line["event"], line["logger"], line["process"]) == ("started on 8000", "uvicorn.error", "g")


def test_nothing_below_the_level_is_written() -> None:
    out = io.StringIO()
    setup("json", "warning", stream=out)
    structlog.get_logger().info("no")
    logging.getLogger("x").info("no")
    structlog.get_logger().warning("yes")
    assert [line["event"] for line in lines(out)] == ["yes"]


def test_an_exception_is_one_line_with_its_traceback() -> None:
    out = io.StringIO()
    setup("json", "info", stream=out)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        structlog.get_logger().exception("failed")
        logging.getLogger("x").exception("failed too")
    ours, theirs = lines(out)
    assert all("RuntimeError: boom" in str(line["exception"]) for line in (ours, theirs))


def test_bound_fields_follow_a_request() -> None:
    out = io.StringIO()
    setup("json", "info", stream=out)
    with structlog.contextvars.bound_contextvars(request="r9"):
        structlog.get_logger().info("inside")
    structlog.get_logger().info("outside")
    inside, outside = lines(out)
    assert inside["request"] == "r9"
    assert "request" not in outside


def test_no_value_can_lose_a_line() -> None:
    out = io.StringIO()
    setup("json", "info", stream=out)
    structlog.get_logger().info("\ud800", raw=b"\xff", nested={(1, 2): "x"})
    assert "ud800" in out.getvalue()


def test_a_reader_that_is_gone_does_not_stop_serving() -> None:
    out = io.StringIO()
    setup("json", "info", stream=out)
    logger = structlog.get_logger()
    out.close()
    logger.info("still here")


def test_auto_is_json_off_a_terminal_and_text_is_readable() -> None:
    out = io.StringIO()
    setup("auto", "info", stream=out)
    structlog.get_logger().info("one")
    assert lines(out)[0]["event"] == "one"
    out = io.StringIO()
    setup("text", "info", stream=out)
    structlog.get_logger("bus").info("connected", url="u")
    assert "connected" in out.getvalue()
    assert "url=u" in out.getvalue()


def test_a_traceback_shows_no_values_of_local_variables() -> None:
    out = io.StringIO()
    setup("text", "info", stream=out)

    def fails(prompt: str) -> None:
        raise ValueError(len(prompt))

    try:
        fails("a client's secret"[:])
    except ValueError:
        structlog.get_logger("t").exception("it_failed")
    assert "in fails" in out.getvalue()
    assert out.getvalue().count("a client's secret") == 1, "the line of the call; not the value of ``prompt``"


def pipe() -> tuple[int, IO[str]]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 16384)
    return reading, os.fdopen(writing, "w")


def test_a_reader_that_does_not_read_holds_nothing_up_and_is_told_what_it_missed() -> None:
    """A test that hangs here has failed."""
    reading, out = pipe()
    setup("json", "info", stream=out)
    for number in range(1000):
        structlog.get_logger("x").info("line", number=number, more="m" * 200)
    logging.getLogger("uvicorn.error").info("of a library")
    first = os.read(reading, 16384)
    structlog.get_logger("x").info("it reads again")
    said = first + os.read(reading, 16384)
    whole = [json.loads(line) for line in said.splitlines() if line.endswith(b"}")]
    *before, after, note = whole
    assert [line["number"] for line in before] == list(range(len(before)))
    assert (after["event"], note["event"], note["logger"]) == ("it reads again", "log_lines_lost", "logs")
    assert note["lines"] == 1001 - len(before)
    os.close(reading)
    structlog.get_logger("x").info("it has exited")
    out.close()


def test_a_reader_that_reads_slowly_is_not_waited_for_each_time_it_has_read() -> None:
    """Otherwise an event loop stands still for most of the time. A test that hangs here has failed."""
    reading, file = pipe()
    missed: list[int] = []
    out = OutputStream(file, missed.append)
    while not out._lost:
        out.write("x" * 1000 + "\n")
    out.WAIT_MS = 600_000
    for rounds in range(1, 4):
        os.read(reading, 8192)
        out.write("again\n")
        assert len(missed) == rounds
        while not out._lost:
            out.write("x" * 1000 + "\n")
    os.close(reading)
    file.close()


def test_a_terminal_that_takes_bytes_and_no_line_break_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, file = pipe()
    pauses: list[float] = []
    real, full = os.write, False

    def write(fd: int, data: bytes) -> int:
        if full and fd == out._to:
            raise BlockingIOError
        return real(fd, data)

    out = OutputStream(file)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr("penstock.configs.logs.time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    for _ in range(3):
        full = True
        out.write("lost\n")
        full = False
        out.write("taken\n")
    assert len(pauses) == out.WAIT_MS
    os.close(reading)
    file.close()


def test_a_line_longer_than_a_pipe_is_whole_for_a_reader_that_reads() -> None:
    reading, out = pipe()
    with ThreadPoolExecutor(1) as pool, os.fdopen(reading, "rb") as reader:
        line = pool.submit(reader.readline)
        OutputStream(out).write("x" * 300_000 + "\n")
        assert len(line.result()) == 300_001
    out.close()


def test_output_that_is_closed_from_the_start_is_no_error() -> None:
    out = OutputStream(None)
    assert out.write("lost\n") == 5
    assert not out.isatty()


def test_a_terminal_that_takes_nothing_more_holds_nothing_up() -> None:
    """A test that hangs here has failed: poll says that a terminal takes something although not a whole line."""
    reading, writing = os.openpty()
    with os.fdopen(writing, "w") as terminal:
        missed: list[int] = []
        out = OutputStream(terminal, missed.append)
        assert out.isatty()
        for _ in range(1000):
            out.write("x" * 200 + "\n")
        while not missed:
            os.read(reading, 4096)
            out.write("again\n")
        assert 0 < missed[0] <= 1000
        assert os.get_blocking(writing), "other processes share the terminal"
    os.close(reading)
