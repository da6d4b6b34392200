"""The mock plays a recording: its tokens, at its times."""

import gzip
import io
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.log_tools.export.export import LineWriter
from penstock.log_tools.sources.log_line import FORMAT, FileHeader, LogLine, Selection, encode_line, header_line
from penstock.schemas.done import Done, Outcome, Timings
from penstock.schemas.requests import Sampling, Stop
from penstock.schemas.tokens import Logprob, TokenBatch, TokenItem
from penstock.schemas.wire import encode, pack_tokens
from penstock.workers.engines.core.engine import ScheduledEngine
from penstock.workers.engines.engine_protocol import SequenceRequest
from penstock.workers.engines.mock import MockOptions, build
from penstock.workers.engines.mock.play import Played, Player, RecordedChoice, read_recording
from tests.penstock.log_tools.traces import samples

PROMPT = list(range(40))
ANSWER = RecordedChoice([7, 8, 9, 10], [1.0, 1.5, 1.5, 4.0], tuple(Logprob(-float(at)) for at in range(4)))
RECORDED = Played("recorded", pack_tokens(PROMPT), 3, (ANSWER,))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def engine_of(*recorded: Played, clock: Clock, speedup: float = 1.0) -> ScheduledEngine:
    engine = build(MockOptions(vocab_size=50, speedup=speedup, played=recorded), sleep=clock.sleep)
    engine.hold = Player(recorded, speedup=speedup, clock=lambda: clock.now, sleep=clock.sleep).hold
    return engine


def asked(key: str = "a", prompt: list[int] = PROMPT, count: int = 4, **more: object) -> SequenceRequest:
    given = {"key": key, "prompt": prompt, "sampling": Sampling(seed=3), "stop": Stop(max_tokens=count)}
    return SequenceRequest(**given | more)  # type: ignore[arg-type]


def outputs(engine: ScheduledEngine, clock: Clock) -> Iterator[tuple[str, int, float]]:
    for _ in range(10_000):
        if not engine.has_work():
            return
        for output in engine.step().outputs:
            yield str(output.key), output.token, round(clock.now, 2)
    raise AssertionError("it does not end")


def test_recorded_tokens_come_at_their_times_and_others_are_the_mocks_own() -> None:
    clock = Clock()
    engine = engine_of(RECORDED, clock=clock)
    engine.submit(asked())
    assert list(outputs(engine, clock)) == [("a", 7, 1.0), ("a", 8, 1.5), ("a", 9, 1.5), ("a", 10, 4.0)]
    engine.submit(asked(prompt=[1, 2, 3]))
    own = build(MockOptions(vocab_size=50, speedup=0))
    own.submit(asked(prompt=[1, 2, 3]))
    assert [token for _, token, _ in outputs(engine, clock)] == [token for _, token, _ in outputs(own, Clock())]


def test_sequences_do_not_wait_for_each_others_tokens() -> None:
    clock = Clock()
    other = Played("other", pack_tokens([5, 6]), 0, (RecordedChoice([1, 2], [0.1, 2.0]),))
    engine = engine_of(RECORDED, other, clock=clock)
    engine.submit(asked())
    engine.submit(asked("b", [5, 6], 2))
    found = list(outputs(engine, clock))
    assert [entry for entry in found if entry[0] == "b"] == [("b", 1, 0.1), ("b", 2, 2.0)]
    assert [at for key, _, at in found if key == "a"] == [1.0, 1.5, 1.5, 4.0]


def test_a_longer_answer_continues_and_a_continued_one_starts_behind_what_there_is() -> None:
    clock = Clock()
    engine = engine_of(RECORDED, clock=clock)
    engine.submit(asked(count=6))
    assert len(list(outputs(engine, clock))) == 6
    began = clock.now
    engine.submit(asked(generated=[7, 8, 9]))
    [(_, token, at)] = outputs(engine, clock)
    assert (token, round(at - began, 2)) == (10, 2.5)


@pytest.mark.parametrize(("speedup", "last"), [(2.0, 2.0), (0.0, 0.0)])
def test_a_recording_can_be_played_faster(speedup: float, last: float) -> None:
    clock = Clock()
    engine = engine_of(RECORDED, clock=clock, speedup=speedup)
    engine.submit(asked())
    assert list(outputs(engine, clock))[-1] == ("a", 10, last)


def test_equal_prompts_play_the_answer_with_their_seed_else_take_turns() -> None:
    second = Played("second", pack_tokens(PROMPT), 4, (RecordedChoice([20], [0.0]),))
    clock = Clock()
    engine = engine_of(RECORDED, second, clock=clock)

    def first(**more: object) -> int:
        engine.submit(asked(count=1, **more))
        return next(iter(list(outputs(engine, clock))))[1]

    assert [first(sampling=Sampling(seed=4)), first(), first(sampling=Sampling(seed=4))] == [20, 7, 20]
    assert {first(sampling=Sampling(seed=9)), first(sampling=Sampling(seed=9))} == {7, 20}
    assert first(prompt=[3], client_request_id="second") == 20


