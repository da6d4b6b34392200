"""What is on the wire stays readable: by this version, by older ones, from older ones, byte for byte."""

import ast
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import schemas
from penstock.schemas import done
from penstock.schemas.fleet import Load, Registration
from penstock.schemas.requests import (
    Constraint,
    Diffusion,
    Embedding,
    Fallback,
    LogitsProcessor,
    Media,
    PackedRequest,
    Parsing,
    Priority,
    Sampling,
    Stop,
)
from penstock.schemas.summary import RequestSummary, of_done, of_encoded_done
from penstock.schemas.tokens import TokenItem
from penstock.schemas.trace import Trace
from penstock.schemas.wire import encode, pack_tokens
from tests.penstock.log_tools.traces import samples
from tests.schemas.samples import SAMPLES

GOLDEN = Path(__file__).parent / "golden"
BY_ROLE = ("pools", "changes", "bounds", "holders", "messages", "ranks")  # maps, whose keys are no fields
MODULES = sorted(module.name for module in pkgutil.iter_modules(schemas.__path__))


def message_types() -> set[type[msgspec.Struct]]:
    """Every Struct that a module of ``schemas`` defines; those of ``token_dedup`` and ``summary`` are never sent."""
    found = set()
    for name in MODULES:
        if name in ("token_dedup", "summary"):
            continue
        module = importlib.import_module(f"penstock.schemas.{name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__:
                found.add(value)
    return found


def parts(value: Any) -> list[msgspec.Struct]:
    """A message and all messages inside it."""
    if isinstance(value, msgspec.Struct):
        return [value, *(part for name in value.__struct_fields__ for part in parts(getattr(value, name)))]
    if isinstance(value, dict):
        return [part for item in value.values() for part in parts(item)]
    if isinstance(value, tuple):
        return [part for item in value for part in parts(item)]
    return []


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    message, decode = SAMPLES[request.param]
    return request.param, message, decode


def test_every_message_comes_back_as_it_was(sample: tuple[str, Any, Any]) -> None:
    _, message, decode = sample
    assert decode(encode(message)) == message


def test_the_encoding_is_the_golden_one(sample: tuple[str, Any, Any]) -> None:
    """If this fails, processes of another version cannot read this message: add a field instead of changing one."""
    name, message, decode = sample
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert encode(message) == golden
    assert decode(golden) == message


def test_arrays_get_no_further_fields() -> None:
    """An array is written with all its fields: one more would change the bytes of every message that was recorded."""
    arrays = {kind for kind in message_types() if kind.__struct_config__.array_like}
    fields = {kind.__name__: len(kind.__struct_fields__) for kind in arrays}
    assert fields == {
        "Fallback": 2,
        "File": 8,
        "Finish": 6,
        "LineResult": 3,
        "Link": 4,
        "Logprob": 3,
        "LowerTiers": 6,
        "PackedRequest": 2,
        "ScoreRow": 15,
        "TokenBatch": 4,
        "TokenItem": 7,
    }


def test_each_message_type_has_a_full_sample() -> None:
    seen: dict[type[msgspec.Struct], set[str]] = {}
    for message, _ in SAMPLES.values():
        for part in parts(message):
            seen.setdefault(type(part), set()).update(
                field.name
                for field in msgspec.structs.fields(part)
                if getattr(part, field.name) != field.default or field.required
            )
    assert set(seen) == message_types()
    for kind, filled in seen.items():
        assert filled == set(kind.__struct_fields__), kind


MAPS = ("metadata", "times")  # of batches: their keys are data


def widen(raw: Any) -> Any:
    """The same message from a later version: more map fields, more array elements, at each level."""
    if isinstance(raw, dict):
        if all(isinstance(key, str) for key in raw):
            wider = {key: value if key in ("texts", "engine", *BY_ROLE) else widen(value) for key, value in raw.items()}
            return wider | {"a_later_field": [1, {"deep": b"x"}]}
        return raw
    return raw


def test_a_later_version_with_unknown_fields_is_read(sample: tuple[str, Any, Any]) -> None:
    _, message, decode = sample
    raw = msgspec.msgpack.decode(encode(message))
    if isinstance(raw, dict):
        raw["a_later_field"] = {"deep": [b"x"]}
        for key, value in raw.items():
            if isinstance(value, dict) and key not in ("request", "job", "a_later_field", *MAPS, *BY_ROLE):
                raw[key] = widen(value)
        if "request" in raw and isinstance(raw["request"], dict):  # carried raw: compared below as it is
            del raw["a_later_field"]
            raw["a_later_field"] = 1
    elif type(message) is PackedRequest:
        raw.append({"later": 1})
        raw[0] = widen(raw[0])
    else:
        raw.append({"later": 1})
        raw[3][0].append("later")
        raw[3][0][5].append("later")
        raw[3][0][6][0].append("later")
    assert decode(msgspec.msgpack.encode(raw)) == message


def test_an_earlier_version_without_the_optional_fields_is_read(sample: tuple[str, Any, Any]) -> None:
    _, message, decode = sample
    kind = type(message)
    fields = msgspec.structs.fields(kind)
    raw = msgspec.msgpack.decode(encode(message))
    required = [field for field in fields if field.required]
    if type(message) is PackedRequest:  # both are
        return
    old: Any
    if isinstance(raw, dict):
        tag = {"type": raw["type"]} if "type" in raw else {}
        old = tag | {field.name: raw[field.name] for field in required}
    else:
        old = [*raw[:3], [raw[3][0][:4]]]
    read = decode(msgspec.msgpack.encode(old))
    for field in fields:
        if not field.required and isinstance(raw, dict):
            made = field.default_factory
            assert getattr(read, field.name) == (field.default if made is msgspec.NODEFAULT else made())
    if not isinstance(raw, dict):
        assert read.items[0].finish is None
        assert read.items[0].tokens == b""


def test_new_fields_of_array_messages_have_defaults_from_the_first_optional_on() -> None:
    for kind in message_types():
        optional = [not field.required for field in msgspec.structs.fields(kind)]
        assert optional == sorted(optional), f"{kind.__name__}: a required field follows an optional one"


def test_messages_cannot_be_changed() -> None:
    assert all(kind.__struct_config__.frozen for kind in message_types())


@pytest.mark.parametrize("kept", [TokenItem, Registration, Load])
def test_what_processes_keep_thousands_of_is_nothing_to_garbage_collection(kept: type[msgspec.Struct]) -> None:
    assert not kept.__struct_config__.gc
    assert kept.__struct_config__.frozen  # so it is part of no cycle


def test_anything_else_is_a_validation_error(sample: tuple[str, Any, Any]) -> None:
    _, _, decode = sample
    for rubbish in (b"", b"\xc1", encode("text"), encode([]), encode({1: 2})):
        with pytest.raises(msgspec.MsgspecError):
            decode(rubbish)


@pytest.mark.parametrize("name", MODULES)
def test_schemas_import_nothing_of_ours(name: str) -> None:
    tree = ast.parse(Path(schemas.__path__[0], f"{name}.py").read_text())
    ours = {"gateway", "router", "workers", "configs", "infra", "tests", "torch", "nats"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & ours
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert (node.module or "").split(".")[0] not in ours


def test_terminal_events_of_releases_without_records_stay_readable() -> None:
    event = done.decode((GOLDEN / "done_without_record.bin").read_bytes())
    assert isinstance(event, done.Done)
    assert (event.code, event.submitted, event.left_out) == ("worker_lost", b"", ())
    assert done.request_of(event) is None


@pytest.mark.parametrize("name", [name for name in SAMPLES if name.startswith("done")])
def test_a_record_is_summarised_the_same_with_and_without_its_tokens_decoded(name: str) -> None:
    message, _ = SAMPLES[name]
    request = samples.request(tenant="acme", priority=Priority.batch, endpoint="chat", client_request_id="mine")
    for submitted in (b"", encode(request)):
        for code in ("", "internal", "cancelled"):
            event = msgspec.structs.replace(message, submitted=submitted, code=code)
            for record in (event, done.without_content(event)):
                assert of_encoded_done(encode(record), RequestSummary) == of_done(record)


def test_no_summary_is_made_of_a_returned_attempt() -> None:
    assert of_encoded_done(encode(SAMPLES["returned"][0]), RequestSummary) is None


# Of a request that is not stored: what its record and lists say of it. docs/operations.md has the same in words.
STAYS = {
    "shown",
    "id",
    "model",
    "revision",
    "tokenizer",
    "tenant",
    "gateway",
    "endpoint",
    "form",
    "lora",
    "block_size",
    "n",
}
STAYS |= {"priority", "no_store", "created_ns", "deadline_ns", "stops_shown", "echo", "unanswered"}
STAYS |= {"user", "worker", "client_request_id", "repeats_poison", "watched", "api_key", "origin", "resumes", "ran_as"}
STAYS |= {"fallback_after_s", "asked", "fallback", "fell_back_at", "interrupted_attempt", "prefilled"}


def test_of_a_request_that_is_not_stored_no_field_but_these_stays() -> None:
    """A new field fails this test until it is decided whether its client's text can be in it."""
    secret, said = "sesame", b"sesame"
    whole = samples.request(
        Trace("", f"vendor={secret}"),
        no_store=True,
        prompt=said,
        prompt_length=3,
        digests=said,
        stop=Stop(9, token_ids=(71_077_345,), strings=(secret,)),
        sampling=Sampling(logit_bias={71_077_345: 1.0}, logits_processors=(LogitsProcessor("p", said),)),
        salt=secret,
        session=secret,
        client_body=said,
        chat=said,
        media=(Media(said, "image/png", 3),),
        parsing=Parsing(texts={secret: {secret: True}}),
        diffusion=Diffusion("image", secret, 8, 8, 1, "png", negative=secret),
        embedding=Embedding(2, texts=(secret,), lengths=(71_077_345,)),
        constraint=Constraint("regex", secret),
        fallbacks=(Fallback("small", said),),
    )
    left = done.without_text(whole)
    assert said in encode(whole)
    assert said not in encode(left)
    assert encode(71_077_345) not in encode(left)
    changed = {name for name in whole.__struct_fields__ if getattr(whole, name) != getattr(left, name)}
    assert changed == set(whole.__struct_fields__) - STAYS


def test_a_record_without_content_has_none_of_an_embeddings_requests_texts() -> None:
    asked, _ = SAMPLES["request_for_vectors"]
    asked = msgspec.structs.replace(asked, embedding=Embedding(2, texts=("sesame",)), no_store=True)
    output = pack_tokens([3, 1, 2])
    event = done.Done(
        asked.id, "tiny", 1, choices=(done.Outcome(output, "stop"),), usage=done.usage_of(asked, [output]),
        submitted=encode(asked),
    )  # fmt: skip
    assert b"sesame" in encode(event)
    left = done.without_content(event)
    assert b"sesame" not in encode(left)
    assert left.choices == (done.Outcome(reason="stop"),)
    assert left.usage == done.Usage(prompt=3)
    assert b"sesame" not in done.encode_within(event, 200)
