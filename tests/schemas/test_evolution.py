"""Logs that earlier builds wrote are read by this one.

``tests/data/log-BUILD.jsonl`` is a whole log of a small deployment of that build (mock engine; aggregated, prefill and
decode workers), one stored message a line; its first line has the bodies that were posted and the answers they got.
"""

import base64
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.schemas import done, jobs, kv, requests, tokens
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.token_dedup import replay
from penstock.schemas.wire import unpack_tokens

DATA = Path(__file__).parents[1] / "data"
MODELS = Path(__file__).parents[2] / "configs" / "models"
DECODERS = {
    "REQUESTS": requests.decode,
    "WORK": jobs.decode,
    "TOKENS": tokens.decode,
    "DONE": done.decode,
    "KV": kv.decode,
}


class Recorded:
    def __init__(self, path: Path) -> None:
        head, *lines = map(json.loads, path.read_text().splitlines())
        self.model = Tokenizer.from_file(str(MODELS / head["model"] / "tokenizer.json"))
        self.answers: list[dict[str, Any]] = head["answers"]
        self.streams: dict[str, list[Any]] = defaultdict(list)
        for line in lines:
            if line["stream"] in DECODERS:
                self.streams[line["stream"]].append(DECODERS[line["stream"]](base64.b64decode(line["data"])))


@pytest.fixture(params=sorted(DATA.glob("log-*.jsonl")), ids=lambda path: path.stem)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


def texts(answer: dict[str, Any]) -> dict[int, str]:
    """Of each choice, what the client got."""
    whole: dict[int, str] = defaultdict(str)
    if answer["body"].get("stream"):
        bodies = [json.loads(e[6:]) for line in answer["answer"].split("\n") if (e := line).startswith("data: {")]
        key = "delta"
    else:
        bodies, key = [json.loads(answer["answer"])], "message"
    for choice in (choice for body in bodies for choice in body["choices"]):
        whole[choice["index"]] += choice["text"] if "text" in choice else choice[key].get("content") or ""
    return whole


def test_every_message_of_an_earlier_log_is_read(recorded: Recorded) -> None:
    asked = {request.id: request for request in recorded.streams["REQUESTS"]}
    assert {answer["id"] for answer in recorded.answers} == set(asked)
    assert {event.request for event in recorded.streams["DONE"]} == set(asked)
    for job in recorded.streams["WORK"]:
        work = job if isinstance(job, jobs.Job) else jobs.decode_job(bytes(job.job))
        request = requests.decode(bytes(work.request))
        assert request == asked[request.id]
        assert request.tenant == "default"


def test_an_earlier_logs_tokens_and_ends_are_what_its_clients_got(recorded: Recorded) -> None:
    items = [item for batch in recorded.streams["TOKENS"] for item in batch.items]
    ends = {event.request: event for event in recorded.streams["DONE"] if isinstance(event, done.Done)}
    asked: dict[str, GenerateRequest] = {request.id: request for request in recorded.streams["REQUESTS"]}
    served = [answer for answer in recorded.answers if answer["status"] == 200]
    assert served
    for answer in served:
        request, end = asked[answer["id"]], ends[answer["id"]]
        streamed = replay([item for item in items if item.request == request.id], request.n)
        for index, text in texts(answer).items():
            from_end = unpack_tokens(end.choices[index].tokens)
            assert bytes(streamed[index].tokens) == end.choices[index].tokens
            assert recorded.model.decode(list(from_end)) == text
    failed = [answer for answer in recorded.answers if answer["status"] != 200]
    assert [ends[answer["id"]].code for answer in failed] == [
        json.loads(answer["answer"])["error"]["code"] for answer in failed
    ]