def test_log_probabilities_are_the_recorded_ones() -> None:
    clock = Clock()
    engine = engine_of(RECORDED, clock=clock)
    engine.submit(asked(sampling=Sampling(seed=3, logprobs=0)))
    found = [output.logprob for _ in range(5000) if engine.has_work() for output in engine.step().outputs]
    assert found == list(ANSWER.logprobs)


def test_a_cancelled_sequence_is_not_waited_for() -> None:
    clock = Clock()
    engine = engine_of(RECORDED, clock=clock)
    engine.submit(asked())
    engine.step()
    assert engine.cancel("a")
    assert list(outputs(engine, clock)) == []


# -- the file -----------------------------------------------------------------------------------------------------


def flushed(written: LineWriter, file: io.BytesIO) -> bytes:
    """The lines since the last call."""
    before = file.tell()
    written.flush()
    return file.getvalue()[before:]


def export(path: Path, *, largest: int = 9, version: int = 1) -> str:
    request = samples.request(prompt=pack_tokens(PROMPT))
    times = Timings(samples.T0, samples.T0, samples.at(10), samples.at(30), samples.at(90))
    choice = Outcome(pack_tokens([7, 8, largest]), "length")
    done = Done(request.id, "tiny", 1, choices=(choice,), timings=times, submitted=encode(request))
    time = "2026-11-22T10:00:01Z"
    file = io.BytesIO()
    written = LineWriter(Selection(), file, None)
    if version > 1:  # the record refers to it
        written.add(LogLine("REQUESTS", 5, time, "ps.x", {"Nats-Msg-Id": request.id}, encode(request)))
    lines = [header_line(FileHeader(FORMAT, version, "", "", "ps")), flushed(written, file)]
    for second, first, tokens in ((59.99, 0, [7]), (0.04, 1, [8, largest])):  # across an hour's border
        hour = 9 if second > 1 else 10
        time = f"2026-11-22T{hour:02}:{59 if second > 1 else 0:02}:{second:012.9f}Z"
        batch = TokenBatch("w", 1, first, (TokenItem(request.id, 1, 0, first, pack_tokens(tokens)),))
        lines.append(encode_line(LogLine("TOKENS", first + 1, time, "ps.x", {}, encode(batch))))
    written.add(LogLine("DONE", 1, "2026-11-22T10:00:01Z", "ps.x", {"Nats-Msg-Id": request.id}, encode(done)))
    lines.append(flushed(written, file))
    assert (b'"request":5}' in lines[-1]) == (version > 1)
    lines.append(b'{"stream":"KV","anything":1}\n')
    path.write_bytes(b"".join(lines))
    return str(path)


@pytest.mark.parametrize("version", [1, 2])
def test_an_export_is_read_with_the_times_of_its_token_batches(tmp_path: Path, version: int) -> None:
    [found] = read_recording(export(tmp_path / "e.jsonl", version=version), 100)
    [answer] = found.answers
    assert (found.prompt, found.seed, list(answer.tokens)) == (pack_tokens(PROMPT), 3, [7, 8, 9])
    assert [round(at, 3) for at in answer.due_s] == [0.02, 0.07, 0.07]
    path = tmp_path / "without.jsonl"
    lines = Path(export(tmp_path / "e")).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b"TOKENS" not in line))
    assert [round(at, 3) for at in read_recording(str(path), 100)[0].answers[0].due_s] == [0.02, 0.05, 0.08]


def test_what_cannot_be_played_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--model"):
        read_recording(export(tmp_path / "e", largest=5000), 100)
    for content, said in ((b"{}", "line 1"), (header_line(FileHeader(FORMAT, 1, "", "", "")), "no answer to play")):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ValueError, match=said):
            read_recording(str(tmp_path / "bad"), 100)
    with pytest.raises(ValueError, match="cannot be read"):
        read_recording(str(tmp_path / "none"), 100)
    assert msgspec.json.decode(header_line(FileHeader(FORMAT, 1, "", "", "")))["format"] == FORMAT


def test_damaged_lines_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    whole = Path(export(tmp_path / "e.jsonl"))
    lines = whole.read_bytes().splitlines(keepends=True)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"".join([*lines, lines[-2][: len(lines[-2]) // 2] + b"\n"]))
    with pytest.raises(ValueError, match=f"line {len(lines) + 1}: .*--skip-bad"):
        read_recording(str(bad), 100)
    assert read_recording(str(bad), 100, skip_bad=True) == read_recording(str(whole), 100)
    packed = gzip.compress(whole.read_bytes())
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(packed[:-8])
    with pytest.raises(ValueError, match="cannot be read"):
        read_recording(str(cut), 100)
    assert len(read_recording(str(cut), 100, skip_bad=True)) == 1
