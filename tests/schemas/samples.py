"""The fullest instance of every message: each field differs from its default."""

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.schemas import (
    audit,
    batches,
    cells,
    contents,
    control,
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
    trace,
    transfer,
    usage,
    verdicts,
)
from penstock.schemas.wire import encode, pack_tokens

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
        logits_processors=(requests.LogitsProcessor("temperature", b'{"temperature":0.5}'),),
        prompt_logprobs=2,
    ),
    n=2,
    priority=requests.Priority.batch,
    user="someone",
    salt="tenant",
    lora="adapter",
    media=(requests.Media(digest=b"\x11" * 32, kind="image/png", size=5, position=1, tokens=2),),
    worker="w-1",
    endpoint="chat",
    stops_shown=True,
    diffusion=requests.Diffusion(
        kind="video",
        prompt="a wave",
        width=832,
        height=480,
        steps=30,
        format="mp4",
        negative="blur",
        frames=81,
        frame_rate=16.0,
        images=2,
        guidance=5.5,
        seed=2**63 - 1,
        quality=80,
        inline=True,
    ),
    echo=True,
    unanswered=True,
    parsing=requests.Parsing("qwen3", "hermes", thinking=True, one_call=True, texts={"f": {"a": True}}),
    trace=trace.Trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1"),
    revision="abc",
    tokenizer="def",
    tenant="acme",
    form="stream",
    client_request_id="theirs",
)
REQUEST_WITH_A_CONSTRAINT = msgspec.structs.replace(
    REQUEST,
    sampling=requests.Sampling(logits_processors=(requests.LogitsProcessor(requests.CONSTRAINT),)),
    constraint=requests.Constraint("json_schema", '{"type":"object"}'),
)
STAMPS = trace.Stamps(1, 2, 3, 4, {"queue_s": 0.5})
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
    revision="abc",
)
EARLIER_WORKERS = (jobs.EarlierWorker(1, "w-1", "worker_lost: SIGKILL"), jobs.EarlierWorker(2, "w-2"))
JOB = jobs.Job(
    request=msgspec.Raw(encode(REQUEST)),
    attempt=2,
    decision=DECISION,
    resume=(pack_tokens([4, 5]), b""),
    finished=(1,),
    route=(jobs.Stage("decode", "w-2", 1),),
    endings=(tokens.Finish("stop", "END", 32),),
    scored=3,
    logprobs=((tokens.Logprob(-1.0), tokens.Logprob(-2.0)), ()),
    scores=(tokens.Logprob(-3.0), tokens.Logprob(-4.0)),
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
SPLIT_ENDPOINT = transfer.Endpoint(
    agent="w-2/1",
    backend="nixl",
    pools={"kv": transfer.Memory(2**47, 1 << 20, 100, "cuda", 0, 2**46, "bfloat16(32,2,32,4,128)", 0, 8)},
    ranks=(
        transfer.Endpoint(
            agent="w-2/1:rank1",
            backend="nixl",
            pools={"kv": transfer.Memory(2**47, 1 << 20, 100, "cuda", 1, 0, "bfloat16(32,2,32,4,128)", 4, 8)},
        ),
    ),
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
WINDOWS_TICKET = transfer.Ticket(
    *(TICKET.id, TICKET.worker, ENDPOINT, "kv", TICKET.blocks, TICKET.generations, TICKET.lease_ns),
    windows=pack_tokens([5]),
    window_generations=pack_tokens([6]),
)
HANDOFF = transfer.Handoff("t-1", "failed", "w-1", "w-2", 7, 8, 9, 0.5, "timeout", "late", 10, "kv")
FILE = tokens.File("r-1-0.mp4", "video/mp4", 9, 832, 480, 81, 16.0, 2.5)
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
            tokens.Finish("stop", "Ende", 4, "cancelled", "gone", (FILE,)),
            (tokens.Logprob(-0.5, ((9, -0.5), (8, -1.0)), 1),),
        ),
    ),
)

