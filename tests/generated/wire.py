"""The page docs/wire.md and docs/asyncapi.json: every message on the broker, field by field, from the structs.

The text of a field is the comment behind it in ``schemas``, so page and code cannot differ. Examples are the bytes that
``tests/schemas/golden`` holds of each message; decoding them is also how another language's reader can be checked.
"""

import ast
import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from penstock.schemas import (
    audit,
    batches,
    deletions,
    done,
    fleet,
    jobs,
    keys,
    kv,
    plans,
    requests,
    routers,
    tenants,
    tokens,
    transfer,
    usage,
)
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from tests.generated.json_schema import schema_components

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "wire.md"
ASYNCAPI = ROOT / "docs" / "asyncapi.json"
GOLDEN = ROOT / "tests" / "schemas" / "golden"
LONG = 48  # characters of a value in an example

_Kind = type[msgspec.Struct]


class Channel(NamedTuple):
    """One kind of subject.

    Attributes:
        samples: names of the golden files of its messages.
    """

    subject: str
    stored: str
    messages: tuple[_Kind, ...]
    samples: tuple[str, ...]
    writes: str
    reads: str


CHANNELS = (
    Channel("ps.request.<model>.<class>.<shard>", "ps_REQUESTS",
            (requests.GenerateRequest, requests.PackedRequest), ("request", "packed_request"), "gateways", "routers"),
    Channel("ps.work.<role>.<worker>", "ps_WORK", (jobs.Job, transfer.Encoded, transfer.Prefilled, jobs.Revoke),
            ("job", "encoded", "prefilled", "revoke"), "routers, and workers for the next stage", "that worker"),
    Channel("ps.tokens.<gateway>", "ps_TOKENS", (tokens.TokenBatch,), ("tokens",), "workers, and routers for fences",
            "that gateway"),
    Channel("ps.done.<tenant>.<model>.<request>", "ps_DONE", (done.Done,), ("done",), "workers and routers",
            "everybody: it is the request's record"),
    Channel("ps.returned.<model>", "ps_DONE", (done.Returned,), ("returned",), "workers", "routers"),
    Channel("ps.kv.<model>.<worker>", "ps_KV", (kv.KvBatch,), ("kv",), "workers", "routers"),
    Channel("ps.handoff.<worker>", "ps_HANDOFF", (transfer.Handoffs,), ("handoff",), "workers", "people and traces"),
    Channel("ps.plan.<model>", "ps_PLAN", (plans.Planned,), ("planned",), "planners", "people"),
    Channel("ps.audit.<user>", "ps_AUDIT", (audit.AuditEntry,), ("audit",), "whoever the subject names",
            "`penstock audit`"),
    Channel("ps.batches.<tenant>.<batch>", "ps_BATCHES",
            (batches.BatchOpened, batches.BatchTaken, batches.BatchResults),
            ("batch_opened", "batch_taken", "batch_ended"), "the gateway that drives the batch", "its successor"),
    Channel("ps.usage.<number>", "ps_USAGE", (usage.UsagePart,), ("usage_part",), "routers",
            "gateways and `penstock usage`"),
    Channel("$KV.ps_batches.<tenant>.<id>", "KV_ps_batches", (batches.StoredFile, batches.Batch),
            ("stored_file", "batch"), "gateways", "gateways"),
    Channel("$KV.ps_workers.<worker>", "KV_ps_workers", (fleet.Registration,), ("registration",), "that worker",
            "everybody"),
    Channel("$KV.ps_adapters.<adapter>", "KV_ps_adapters", (fleet.AdapterEntry,), ("adapter_entry",), "gateways",
            "workers"),
    Channel("$KV.ps_weights.<model>", "KV_ps_weights", (fleet.WeightsEntry,), ("weights_entry",), "gateways",
            "workers"),
    Channel("$KV.ps_routers.<router>", "KV_ps_routers", (routers.Member,), ("router",), "that router",
            "routers and gateways"),
    Channel("$KV.ps_deleted.<request>", "KV_ps_deleted", (deletions.Deletion,), ("deletion",),
            "routers and `penstock forget`", "routers and gateways"),
    Channel("$KV.ps_tenants.<tenant>", "KV_ps_tenants", (tenants.Limits,), ("tenant",), "the operator",
            "gateways and routers"),
    Channel("$KV.ps_keys.<id>", "KV_ps_keys", (keys.ApiKey,), ("api_key",), "`penstock keys`", "gateways"),
    Channel("$KV.ps_budgets.<key>", "KV_ps_budgets", (keys.Ledger,), ("budget",), "gateways", "gateways"),
)  # fmt: skip

