"""``penstock schema``: what the messages of the streams look like, as JSON Schema."""

from collections.abc import Sequence

import msgspec

from penstock.configs.flags import Parser, closest
from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, CompletionRequest
from penstock.gateway.apis.embeddings import EmbeddingRequest
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

# What streams and headers name: in the order of a request, then the other streams, then the buckets.
MESSAGES: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (
        *(ChatCompletionRequest, CompletionRequest, EmbeddingRequest),
        *(
            requests.GenerateRequest,
            requests.PackedRequest,
            jobs.Job,
            transfer.Encoded,
            transfer.Prefilled,
            jobs.Revoke,
        ),
        *(tokens.TokenBatch, done.Done, done.Returned),
        *(kv.KvBatch, transfer.Handoffs, plans.Planned, audit.AuditEntry),
        *(batches.BatchOpened, batches.BatchTaken, batches.BatchResults, batches.StoredFile, batches.Batch),
        usage.UsagePart,
        *(fleet.Registration, fleet.AdapterEntry, fleet.WeightsEntry, routers.Member),
        *(deletions.Deletion, tenants.Limits, keys.ApiKey, keys.Ledger),
    )
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def run(argv: Sequence[str]) -> int:
    """Print a message's schema, or the list of messages; the exit status."""
    parser = Parser(
        prog="penstock schema",
        description="print a message's JSON Schema; without MESSAGE, list the messages and the streams that hold them. "
        "Bytes, which MessagePack has and JSON does not, are base64 there. docs/wire.md says what fields mean.",
    )
    parser.add_argument(
        "message",
        nargs="?",
        metavar="MESSAGE",
        help="as in a header `Content-Type: application/msgpack; schema=MESSAGE`",
    )
    name = parser.parse_args(argv).message
    if name is None:
        print(listed())
        return 0
    if name not in MESSAGES:
        near = closest(name, MESSAGES)
        parser.error(f"no message {name!r}: " + (f"did you mean {near}?" if near else "`penstock schema` lists them"))
    print(msgspec.json.format(msgspec.json.encode({"$schema": DIALECT} | msgspec.json.schema(MESSAGES[name]))).decode())
    return 0


def listed() -> str:
    """A line for each message: its name, and the streams and buckets of the namespace ``ps`` that hold it."""
    found = topology(Subjects())
    held = [(stream.name, stream.messages) for stream in found.streams]
    held += [(f"KV_{bucket.name}", bucket.messages) for bucket in found.buckets]
    width = max(map(len, MESSAGES))
    places = {name: [stream for stream, messages in held if name in messages] for name in MESSAGES}
    return "\n".join(f"{name:<{width}}  {' '.join(places[name])}" for name in MESSAGES)
