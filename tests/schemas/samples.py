"""The fullest instance of every message: each field differs from its default."""

from collections.abc import Callable
from typing import Any

import msgspec

from schemas import control, done, fleet, jobs, kv, requests, tokens, transfer
from schemas.wire import encode, pack_tokens

REQUEST = requests.GenerateRequest(
    id="01932c07-a4b8-7000-8000-0123456789ab",
    model="tiny",
    gateway="gw-1",
    prompt=pack_tokens([1, 2, 3, 2**32 - 1]),
    stop=requests.Stop(max_tokens=9, min_tokens=2, token_ids=(7, 8), strings=("\n\n", "Ende"), ignore_eos=True),
    created_ns=1_700_000_000_000_000_001,
    deadline_ns=1_700_000_600_000_000_001,
    digests=bytes(range(32)),
    block_size=16,
    sampling=requests.Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=2**63 - 1,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias={5: -100.0},
        logprobs=3,
    ),
    n=2,
    priority=requests.Priority.batch,
    user="someone",
    salt="tenant",
    lora="adapter",
    media=(requests.Media(digest=b"\x11" * 32, kind="image/png", bytes=5, position=1, tokens=2),),
    worker="w-1",
    endpoint="chat",
    stops_shown=True,
)
DECISION = jobs.Decision(
    mode="kv",
    chosen="w-1",
    router="r-1",
    at_ns=1_700_000_000_000_000_002,
    candidates=(jobs.Candidate("w-1", 3, 4, 5, 6, 7, 0.25, "full", 1, "prefill"),),
    prompt_blocks=8,
    waited_ns=9,
    kv_seq=10,
    work_seq=11,
    done_seq=12,
    rank=1,
    reason="worker_lost",
    route=(jobs.Stage("prefill", "w-1"), jobs.Stage("decode", "w-2", 1)),
    how="split",
)
JOB = jobs.Job(
    request=msgspec.Raw(encode(REQUEST)),
    attempt=2,
    decision=DECISION,
    resume=(pack_tokens([4, 5]), b""),
    finished=(1,),
    route=(jobs.Stage("decode", "w-2", 1),),
    endings=(tokens.Finish("stop", "END", 32),),
)
ENDPOINT = transfer.Endpoint(
    agent="w-1/3",
    backend="nixl",
    version="1.5.1",
    pools={"kv": transfer.Memory(2**47, 2 << 20, 100, "cuda", 1, 2**46, "float32(8,2)")},
    metadata=b"meta",
    digest=b"\x05" * 16,
    host="boot/pid",
    rdma=True,
    address="h",
)
TICKET = transfer.Ticket(
    id="t-1",
    worker="w-1",
    endpoint=ENDPOINT,
    pool="kv",
    blocks=pack_tokens([1, 2]),
    generations=pack_tokens([3, 4]),
    lease_ns=1_700_000_000_000_000_003,
)
HAND_OFF = transfer.HandOff("t-1", "failed", "w-1", "w-2", 7, 8, 9, 0.5, "timeout", "late", 10, "kv")
EVENTS: tuple[kv.KvEvent, ...] = (
    kv.Stored(bytes(range(32)), parent=b"\x01" * 16, group=1, tier=2),
    kv.Removed(b"\x02" * 16, group=1, tier=2),
    kv.Cleared(),
)
TOKENS = tokens.TokenBatch(
    "w-1",
    5,
    6,
    (
        tokens.TokenItem(
            REQUEST.id,
            2,
            1,
            3,
            pack_tokens([9]),
            tokens.Finish("stop", "Ende", 4, "cancelled", "gone"),
            (tokens.Logprob(-0.5, ((9, -0.5), (8, -1.0))),),
        ),
    ),
)

SAMPLES: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "request": (REQUEST, requests.decode),
    "job": (JOB, jobs.decode),
    "revoke": (jobs.Revoke(REQUEST.id, 2), jobs.decode),
    "encoded": (transfer.Encoded(REQUEST.id, 2, msgspec.Raw(encode(1)), TICKET, 5), jobs.decode),
    "prefilled": (
        transfer.Prefilled(REQUEST.id, 2, msgspec.Raw(encode(1)), TICKET, 4, 5, 6, b"opaque"),
        jobs.decode,
    ),
    "handoff": (
        transfer.HandOffs("w-2", (HAND_OFF,)),
        transfer.decode_ledger,
    ),
    "tokens": (TOKENS, tokens.decode),
    "kv": (kv.KvBatch("w-1", 5, 6, EVENTS, rank=1), kv.decode),
    "kv_dump": (kv.KvDump("w-1", 5, 6, EVENTS, rank=1, next_page=2), kv.decode_dump),
    "done": (
        done.Done(
            request=REQUEST.id,
            model="tiny",
            attempt=2,
            worker="w-1",
            choices=(done.Outcome(pack_tokens([4]), "stop", "Ende"), done.Outcome(b"", "stop", 7)),
            usage=done.Usage(1, 2, 3),
            timings=done.Timings(1, 2, 3, 4, 5),
            code="worker_lost",
            message="what to do",
            user="someone",
        ),
        done.decode,
    ),
    "returned": (done.Returned(REQUEST.id, "tiny", 2, "w-1", "draining", poison=True), done.decode),
    "registration": (
        fleet.Registration(
            worker="w-1",
            model="tiny",
            role="decode",
            engine="native",
            epoch=5,
            block_size=16,
            total_blocks=100,
            slots=8,
            max_model_len=4096,
            state=fleet.State.draining,
            aliases=("t",),
            revision="abc",
            kv_events=False,
            load=fleet.Load(1, 2, 3, 4),
            dp_size=2,
            transfer=ENDPOINT,
            host="h",
            pid=1,
            name="n",
            queue=3,
            connection="worker-1",
            vision=True,
        ),
        fleet.decode,
    ),
    "cancel": (control.Cancel(REQUEST.id, "gone"), control.decode_cancel),
    "dump_kv": (control.DumpKv(page=3), control.decode_worker),
    "drain": (control.Drain(), control.decode_worker),
    "release": (control.Release("t-1", "w-2"), control.decode_worker),
    "push": (
        control.Push("t-1", "w-2", ENDPOINT, pack_tokens([0]), pack_tokens([9]), 1.5),
        control.decode_worker,
    ),
    "pushed": (control.Pushed("timeout", "late", 8, 0.5, False), control.decode_pushed),
    "ok": (control.Ok("no such ticket"), control.decode_ok),
}