INTRO = """\
# Messages on the broker

For people who read or write the pipeline's streams in a language other than Python. A client needs none of this: it
uses the [subjects of the NATS API](nats.md), whose bodies are OpenAI's JSON.

Everything here is [MessagePack](https://msgpack.org). A **map** has a key for each field and leaves out fields that
have their default; keys that a reader does not know are ignored. An **array** has its fields by position, the first
being 0; later versions append fields, so a reader takes what it knows. Where several messages share a subject, the key
`type` says which one it is. All fields exist since 0.1.0; a field's name, place and meaning never change.

A request in REQUESTS, and in the `request` of a job, is a [GenerateRequest](#generaterequest), a map, or a
[PackedRequest](#packedrequest), an array. Gateways write the second where the metadata of REQUESTS has
`penstock-prompts: packed`.

A stream's metadata says the same to tools: `penstock-encoding` is the media type, `penstock-schema` the kinds of its
messages. Those in REQUESTS, WORK and DONE also have a header `Content-Type: application/msgpack; schema=<kind>`, unless
an earlier build wrote them. `penstock schema` lists the kinds, and `penstock schema Job` prints one of them as JSON
Schema, in which bytes are base64.

Values with a meaning of their own:

| value | how it is written |
|---|---|
| token ids, block ids, generations | bytes: unsigned 32-bit integers, little-endian, one after the other |
| block digests | bytes: 16 each, one after the other |
| times that end in `_ns` | integer: nanoseconds since 1970, UTC |
| integers | up to 64 bits. In JavaScript decode them as `BigInt`, or times lose their last digits |

The streams, their ages and limits are in `ARCHITECTURE.md`, in the source.
[asyncapi.json](asyncapi.json) has the same as AsyncAPI 3. The examples are the files of `tests/schemas/golden` in the
source, decoded; bytes are shown in hexadecimal, and cut where they are long.

This page is generated from the code (`python -m tests.generated`).
"""


def page() -> str:
    """The whole page, as the code has it."""
    parts = [INTRO]
    shown: set[_Kind] = set()
    for channel in CHANNELS:
        where = f"Stored in `{channel.stored}`. Written by {channel.writes}; read by {channel.reads}."
        parts.append(f"\n## `{channel.subject}`\n\n{where}\n")
        for kind, sample in zip(channel.messages, channel.samples, strict=True):
            inner = [each for each in _closure(kind) if each not in shown]
            for each in inner:
                shown.add(each)
                parts.append(_section(each))
            parts.append(f"\nAn example of `{kind.__name__}`:\n\n```json\n{_example(sample, kind)}\n```\n")
    return "".join(parts)


