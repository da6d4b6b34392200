"""``penstock schema``: each message's JSON Schema accepts what is on the wire, and nothing of another form."""

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from penstock.cli.commands import main
from penstock.operate.schema import MESSAGES
from penstock.schemas import done, jobs
from penstock.schemas.done import Returned
from penstock.schemas.subjects import HEADER_CONTENT_TYPE
from tests.generated.wire import CHANNELS

GOLDEN = Path(__file__).parents[2] / "schemas" / "golden"
SAMPLES = [
    (kind.__name__, sample)
    for channel in CHANNELS
    for kind, sample in zip(channel.messages, channel.samples, strict=True)
]


def as_json(value: Any) -> Any:
    """A decoded message as the JSON that its schema is about."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_what_is_on_the_wire_has_the_printed_schema(name: str, sample: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(as_json(msgspec.msgpack.decode((GOLDEN / f"{sample}.bin").read_bytes())))
    assert not validator.is_valid("another form")


def test_without_a_name_the_messages_are_listed_with_the_streams_that_hold_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["schema"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in lines] == list(MESSAGES)
    assert ["Job", "ps_WORK", "ps_MEMORY_CONTENTS"] in lines
    assert all(places for _, *places in lines)


def test_a_name_that_is_no_message_is_refused_with_the_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["schema", "Jobs"])
    assert left.value.code == 2
    assert "no message 'Jobs': did you mean Job?" in capsys.readouterr().err


def test_headers_name_a_message_that_the_command_prints() -> None:
    returned = done.returned_headers(Returned("r", "m", 1, "w", "gone"))
    job = jobs.headers_of("1 0 gw 9 standard", no_store=True)
    for headers, name in ((returned, "Returned"), (job, "Job"), (jobs.REVOKE_HEADERS, "Revoke")):
        assert headers[HEADER_CONTENT_TYPE] == f"application/msgpack; schema={name}"
        assert name in MESSAGES


def test_a_copy_of_a_message_without_the_header_gets_none() -> None:
    """Routers copy jobs of earlier builds, whose kind they do not read."""
    assert HEADER_CONTENT_TYPE not in jobs.headers_of("1 0 gw 9 standard", "", no_store=False)