SAMPLES: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "request": (REQUEST, requests.decode),
    "job": (JOB, jobs.decode),
    "registration_of_a_silent_cache": (
        fleet.Registration("w", "tiny", "decode", "vllm", 1, 32, 100, 8, 4096, kv_events=False, silent_cache=True),
        fleet.decode,
    ),
    "registration_with_steps": (
        fleet.Registration("w", "tiny", "decode", "mock", 1, 32, 100, 8, 4096, load=fleet.Load(1, 2, 3, 4, 5)),
        fleet.decode,
    ),
    "registration_with_the_pace_of_steps": (
        fleet.Registration(
            "w", "tiny", "decode", "mock", 1, 32, 100, 8, 4096, load=fleet.Load(1, 2, 3, 4, 5, 6_000, 7)
        ),
        fleet.decode,
    ),
    "registration_with_the_pace_of_tokens": (
        fleet.Registration(
            *("w", "tiny", "decode", "vllm", 1, 32, 100, 8, 4096),
            load=fleet.Load(1, 2, 3, 4, 5, 6_000, 7, 12_000, 3_000, 800),
            device="2x NVIDIA H100 80GB HBM3",
        ),
        fleet.decode,
    ),
    "registration_with_the_pace_of_decode_steps": (
        fleet.Registration(
            *("w", "tiny", "decode", "vllm", 1, 32, 100, 8, 4096),
            load=fleet.Load(1, 2, 3, 4, 5, 6_000, 7, 12_000, 3_000, 800, 11_000),
        ),
        fleet.decode,
    ),
    "registration_that_waits_for_cores": (
        fleet.Registration(
            *("w", "tiny", "decode", "mock", 1, 32, 100, 8, 4096),
            load=fleet.Load(1, 2, 3, 4, 5, 6_000, 7, 12_000, 3_000, 800, 11_000, 40),
        ),
        fleet.decode,
    ),
    "registration_with_gpus_and_a_connector": (
        fleet.Registration(
            *("w", "tiny", "prefill", "native", 1, 32, 100, 8, 4096),
            load=fleet.Load(
                *(1, 2, 3, 4, 5),
                gpus=(fleet.GpuUse("GPU-1a2b3c4d", 80 << 30, 71 << 30, 97), fleet.GpuUse(error="GPU is lost")),
                connector=fleet.ConnectorUse("nixl", 60 << 30, 8192, 2, 3, 40, 8, 4, 4096),
            ),
        ),
        fleet.decode,
    ),
    "registration_with_gpus_of_two_machines": (
        fleet.Registration(
            *("w", "tiny", "aggregated", "vllm", 1, 32, 100, 8, 4096),
            load=fleet.Load(1, 2, 3, 4, 5, gpus=(fleet.GpuUse("GPU-1a2b3c4d", 80 << 30, 71 << 30, 97, "", "node-2"),)),
        ),
        fleet.decode,
    ),
    "registration_with_adapters": (
        fleet.Registration(
            *("w", "tiny", "aggregated", "native", 1, 32, 100, 8, 4096),
            adapters=(
                fleet.LoraAdapter("poet", "0a1b2c3d4e5f6071", "poets/one", 7, True),
                fleet.LoraAdapter("clerk", root="clerk", error="there is no such folder"),
            ),
            adapter_slots=8,
        ),
        fleet.decode,
    ),
    "registration_of_weights_that_changed": (
        fleet.Registration(
            *("w", "tiny", "aggregated", "native", 1, 32, 100, 8, 4096),
            revision="0f",
            weights=fleet.WeightsState(3, "0a", 7, "there is no such folder", True, True, "0e", 1.5),
        ),
        fleet.decode,
    ),
    "registration_with_received_tensors": (
        fleet.Registration(
            *("w", "tiny", "aggregated", "native", 1, 32, 100, 8, 4096),
            revision="0f",
            weights=fleet.WeightsState(3, "0a", 8, receives=True, received="0b"),
        ),
        fleet.decode,
    ),
    "weights_entry_of_tensors": (
        fleet.WeightsEntry(
            *("tiny", 3, "", "0a", "0f", "0e"),
            source=fleet.TensorSource(4, "nccl", "10.0.0.1", 29500, {"w": 1}),
            received=True,
        ),
        fleet.decode_weights,
    ),
    "registration_of_a_worker_that_moves_prefixes": (
        fleet.Registration("w", "tiny", "prefill", "native", 1, 32, 100, 8, 4096, moves_prefixes=True),
        fleet.decode,
    ),
    "registration_of_quantized_weights": (
        fleet.Registration(
            *("w", "tiny", "prefill", "native", 1, 32, 100, 8, 4096),
            transfer=transfer.Endpoint("w-1/3", "nixl", quantization="fp8"),
        ),
        fleet.decode,
    ),
    "weights_entry": (
        fleet.WeightsEntry("tiny", 3, "steps/300", "0a", "0f", "0e", fleet.CONTINUE, fleet.FINISH, 60.0),
        fleet.decode_weights,
    ),
    "adapter_entry_of_a_flag": (fleet.AdapterEntry("poet", "tiny", unloaded=True, flagged=True), fleet.decode_adapter),
    "adapter_entry": (fleet.AdapterEntry("poet", "tiny", "poets/one"), fleet.decode_adapter),
    "adapter_entry_of_one_that_was_unloaded": (fleet.AdapterEntry("poet", "tiny", unloaded=True), fleet.decode_adapter),
    "job_with_an_adapter_to_load": (
        msgspec.structs.replace(JOB, inputs=jobs.DecisionInputs(1, 2, 3, 4, unloaded=("w-2",))),
        jobs.decode,
    ),
    "job_with_blocks_to_bring_back": (
        msgspec.structs.replace(
            JOB, inputs=jobs.DecisionInputs(1, 2, 3, 4, lower_tiers=(jobs.LowerTiers("w-2", 1, 8, 4, 0.1, 0.5),))
        ),
        jobs.decode,
    ),
    "worker_with_measured_tiers": (
        fleet.Registration("w", "tiny", "decode", "native", 1, 32, 100, 8, 4096, tier_costs=(0.12, 0.6)),
        fleet.decode,
    ),
    "job_to_decide_again": (
        msgspec.structs.replace(
            JOB,
            decision=msgspec.structs.replace(
                JOB.decision, candidates=(jobs.Candidate("w-a", 2, 10, 500, 3, 8, 1.5, "", 1, "", 12, 1, 2.0, 1.5),)
            ),
            inputs=jobs.DecisionInputs(1, 2, 3, 4, 5, 64),
        ),
        jobs.decode,
    ),
    "job_with_served_tokens": (
        msgspec.structs.replace(
            JOB,
            decision=msgspec.structs.replace(
                DECISION, candidates=(jobs.Candidate("w-a", 2, score=1.5, served_tokens=9000),)
            ),
        ),
        jobs.decode,
    ),
    "job_with_a_score_table": (
        msgspec.structs.replace(
            JOB,
            decision=msgspec.structs.replace(DECISION, candidates=()),
            inputs=jobs.DecisionInputs(
                1,
                table=jobs.score_table(
                    [jobs.Candidate("w-a", 2, 10, 500, 3, 8, 1.5, "full", 1, "decode", 12, 1, 2.0, 1.5, 9000)]
                ),
            ),
        ),
        jobs.decode,
    ),
    "job_with_a_session": (
        msgspec.structs.replace(JOB, inputs=jobs.DecisionInputs(session=(("w-1", 0), ("w-2", 1)))),
        jobs.decode,
    ),
    "request_with_a_client_body": (
        msgspec.structs.replace(REQUEST, endpoint="response", client_body=b'{"model":"tiny"}'),
        requests.decode,
    ),
    "packed_request": (
        requests.packed(
            requests.GenerateRequest(
                REQUEST.id, "tiny", "gw-1", pack_tokens([1, 151_643, 2, 70_000]), requests.Stop(9), 1_700_000, 2_300_000
            )
        ),
        requests.decode_stored,
    ),
    "request_with_a_session": (msgspec.structs.replace(REQUEST, session="chat-1"), requests.decode),
    "request_with_a_constraint": (REQUEST_WITH_A_CONSTRAINT, requests.decode),
    "request_that_may_fall_back": (
        msgspec.structs.replace(
            REQUEST,
            fallbacks=(requests.Fallback("small", encode(msgspec.structs.replace(REQUEST, model="small"))),),
            fallback_after_s=30.0,
        ),
        requests.decode,
    ),
    "request_with_its_chat": (
        msgspec.structs.replace(
            REQUEST,
            chat=b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":4}',
            sampling=requests.Sampling(logits_processors=(requests.LogitsProcessor(requests.CARRIED_CHAT),)),
        ),
        requests.decode,
    ),
    "request_that_fell_back": (
        msgspec.structs.replace(REQUEST, asked="big", fallback=1, fell_back_at=2),
        requests.decode,
    ),
    "request_with_reasoning_as_its_client_wants_it": (
        msgspec.structs.replace(
            REQUEST,
            parsing=requests.Parsing("basic", "hermes", prefilled=True, names="both", hidden=True, joined=True),
            shown=requests.Shown(token_ids=True, tokens_as_ids=True, usage=True),
        ),
        requests.decode,
    ),
    "request_that_shows_special_tokens": (
        msgspec.structs.replace(REQUEST, shown=requests.Shown(special=True)),
        requests.decode,
    ),
    "request_whose_calls_are_known_by_name": (
        msgspec.structs.replace(REQUEST, parsing=requests.Parsing("kimi_k2", "kimi_k2", functions=("f", "g"))),
        requests.decode,
    ),
    "request_whose_marks_of_reasoning_are_tokens": (
        msgspec.structs.replace(
            REQUEST, parsing=requests.Parsing("qwen3", thoughts=requests.ThoughtTokens((151667,), (151668,)))
        ),
        requests.decode,
    ),
    "request_with_more_reasoning_behind_content": (
        msgspec.structs.replace(
            REQUEST, parsing=requests.Parsing("mistral", thoughts=requests.ThoughtTokens((34,), (35,), again=True))
        ),
        requests.decode,
    ),
    "request_whose_content_must_not_be_empty": (
        msgspec.structs.replace(REQUEST, parsing=requests.Parsing("qwen3", nonempty=True)),
        requests.decode,
    ),
    "request_for_vectors": (
        requests.GenerateRequest(
            "r",
            "tiny",
            "gw-1",
            b"",
            requests.Stop(1),
            5,
            6,
            endpoint="embedding",
            embedding=requests.Embedding(64, texts=("a", "b"), lengths=(3, 4), truncate=8, base64=True),
        ),
        requests.decode,
    ),
    "request_for_vectors_behind_a_prompt": (
        requests.GenerateRequest(
            "r",
            "tiny",
            "gw-1",
            b"",
            requests.Stop(1),
            5,
            6,
            endpoint="embedding",
            embedding=requests.Embedding(64, texts=("a",), prompt="query"),
        ),
        requests.decode,
    ),
    "request_for_scores": (
        requests.GenerateRequest(
            "r",
            "ranker",
            "gw-1",
            b"",
            requests.Stop(1),
            5,
            6,
            endpoint="rerank",
            embedding=requests.Embedding(
                1,
                ("a", "b"),
                truncate=8,
                prompt=requests.PAIRS,
                queries=("q",),
                document_tokens=4,
                top=1,
                shows_texts=True,
            ),
        ),
        requests.decode,
    ),
    "registration_of_a_cross_encoder": (
        fleet.Registration(
            "w-1", "ranker", "embed", "native", 5, 16, 0, 8, 512, embedder=fleet.Embedder(1, 512, 640, scores=True)
        ),
        fleet.decode,
    ),
    "registration_of_an_embedder_with_prompts": (
        fleet.Registration(
            "w-1",
            "tiny",
            "embed",
            "native",
            5,
            16,
            0,
            8,
            512,
            embedder=fleet.Embedder(64, 512, 640, prompts=("query", "document"), default_dimensions=32),
        ),
        fleet.decode,
    ),
    "registration_of_an_embedder": (
        fleet.Registration(
            "w-1", "tiny", "embed", "native", 5, 16, 0, 8, 512, embedder=fleet.Embedder(64, 512, 640, "mean", (32,))
        ),
        fleet.decode,
    ),
    "job_with_inputs": (msgspec.structs.replace(JOB, inputs=jobs.DecisionInputs(1, 2, 3, 4)), jobs.decode),
    "job_of_a_pair_to_decide_again": (
        msgspec.structs.replace(
            JOB, inputs=jobs.DecisionInputs(1, 2, 3, 4, 5, 64, links=(jobs.Link("prefill", 1, 2, True),))
        ),
        jobs.decode,
    ),
    "job_that_reads_a_prefix": (
        msgspec.structs.replace(
            JOB,
            decision=msgspec.structs.replace(
                DECISION, route=(jobs.Stage("prefill", "w-1", move=jobs.Move("w-3", 128, "over RDMA")),)
            ),
        ),
        jobs.decode,
    ),
    "job_behind_streamed_tokens": (msgspec.structs.replace(JOB, streamed_ns=7), jobs.decode),
    "job_of_a_suspect": (
        msgspec.structs.replace(JOB, suspect=jobs.ALONE, lost=((1, "w-1"), (2, "w-2"))),
        jobs.decode,
    ),
    "stored_file": (
        batches.StoredFile(
            "file-1", "acme", "in.jsonl", "batch", 9, 1_700_000_000_000_000_000, 1_700_000_001_000_000_000
        ),
        batches.decode_entry,
    ),
    "batch": (
        batches.Batch(
            "batch_1",
            "acme",
            "/v1/embeddings",
            "file-1",
            "24h",
            1_700_000_000_000_000_000,
            1_700_086_400_000_000_000,
            status=batches.BatchStatus.cancelling,
            keep_s=86_400,
            key="0a1b2c3d4e5f",
            driver="gw-1",
            total=5,
            completed=2,
            failed=1,
            output_file="file-2",
            error_file="file-3",
            metadata={"name": "nightly"},
            errors=(batches.LineError("invalid_json_line", "no", 2, "body"),),
            times={batches.BatchStatus.in_progress: 7, batches.BatchStatus.cancelling: 8},
        ),
        batches.decode_entry,
    ),
    "batch_that_was_cancelled": (
        batches.Batch("batch_1", "acme", "/v1/messages", "file-1", "24h", 1, 2, failed=3, unanswered=2),
        batches.decode_entry,
    ),
    "batch_opened": (batches.BatchOpened("gw-1"), batches.decode_message),
    "batch_taken": (batches.BatchTaken(((3, REQUEST.id), (4, REQUEST.id))), batches.decode_message),
    "batch_ended": (
        batches.BatchResults((batches.LineResult(3, True, b"{}"), batches.LineResult(4, False, b"{}"))),
        batches.decode_message,
    ),
    "verdict": (verdicts.Verdict(REQUEST.id, 7, "again"), verdicts.decode),
    "verdict_announced": (
        verdicts.Announced("acme.0a", verdicts.Verdict(REQUEST.id, 7)),
        verdicts.decode_announced,
    ),
    "request_with_an_api_key": (
        msgspec.structs.replace(REQUEST, api_key="pst-0a1b2c3d4e5f"),
        requests.decode,
    ),
    "request_that_is_watched": (msgspec.structs.replace(REQUEST, watched=True), requests.decode),
    "request_that_repeats_poison": (msgspec.structs.replace(REQUEST, repeats_poison=True), requests.decode),
    "done_behind_streamed_tokens": (
        done.Done(REQUEST.id, "tiny", 2, timings=done.Timings(1, 2, 3, 4, 5, 6)),
        done.decode,
    ),
    "done_at_the_third_worker": (
        done.Done(REQUEST.id, "tiny", 2, "w-3", timings=done.Timings(earlier_workers=EARLIER_WORKERS)),
        done.decode,
    ),
    "done_with_its_router": (
        done.Done(REQUEST.id, "tiny", 1, "w-3", timings=done.Timings(1, 2, router="router-0-5e6f7a8b")),
        done.decode,
    ),
    "done_with_packed_tokens": (
        done.packed(
            done.Done(REQUEST.id, "tiny", 1, "w-1", choices=(done.Outcome(pack_tokens([1, 151_643] * 4), "stop"),))
        ),
        done.decode_stored,
    ),
    "done_of_a_fallback": (
        done.Done(REQUEST.id, "small", 2, timings=done.Timings(made_with=done.MadeWith("2f6c", fallback=1))),
        done.decode,
    ),
    "done_with_reasoning": (done.Done(REQUEST.id, "tiny", 1, "w-1", usage=done.Usage(1, 20, 0, 15)), done.decode),
    "done_that_a_server_counted": (
        done.Done(REQUEST.id, "tiny", 1, usage=done.Usage(12, 7, 4, 5, foreign=True)),
        done.decode,
    ),
    "done_with_its_engine": (
        done.Done(
            REQUEST.id, "tiny", 1, timings=done.Timings(made_with=done.MadeWith("2f6c", "vllm", "penstock 0.1.0"))
        ),
        done.decode,
    ),
    "done_of_weights_that_changed": (
        done.Done(
            REQUEST.id,
            "tiny",
            1,
            timings=done.Timings(made_with=done.MadeWith("2f6c", before=(done.EarlierRevision("1e5b", (3, 0)),))),
        ),
        done.decode,
    ),
    "job_at_the_third_worker": (
        jobs.Job(JOB.request, 2, DECISION, inputs=jobs.DecisionInputs(earlier_workers=EARLIER_WORKERS)),
        jobs.decode,
    ),
    "job_of_a_weighty_tenant": (
        jobs.Job(JOB.request, 2, DECISION, inputs=jobs.DecisionInputs(weight=2.5)),
        jobs.decode,
    ),
    "router": (routers.Member("router-1-0a1b2c3d", 1_700_000_000_000_000_000, ("tiny",), "NSERVER", 7), routers.decode),
    "deletion": (
        deletions.Deletion(
            f"ps.done.default.tiny.{REQUEST.id}", {"ps_WORK": (7, 9), "ps_REQUESTS": (5,), "ps_DONE": (4,)}
        ),
        deletions.decode,
    ),
    "router_sharing": (
        routers.Member("router-1-0a1b2c3d", 1_700_000_000_000_000_000, ("tiny",), "NSERVER", 7, ("tiny",)),
        routers.decode,
    ),
    "router_that_saw_leases_lost": (
        routers.Member("router-2", 1, lost=(routers.LostLeases("worker-1", "aggregated", "tiny", 3, 7),)),
        routers.decode,
    ),
    "router_that_saw_all_leases_lost": (
        routers.Member("router-2", 1, lost=(routers.LostLeases("worker-1", "aggregated", "tiny", 0, 7, 2),)),
        routers.decode,
    ),
    "router_that_holds": (
        routers.Member("router-2", 1, held=(routers.HeldByTenant("batch", (("acme", 3), ("ann", 1)), 2),)),
        routers.decode,
    ),
    "request_with_private_media": (
        msgspec.structs.replace(
            REQUEST, no_store=True, media=(requests.Media(b"\x11" * 32, "image/png", 5, 1, 2, private=REQUEST.id),)
        ),
        requests.decode,
    ),
    "request_with_a_video": (
        msgspec.structs.replace(
            REQUEST, media=(requests.Media(b"\x12" * 32, "video/mp4", 5, 1, 12, grid=(3, 2, 2), seconds=0.75),)
        ),
        requests.decode,
    ),
    "request_not_to_store": (
        requests.GenerateRequest(
            "0197a3f2-5c00-7abc-8def-0123456789ab",
            "tiny",
            "gw-1",
            pack_tokens([1]),
            requests.Stop(1),
            1,
            2,
            no_store=True,
        ),
        requests.decode,
    ),
    "registration_with_an_inbox": (
        fleet.Registration("w-1", "tiny", "decode", "native", 5, 16, 100, 8, 4096, inbox="_INBOX.a"),
        fleet.decode,
    ),
    "request_without_content": (
        contents.without_content(msgspec.structs.replace(REQUEST, no_store=True), bytes(32)),
        requests.decode,
    ),
    "registration_with_ignored_options": (
        fleet.Registration("w", "tiny", "decode", "trtllm", 1, 32, 100, 8, 4096, ignored_options=("seed",)),
        fleet.decode,
    ),
    "registration_with_source": (
        fleet.Registration("w", "tiny", "decode", "mock", 1, 32, 100, 8, 4096, source="/models/tiny"),
        fleet.decode,
    ),
    "cell_loads": (
        cells.CellLoads("router-1", (cells.ModelLoad("tiny", 900, (cells.TargetLoad(512, 2, 3, 40),)),)),
        cells.decode_loads,
    ),
    "cell_loads_with_pace": (
        cells.CellLoads("router-1", (cells.ModelLoad("tiny", 0, (cells.TargetLoad(512),), 45_000),)),
        cells.decode_loads,
    ),
    "cell_cost": (cells.CellCost(512.5, True, 300.0), cells.decode_cost),
    "room_question_of_a_revision": (cells.RoomQuestion("tiny", (512,), True, "2f6c"), cells.decode_room_question),
    "room_question": (cells.RoomQuestion("tiny", (512, 900), True), cells.decode_room_question),
    "room_answer": (cells.RoomAnswer((2, 0)), cells.decode_room_answer),
    "request_with_functions_in_place_of_tools": (
        msgspec.structs.replace(
            REQUEST, shown=requests.Shown(token_ids=True, tokens_as_ids=True, usage=True, function_call=True)
        ),
        requests.decode,
    ),
    "request_of_another_cell": (
        msgspec.structs.replace(REQUEST, origin="01982f4c-7c00-7abc-8def-001456789abc", resumes=True),
        requests.decode,
    ),
    "request_that_continues_a_message": (msgspec.structs.replace(REQUEST, prefilled=True), requests.decode),
    "request_stored_again": (msgspec.structs.replace(REQUEST, interrupted_attempt=2), requests.decode),
    "request_that_ran_in_another_cell": (
        msgspec.structs.replace(REQUEST, ran_as="01982f4c-7c00-7abc-8def-001456789abc"),
        requests.decode,
    ),
    "router_with_queues_by_model": (
        routers.Member("router-2", 1, queued=routers.HeldByModel((("tiny", 3), ("demo", 1)), 2)),
        routers.decode,
    ),
    "router_that_reads_packed": (routers.Member("router-2", 1, reads_packed=True), routers.decode),
    "registration_that_reads_packed": (
        fleet.Registration("w", "tiny", "decode", "mock", 1, 32, 100, 8, 4096, reads_packed=True),
        fleet.decode,
    ),
    "registration_that_reserves": (
        fleet.Registration("w", "tiny", "decode", "mock", 1, 32, 100, 8, 4096, reserves=True),
        fleet.decode,
    ),
    "registration_that_reads_layers": (
        fleet.Registration("w", "tiny", "decode", "mock", 1, 32, 100, 8, 4096, reserves=True, reads_layers=True),
        fleet.decode,
    ),
    "registration_of_a_pair_only": (
        fleet.Registration("w", "tiny", "decode", "sglang", 1, 32, 100, 8, 4096, pair_only=True),
        fleet.decode,
    ),
    "job_decided_among_pairs_only": (
        msgspec.structs.replace(
            JOB, inputs=jobs.DecisionInputs(1, 2, 3, block_size=64, links=(jobs.Link("decode", 1),), pair_only=(0,))
        ),
        jobs.decode,
    ),
    "job_decided_among_gpus": (
        msgspec.structs.replace(
            JOB, inputs=jobs.DecisionInputs(1, 2, 3, block_size=64, links=(jobs.Link("decode", 1),), on_gpu=(0,))
        ),
        jobs.decode,
    ),
    "tenant": (tenants.Limits(("tiny", "other"), 7), tenants.decode),
    "tenant_with_a_weight": (tenants.Limits(weight=2.5), tenants.decode),
    "tenant_with_a_budget": (tenants.Limits(tokens_per_month=1_000_000), tenants.decode),
    "tenant_with_a_bound": (tenants.Limits(max_waiting=100), tenants.decode),
    "tenant_with_limits_per_minute": (
        tenants.Limits(requests_per_minute=60, tokens_per_minute=100_000),
        tenants.decode,
    ),
    "usage_part_with_reasoning": (
        usage.UsagePart(2, 7, rows=(usage.UsageRow(472_222, "acme", "", "tiny", "", 3, 300, 100, 30, 2, 12, 1),)),
        usage.decode,
    ),
    "usage_part": (
        usage.UsagePart(
            2,
            7,
            1_700_000_000_000_000_001,
            (usage.UsageRow(472_222, "acme", "pst-0a1b2c3d4e5f", "tiny", "poet", 3, 300, 100, 30, 2),),
            True,
            usage.UsageGap(4, 1_600_000_000_000_000_001, 1_700_000_000_000_000_001),
        ),
        usage.decode,
    ),
    "tenant_that_shares_its_cache": (tenants.Limits(shared_cache=True), tenants.decode),
    "budget": (
        keys.Ledger({1_700_000_000: 3}, {1_700_000_000: 900}, {"gw-1": keys.Holder(2, 1_700_000_006)}),
        keys.decode_ledger,
    ),
    "api_key": (
        keys.ApiKey(
            id="0a1b2c3d4e5f",
            digest=bytes(range(32)),
            tenant="acme",
            models=("tiny", "other"),
            requests_per_minute=60,
            tokens_per_minute=10_000,
            max_concurrent=4,
            priority=requests.Priority.batch,
            created_ns=1_700_000_000_000_000_001,
            expires_ns=1_700_000_600_000_000_001,
            revoked_ns=1_700_000_500_000_000_001,
            operator=True,
            about="the notebook",
            created_by="root@here",
            revoked_by="root@there",
        ),
        keys.decode,
    ),
    "api_key_with_a_budget": (keys.ApiKey("0a1b2c3d4e5f", bytes(32), tokens_per_month=1_000_000), keys.decode),
    "api_key_that_was_changed": (
        keys.ApiKey("0a1b2c3d4e5f", bytes(32), changed_ns=1_700_000_000_000_000_001, changed_by="root@here"),
        keys.decode,
    ),
    "audit": (
        audit.AuditEntry(
            "api", "ps_DONE", "stream purge", "root@here", "pst-0a1b2c3d4e5f", "operator", "nats at h, 7", 3, "refused"
        ),
        audit.decode,
    ),
    "revoke": (jobs.Revoke(REQUEST.id, 2), jobs.decode),
    "encoded": (transfer.Encoded(REQUEST.id, 2, msgspec.Raw(encode(1)), TICKET, 5, STAMPS), jobs.decode),
    "prefilled": (
        transfer.Prefilled(REQUEST.id, 2, msgspec.Raw(encode(1)), TICKET, 4, 5, 6, b"opaque", STAMPS),
        jobs.decode,
    ),
    "prefilled_with_windows": (
        transfer.Prefilled(REQUEST.id, 2, msgspec.Raw(encode(1)), WINDOWS_TICKET),
        jobs.decode,
    ),
    "handoff": (
        transfer.Handoffs("w-2", (HANDOFF,)),
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
            choices=(
                done.Outcome(pack_tokens([4]), "stop", "Ende", logprobs=(tokens.Logprob(-1.0),)),
                done.Outcome(b"", "stop", 7, (FILE,)),
            ),
            usage=done.Usage(1, 2, 3),
            timings=done.Timings(1, 2, 3, 4, 5),
            code="worker_lost",
            message="what to do",
            user="someone",
            stamps=STAMPS,
            submitted=encode(1),
            scores=(tokens.Logprob(-2.0),),
            left_out=("prompt",),
        ),
        done.decode,
    ),
    "returned": (done.Returned(REQUEST.id, "tiny", 2, "w-1", "draining", poison=True), done.decode),
    "returned_by_a_crash": (
        done.Returned(REQUEST.id, "tiny", 2, "w-1", "crashed: SIGSEGV", poison=True, crashed="alone"),
        done.decode,
    ),
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
            state=fleet.WorkerState.draining,
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
            diffusion=fleet.Diffuser(
                kind="video",
                pipeline="WanPipeline",
                width=832,
                height=480,
                steps=50,
                formats=("mp4", "webp"),
                max_pixels=10**6,
                max_steps=100,
                multiple=16,
                max_images=2,
                frames=81,
                max_frames=161,
                frame_step=4,
                frame_rate=16.0,
                negative=False,
                guidance=False,
            ),
            logits_processors=("temperature",),
            reasoning_parser="qwen3",
            tool_call_parser="hermes",
            max_batched_tokens=8192,
            tokenizer="def",
        ),
        fleet.decode,
    ),
    "planned": (
        plans.Planned(
            planner="plan-1",
            model="tiny",
            at_ns=1_700_000_000_000_000_001,
            connector="local",
            rules=plans.Rules(
                ttft_ms=300.0,
                itl_ms=25.0,
                percentile="p50",
                predictor="constant",
                interval_s=10.0,
                start_s=20.0,
                drain_s=40.0,
                hysteresis=0.1,
                up_cooldown_s=5.0,
                down_cooldown_s=6.0,
                down_after_s=7.0,
                max_down=0.5,
                gpu_budget=8,
                bounds={"decode": plans.Bounds(2, 9)},
            ),
            decision=plans.PlanDecision(
                demand=plans.Demand(1.5, 4000.0, 500.0, 0.25),
                observed=plans.Observation(
                    seconds=10.0,
                    arrived=15,
                    ended=14,
                    isl=4000.0,
                    osl=500.0,
                    hit_rate=0.25,
                    ttft=plans.Times(100.0, 90.0, 250.0),
                    itl=plans.Times(10.0, 9.0, 12.0),
                    queued=3,
                    pools={"decode": plans.Pool(2, 1, 4)},
                ),
                correction=plans.Correction(1.25, 0.75),
                predicted=plans.Latency(80.0, 9.5, 0.5),
                changes={"decode": plans.Change(3, 5, 6, 5, 0.75, ("more_load",))},
            ),
            failure="no GPU is free",
        ),
        plans.decode,
    ),
    "planned_of_a_model_that_sleeps": (
        plans.Planned(
            planner="plan-1",
            model="tiny",
            at_ns=1_700_000_000_000_000_001,
            connector="local",
            rules=plans.Rules(ttft_ms=300.0, itl_ms=25.0, bounds={"aggregated": plans.Bounds(0, 9)}),
            decision=plans.PlanDecision(
                demand=plans.Demand(0.0, 0.0, 0.0),
                observed=plans.Observation(
                    seconds=10.0, arrived=0, pools={"aggregated": plans.Pool(2, running=1, asleep=1)}
                ),
                correction=plans.Correction(1.25, 0.75),
                predicted=plans.Latency(0.0, 0.0, 0.0),
                changes={"aggregated": plans.Change(2, 0, 0, 2, 0.0, ("idle",))},
                sleep=True,
            ),
            zero_after_s=300.0,
        ),
        plans.decode,
    ),
    "planned_of_a_missed_limit": (
        plans.Planned(
            planner="plan-1",
            model="tiny",
            at_ns=1_700_000_000_000_000_001,
            connector="local",
            rules=plans.Rules(ttft_ms=300.0, itl_ms=25.0),
            decision=plans.PlanDecision(
                demand=plans.Demand(1.5, 4000.0, 500.0, 0.25),
                observed=plans.Observation(
                    seconds=10.0,
                    arrived=15,
                    ended=14,
                    isl=4000.0,
                    osl=500.0,
                    ttft=plans.Times(100.0, 90.0, 250.0),
                    itl=plans.Times(20.0, 19.0, 31.5),
                    pools={"decode": plans.Pool(2, starved=2)},
                    one_machine=True,
                ),
                correction=plans.Correction(1.25, 0.75),
                predicted=plans.Latency(80.0, 9.5, 0.5),
                changes={"decode": plans.Change(2, 2, 2, 2, 0.75, ("cpu_starved",), 3)},
            ),
        ),
        plans.decode,
    ),
    "cancel": (control.Cancel(REQUEST.id, "gone"), control.decode_cancel),
    "dump_kv": (control.DumpKv(page=3), control.decode_worker),
    "drain": (control.Drain(stay_down=True), control.decode_worker),
    "drain_to_restart": (control.Drain(), control.decode_worker),
    "sleep": (control.Sleep(30.0), control.decode_worker),
    "wake": (control.Wake(), control.decode_worker),
    "record_trace": (control.RecordTrace(1.5), control.decode_worker),
    "recorded_trace": (control.RecordedTrace("gpu-1", "trace.json.gz", "no room"), control.decode_recorded_trace),
    "release": (control.Release("t-1", "w-2"), control.decode_worker),
    "push": (
        control.Push("t-1", "w-2", ENDPOINT, pack_tokens([0]), pack_tokens([9]), 1.5),
        control.decode_worker,
    ),
    "push_over_ranks": (
        control.Push("t-1", "w-2", SPLIT_ENDPOINT, pack_tokens([0]), pack_tokens([9]), 1.5),
        control.decode_worker,
    ),
    "reserve": (control.Reserve("r-1:1:decode", "w-1", bytes(range(32)), 2, 2), control.decode_worker),
    "reserve_of_tokens": (
        control.Reserve("r-1:1:decode", "w-1", bytes(range(32)), 2, 2, 70),
        control.decode_worker,
    ),
    "reserve_until": (
        control.Reserve("r-1:1:decode", "w-1", bytes(range(32)), 2, 2, 70, 0.25),
        control.decode_worker,
    ),
    "fetch": (control.Fetch(TICKET), control.decode_worker),
    "fetch_of_layers": (control.Fetch(TICKET, 28), control.decode_worker),
    "push_of_windows": (
        control.Push("t-1", "w-2", ENDPOINT, b"", b"", 1.5, pack_tokens([0]), pack_tokens([9])),
        control.decode_worker,
    ),
    "pin_prefix": (control.PinPrefix("r-1:1:prefix", "w-2", bytes(range(32)), 0.5), control.decode_worker),
    "prefix_pinned": (control.PrefixPinned(TICKET, "not cached"), control.decode_pinned),
    "pushed": (control.Pushed("timeout", "late", 8, 0.5, False), control.decode_pushed),
    "progress": (control.Progress(2, 7), control.decode_progress),
    "progress_at_the_third_worker": (control.Progress(2, 7, "w-3", EARLIER_WORKERS), control.decode_progress),
    "ok": (control.Ok("no such ticket"), control.decode_ok),
}