def asyncapi() -> str:
    """The document, AsyncAPI 3.0, as JSON."""
    kinds = list(dict.fromkeys(kind for channel in CHANNELS for kind in channel.messages))
    schemas, components = schema_components(kinds, ref_template="#/components/schemas/{name}")
    streams = {stream.name: stream.description for stream in topology(Subjects()).streams}
    channels, operations = {}, {}
    for channel in CHANNELS:
        name = re.sub(r"[^a-z]+", "_", channel.subject.lower()).strip("_")
        address = re.sub(r"<([a-z]+)>", r"{\1}", channel.subject)
        channels[name] = {
            "address": address,
            "description": f"Stored in {channel.stored}. {streams.get(channel.stored, '')}".strip(),
            "messages": {
                kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"} for kind in channel.messages
            },
            "parameters": {each: {} for each in re.findall(r"<([a-z]+)>", channel.subject)},
        }
        operations[f"read_{name}"] = {
            "action": "receive",
            "channel": {"$ref": f"#/channels/{name}"},
            "summary": f"Written by {channel.writes}; read by {channel.reads}.",
        }
    messages = {
        kind.__name__: {
            "contentType": "application/msgpack",
            "summary": _about(kind).partition("\n")[0],
            "payload": schema,
        }
        for kind, schema in zip(kinds, schemas, strict=True)
    }
    document = {
        "asyncapi": "3.0.0",
        "info": {"title": "Penstock's messages on NATS", "version": "0.1.0"},
        "defaultContentType": "application/msgpack",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": components},
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


# --- one struct ---


class Field(NamedTuple):
    """``place``: the key, or the position in an array."""

    place: str
    name: str
    type: str
    default: str
    about: str


def fields(kind: _Kind) -> Iterator[Field]:
    comments = _comments(kind)
    config = kind.__struct_config__
    offset = 1 if config.array_like and config.tag is not None else 0
    for position, field in enumerate(msgspec.structs.fields(kind)):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory
        text = "" if default is msgspec.NODEFAULT else _shown(default() if callable(default) else default)
        place = str(position + offset) if config.array_like else field.encode_name
        yield Field(place, field.name, _type(field.type), text, _plain(comments.get(field.name, "")))


def _section(kind: _Kind) -> str:
    config = kind.__struct_config__
    form = "An array." if config.array_like else "A map."
    if config.tag is not None:
        form += (
            f" It begins with `{config.tag}`." if config.array_like else f" Its `{config.tag_field}` is `{config.tag}`."
        )
    lines = [f"\n### {kind.__name__}\n\n{_about(kind)}\n\n{form}\n\n"]
    head = "position" if config.array_like else "key"
    names = " | field" if config.array_like else ""
    lines.append(f"| {head}{names} | type | default | meaning |\n|{'---|' * (5 if config.array_like else 4)}\n")
    for field in fields(kind):
        cells = [f"`{field.place}`", *([f"`{field.name}`"] if config.array_like else [])]
        cells += [field.type, f"`{field.default}`" if field.default else "required", field.about]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(lines)


def _about(kind: _Kind) -> str:
    """The struct's docstring, without its list of attributes, which is in the table."""
    text = _doc(kind).partition("\nAttributes:")[0].strip()
    return " ".join(text.replace("``", "`").split()) or f"Part of the messages above (`{kind.__module__}`)."


def _doc(kind: _Kind) -> str:
    """Its own docstring: ``inspect.getdoc`` takes that of msgspec's base class where there is none."""
    return inspect.cleandoc(vars(kind).get("__doc__") or "")


def _comments(kind: _Kind) -> dict[str, str]:
    """What the source says of each field: the comment behind it, or its line under "Attributes" in the docstring."""
    source = inspect.getsource(sys.modules[kind.__module__])
    behind: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            behind[token.start[0]] = token.string.lstrip("# ")
    node = next(
        each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.ClassDef) and each.name == kind.__name__
    )
    out = _attributes(_doc(kind))
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            found = [behind[line] for line in lines if line in behind]
            if found:
                out[statement.target.id] = " ".join(found)
    return out


def _attributes(doc: str) -> dict[str, str]:
    out, name = {}, ""
    for line in doc.partition("Attributes:\n")[2].splitlines():
        found = re.match(r"^    (\w+(?:, \w+)*): (.*)$", line)
        if found:
            name = found[1]
            out[name] = found[2]
        elif name and line.startswith("      "):
            out[name] += " " + line.strip()
        else:
            break
    return {each: text for names, text in out.items() for each in names.split(", ")}


def _plain(text: str) -> str:
    """A comment as a sentence of the page: values are written as on the wire."""
    return text.replace("``", "`").replace("None:", "null:")


def _closure(kind: _Kind) -> list[_Kind]:
    """A struct and those in its fields, in the order of a reader's questions."""
    found: list[_Kind] = []

    def visit(each: Any) -> None:
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            if each not in found:
                found.append(each)
                for hint in get_type_hints(each).values():
                    visit(hint)
        else:
            for part in getattr(each, "__args__", ()):
                visit(part)

    visit(kind)
    return found


# --- types and values ---

_NAMES = {int: "integer", float: "number", str: "text", bytes: "bytes", bool: "on, off", type(None): "null", Any: "any"}


def _type(hint: Any) -> str:
    if hint in _NAMES:
        return _NAMES[hint]
    if hint is msgspec.Raw:
        return "an encoded message, inline"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{each.value}`" for each in hint)
    args: tuple[Any, ...] = getattr(hint, "__args__", ())
    origin = getattr(hint, "__origin__", None)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"array of {_type(args[0])}"
        return f"array: {', '.join(map(_type, args))}"
    if origin is dict:
        return f"map of {_type(args[0])} to {_type(args[1])}"
    if args:
        return " or ".join(_type(each) for each in args)
    return str(hint)


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, msgspec.Struct):
        return "its defaults"
    if isinstance(value, bytes):
        return "empty" if not value else value.hex()
    return json.dumps(msgspec.to_builtins(value))


def _example(sample: str, kind: _Kind) -> str:
    value = msgspec.msgpack.decode((GOLDEN / f"{sample}.bin").read_bytes())
    return json.dumps(_readable(value), indent=1, ensure_ascii=False)


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return _readable(value.hex())
    if isinstance(value, str):
        return value if len(value) <= LONG else value[:LONG] + "…"
    if isinstance(value, dict):
        return {str(key): _readable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_readable(each) for each in value]
    return value
