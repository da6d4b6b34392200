"""The page about messages on the broker, and the AsyncAPI document, say what the code does."""

import json

import msgspec
import pytest

from penstock.operate.schema import MESSAGES
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from tests.generated import wire


def test_every_stream_and_bucket_of_ours_is_described() -> None:
    """Submissions are JSON, and claims, verdicts, leases of planners and positions of exporters are Penstock's own.

    The streams with memory storage hold the messages of the streams that they stand for.
    """
    shown = {channel.stored for channel in wire.CHANNELS}
    streams = topology(Subjects())
    there = {stream.name for stream in streams.streams} | {f"KV_{bucket.name}" for bucket in streams.buckets}
    buckets = {"KV_ps_exporters", "KV_ps_idempotency", "KV_ps_planners", "KV_ps_verdicts"}
    assert there - shown == {"ps_SUBMIT", "ps_MEMORY_CONTENTS", "ps_MEMORY_TOKENS", *buckets}
    assert shown <= there


def test_streams_and_buckets_name_the_messages_that_the_page_describes() -> None:
    found = topology(Subjects())
    named = {spec.name: set(spec.messages) for spec in found.streams} | {
        f"KV_{spec.name}": set(spec.messages) for spec in found.buckets
    }
    shown: dict[str, set[str]] = {}
    for channel in wire.CHANNELS:
        shown.setdefault(channel.stored, set()).update(kind.__name__ for kind in channel.messages)
    assert {name: named[name] for name in shown} == shown
    assert set().union(*named.values()) == set(MESSAGES), "`penstock schema` prints each of them"


@pytest.mark.parametrize("channel", wire.CHANNELS, ids=lambda channel: channel.subject)
def test_the_examples_are_messages_of_the_kind_that_they_stand_for(channel: wire.Channel) -> None:
    for kind, sample in zip(channel.messages, channel.samples, strict=True):
        msgspec.msgpack.decode((wire.GOLDEN / f"{sample}.bin").read_bytes(), type=kind)


def test_the_asyncapi_document_is_current_and_refers_to_what_it_has() -> None:
    text = wire.ASYNCAPI.read_text(encoding="utf-8")
    assert text == wire.asyncapi(), "run: python -m tests.generated"
    document = json.loads(text)

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [each for item in value.values() for each in references(item)]
        return [each for item in value for each in references(item)] if isinstance(value, list) else []

    for reference in references(document):
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
    assert len(document["channels"]) == len(wire.CHANNELS)


def test_positions_in_an_array_are_those_of_its_bytes() -> None:
    [batch] = [channel for channel in wire.CHANNELS if channel.stored == "ps_TOKENS"]
    raw = msgspec.msgpack.decode((wire.GOLDEN / f"{batch.samples[0]}.bin").read_bytes())
    value = msgspec.msgpack.decode((wire.GOLDEN / f"{batch.samples[0]}.bin").read_bytes(), type=batch.messages[0])
    for field in wire.fields(batch.messages[0]):
        if field.name != "items":
            assert raw[int(field.place)] == getattr(value, field.name)


def test_a_message_without_a_docstring_does_not_get_that_of_its_base_class() -> None:
    class Bare(msgspec.Struct):
        pass

    assert wire._about(Bare).startswith("Part of the messages above")
    assert "A base class for" not in wire.PAGE.read_text(encoding="utf-8")
