"""Settings: one frozen Struct per process, built from flags and ``PENSTOCK_*`` variables, checked once at start.

A field ``http_port`` is the flag ``--http-port`` and the variable ``PENSTOCK_HTTP_PORT``; flags win.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from schemas.parser_names import ReasoningParser, ToolCallParser

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


def about(text: str) -> Meta:
    """The help text of a flag."""
    return Meta(description=text)


Durability = Literal["process", "power"]


class Common(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every process is told."""

    nats_url: Annotated[str, about("broker to connect to, with credentials")] = "nats://127.0.0.1:4222"
    namespace: Annotated[str, about("prefix of all subjects and streams")] = "ps"
    log_format: Annotated[Literal["auto", "text", "json"], about("auto: text on a terminal, else json")] = "auto"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about("least severe level logged")] = "info"
    name: Annotated[str, about("this process's name in logs and tables; the same across restarts")] = ""


class GatewaySettings(Common, frozen=True, kw_only=True):
    model: Annotated[str, about("model directory or Hugging Face id: tokenizer and chat template")] = ""
    served_model_name: Annotated[str, about("names clients may use, comma-separated; first is canonical")] = ""
    chat_template: Annotated[str, about("Jinja file that replaces the model's own chat template")] = ""
    http_host: Annotated[str, about("address to listen on")] = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    max_body_bytes: Annotated[Positive, about("largest request body")] = 16 << 20
    max_header_bytes: Annotated[Positive, about("largest header of an HTTP request; a line has at most 8192")] = 32_768
    header_timeout_s: Annotated[Seconds, about("for the header of an HTTP request to arrive")] = 30.0
    body_timeout_s: Annotated[Seconds, about("for its body to arrive, and 1 s more per 16 KiB")] = 30.0
    keep_alive_s: Annotated[Seconds, about("how long an idle HTTP connection is kept")] = 75.0
    write_timeout_s: Annotated[Seconds, about("how long a client may read nothing before it is cut off")] = 60.0
    max_connections: Annotated[Positive, about("HTTP connections at once; further ones are refused with 503")] = 16_384
    max_connections_per_address: Annotated[
        int, Meta(ge=0, description="the same per client address; 0: no limit, as clients may share a proxy's")
    ] = 0
    special_tokens_in_messages: Annotated[
        Literal["text", "control"],
        about(
            "what the text of a special token in a message is; control: it takes effect, as apply_chat_template has it"
        ),
    ] = "text"
    default_max_tokens: Annotated[Positive, about("output tokens when the client names none")] = 512
    default_deadline_s: Annotated[Seconds, about("life of a request that names no deadline")] = 600.0
    max_queue: Annotated[
        Positive, about("unrouted requests of a class (interactive, standard, batch) beyond which its clients get 429")
    ] = 4096
    block_size: Annotated[Positive, about("tokens per KV block when no worker is registered yet")] = 32
    max_media_bytes: Annotated[Positive, about("largest image or embedding file, as sent or fetched")] = 20 << 20
    max_image_pixels: Annotated[Positive, about("largest image, width x height")] = 40_000_000
    max_images: Annotated[Positive, about("images per request")] = 16
    media_timeout_s: Annotated[Seconds, about("for fetching one image")] = 10.0
    allowed_local_media_path: Annotated[str, about("folder below which files may be named; empty: none may")] = ""
    allow_private_media_addresses: Annotated[
        bool, about("fetch images from any address and port, also of this machine and its network")
    ] = False
    public_url: Annotated[
        str, about("where clients reach this gateway, for links to pictures; empty: the host they named")
    ] = ""
    drain_s: Annotated[Seconds, about("on SIGTERM, how long open answers may go on")] = 30.0
    tracing: Annotated[
        Literal["asked", "all", "off"],
        about("which requests are traced in detail; asked: those with a traceparent header that says so"),
    ] = "asked"


class RouterSettings(Common, frozen=True, kw_only=True):
    mode: Annotated[
        Literal["kv", "round_robin", "random", "least_loaded", "direct"], about("how a worker is picked")
    ] = "kv"
    overlap_weight: Annotated[float, Meta(ge=0, description="credit of one cached block against one queued")] = 1.0
    prefill_weight: Annotated[float, Meta(ge=0, description="cost of one block still to be computed")] = 1.0
    temperature: Annotated[float, Meta(ge=0, description="0: best score wins; above: softmax over scores")] = 0.0
    transfer_weight: Annotated[float, Meta(ge=0, description="cost of moving blocks between workers; 0: none")] = 1.0
    local_prefill_tokens: Annotated[
        int, Meta(ge=0, description="prompt tokens that a decode worker computes itself, at most")
    ] = 256
    max_pending: Annotated[Positive, about("requests held ready while the fleet is full or empty")] = 512
    max_attempts: Annotated[Positive, about("tries of one request before it fails with worker_lost")] = 4
    revision_wait_s: Annotated[
        Seconds, about("how long a begun answer waits for a worker of its model revision, when the last one is gone")
    ] = 30.0
    kv_events: Annotated[bool, about("fold the workers' KV events; off: guess from past decisions")] = True
    max_index_blocks: Annotated[Positive, about("hard cap of the radix index")] = 8_000_000
    sys_nats_url: Annotated[str, about("system account, for disconnect events; empty: leases only")] = ""
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="Prometheus port; 0: none")] = 0
    metrics_host: Annotated[str, about("address of the Prometheus port")] = "127.0.0.1"
    seed: Annotated[int, about("of tie breaking; 0: from the clock")] = 0


class WorkerSettings(Common, frozen=True, kw_only=True):
    role: Annotated[
        Literal["aggregated", "prefill", "decode", "encode", "diffusion"],
        about("which stage of the pipeline; diffusion: images and videos from text"),
    ] = "aggregated"
    engine: Annotated[Literal["native", "mock", "trtllm", "vllm"], about("what computes")] = "native"
    model: Annotated[str, about("model directory or Hugging Face id")] = ""
    served_model_name: Annotated[str, about("name in the pipeline; default: the directory's name")] = ""
    block_size: Annotated[Positive, about("tokens per KV block")] = 32
    kv_blocks: Annotated[int, Meta(ge=0, description="blocks in the pool; 0: from free memory")] = 0
    embed_slots: Annotated[
        int, Meta(ge=0, description="images whose embeddings are kept; 0: 256, or memory's tenth")
    ] = 0
    max_running: Annotated[Positive, about("sequences per step")] = 256
    max_batched_tokens: Annotated[Positive, about("tokens computed per step")] = 8192
    scheduler_policy: Annotated[
        Literal["max_utilization", "guaranteed_no_evict"],
        about("native, mock: start a sequence when its prompt fits the KV pool, or when its longest answer does, too"),
    ] = "max_utilization"
    max_model_len: Annotated[int, Meta(ge=0, description="prompt + output; 0: the model's own limit")] = 0
    prefix_cache: Annotated[bool, about("reuse KV blocks across requests")] = True
    publish_events_and_metrics: Annotated[bool, about("publish KV events and serve metrics")] = True
    device: Annotated[Literal["auto", "cpu", "cuda"], about("where the engine computes; vllm: as its build")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], about("of weights and KV")] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8"],
        about("native engine: KV is kept in this; auto: as --dtype; fp8 needs half of bfloat16's memory"),
    ] = "auto"
    kv_memory_fraction: Annotated[
        float, Meta(ge=0, le=1, description="native engine: free memory for KV; 0: 0.85 on CUDA, 0.25 on a CPU")
    ] = 0.0
    threads: Annotated[int, Meta(ge=0, description="CPU threads of the engine; 0: it decides")] = 0
    mock_speedup: Annotated[float, Meta(ge=0, description="mock engine: times faster than life; 0: no waiting")] = 1.0
    mock_ranks: Annotated[Positive, about("mock engine: attention data-parallel ranks, each with its own cache")] = 1
    trtllm_backend: Annotated[
        Literal["pytorch", "autodeploy"], about("trtllm engine: which of its back ends runs the model")
    ] = "pytorch"
    tensor_parallel_size: Annotated[
        int, Meta(ge=0, description="trtllm, vllm: GPUs that share each layer; 0: as its other arguments say")
    ] = 0
    extra_engine_args: Annotated[str, about("trtllm, vllm: YAML file of its arguments, laid over ours")] = ""
    override_engine_args: Annotated[str, about("trtllm, vllm: JSON of its arguments, laid over all others")] = ""
    connector: Annotated[
        tuple[Literal["nixl", "lmcache", "kvbm", "null"], ...],
        about("vllm: where its KV goes, several comma-separated; empty: nixl for prefill and decode, else null"),
    ] = ()
    use_kv_events: Annotated[bool, about("vllm: let it tell of its KV blocks, which KV routing needs")] = True
    request_plane: Annotated[Literal["nats"], about("how requests reach the worker; there is one way")] = "nats"
    event_plane: Annotated[
        Literal["nats", "zmq"],
        about("how KV events get from the engine to the broker; zmq: through a publisher that others may read too"),
    ] = "nats"
    kv_events_host: Annotated[str, about("event plane zmq: address to publish on")] = "127.0.0.1"
    kv_events_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="event plane zmq: port of rank 0's events; the other ranks' follow, then those for replay; "
            "0: any free ones",
        ),
    ] = 5557
    kv_events_topic: Annotated[str, about("event plane zmq: topic of the messages")] = ""
    kv_events_from: Annotated[
        tuple[str, ...],
        about(
            "event plane zmq: further publishers of this worker's KV blocks, comma-separated; "
            "tcp://host:port or tcp://host:port/replay_port"
        ),
    ] = ()
    logits_processor: Annotated[
        tuple[str, ...], about("name=module:Class of logits processors that requests may choose, comma-separated")
    ] = ()
    default_logits_processors: Annotated[
        str, about('logits processors of every request, JSON as in a request: [{"name": ..., "args": {...}}]')
    ] = ""
    reasoning_parser: Annotated[
        ReasoningParser, about("how the model writes thoughts; auto: as the chat template tells, if it does")
    ] = "auto"
    tool_call_parser: Annotated[
        ToolCallParser, about("how the model writes tool calls; auto: as the chat template tells, if it does")
    ] = "auto"
    transfer: Annotated[
        Literal["auto", "nixl", "none"],
        about("how blocks move to other workers; auto: nixl for all roles that need it"),
    ] = "auto"
    handoff_lease_s: Annotated[Seconds, about("how long blocks are kept for the next stage")] = 30.0
    transfer_timeout_s: Annotated[Seconds, about("longest transfer of one request's blocks")] = 5.0
    quarantine_s: Annotated[
        Seconds, about("after a transfer that timed out, how long its blocks wait before the agent is made anew")
    ] = 10.0
    max_pixels: Annotated[Positive, about("diffusion: largest picture, width x height")] = 2 << 20
    max_frames: Annotated[Positive, about("diffusion: longest video")] = 257
    max_steps: Annotated[Positive, about("diffusion: denoising steps of a request, at most")] = 100
    max_pictures: Annotated[Positive, about("diffusion: images or videos of a request, at most")] = 4
    frame_rate: Annotated[float, Meta(ge=0, description="diffusion: frames per second; 0: the pipeline's own")] = 0.0
    drain_s: Annotated[Seconds, about("on SIGTERM, how long running requests may go on")] = 30.0
    durability: Annotated[Durability, about("the broker's; power: output waits until it is on the disk")] = "process"
    otlp_endpoint: Annotated[
        str, about("trtllm, vllm: where the engine sends spans of its own, below penstock's, which need nothing here")
    ] = ""
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="Prometheus port; 0: none")] = 0
    metrics_host: Annotated[str, about("address of the Prometheus port")] = "127.0.0.1"


class TraceSettings(Common, frozen=True, kw_only=True):
    """``penstock trace``: one request's on the terminal, or everybody's to a collector."""

    nats_url: Annotated[str, about("broker, as operator; default: from state.json in the data directory")] = ""
    data_dir: Annotated[str, about("where state.json is")] = ".penstock"
    request: Annotated[str, about("print the trace of this request")] = ""
    json: Annotated[bool, about("print it as OTLP JSON")] = False
    otlp_endpoint: Annotated[
        str, about("send traces there by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces")
    ] = ""
    since: Annotated[str, about("begin so long ago: 90s, 30m, 2h; default: where it was, else now")] = ""
    once: Annotated[bool, about("end when everything up to now was sent")] = False
    sample: Annotated[float, Meta(ge=0, le=1, description="share of requests without a traceparent that is sent")] = 1.0
    export_timeout_s: Annotated[Seconds, about("how long a batch is tried while the collector is away")] = 300.0


RECORD = about("keep tokens, jobs and KV events for 7 days, as records are, for replay; it is never taken back")
_DURABILITY = about(
    "what an acknowledged message survives; process: the end of any process, power: also of the machine, at a price"
)


class NatsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded broker."""

    data_dir: Annotated[str, about("store, secrets and generated configuration")] = ".penstock"
    namespace: Annotated[str, about("prefix of all subjects and streams")] = "ps"
    nats_port: Annotated[int, Meta(ge=0, le=65535, description="port on loopback; 0: any free one")] = 4222
    monitor_port: Annotated[int, Meta(ge=0, le=65535, description="HTTP monitoring port; 0: none")] = 0
    durability: Annotated[Durability, _DURABILITY] = "process"
    record: Annotated[bool, RECORD] = False


class UpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock up``."""

    model: Annotated[
        str, about("model directory or Hugging Face id; default: the bundled demo model (mock engine: tiny)")
    ] = ""
    served_model_name: Annotated[str, about("name clients use; default: the directory's name")] = ""
    engine: Annotated[
        Literal["auto", "native", "mock", "trtllm", "vllm"], about("what computes; auto: the recipe's, else native")
    ] = "auto"
    recipe: Annotated[
        str, about("model, roles and engine arguments of a recipe or its set, as in `penstock recipe list`")
    ] = ""
    workers: Annotated[
        int,
        Meta(ge=-1, description="workers that do everything; -1: 1, or 0 beside others that can do without"),
    ] = -1
    prefill: Annotated[int, Meta(ge=0, description="workers that compute prompts and hand their KV to others")] = 0
    decode: Annotated[int, Meta(ge=0, description="workers that go on from there, and take short prompts whole")] = 0
    encode: Annotated[int, Meta(ge=0, description="workers that turn images into embeddings")] = 0
    diffusion: Annotated[int, Meta(ge=0, description="workers that make images or videos, beside the others")] = 0
    diffusion_model: Annotated[str, about("diffusers directory or Hugging Face id that those run")] = ""
    diffusion_served_name: Annotated[str, about("name clients use for it; default: the directory's name")] = ""
    diffusion_engine: Annotated[Literal["native", "trtllm"], about("what makes the pictures; native: diffusers")] = (
        "native"
    )
    gpus: Annotated[
        tuple[str, ...],
        about("GPUs for the workers, in this order; default: CUDA_VISIBLE_DEVICES, else all; none: assign none"),
    ] = ()
    tensor_parallel_size: Annotated[
        int, Meta(ge=0, description="trtllm, vllm: GPUs that share each layer; 0: as its other arguments say")
    ] = 0
    max_model_len: Annotated[int, Meta(ge=0, description="prompt + output; 0: the recipe's or model's limit")] = 0
    extra_engine_args: Annotated[str, about("trtllm, vllm: YAML file of its arguments, for every role")] = ""
    prefill_engine_args: Annotated[str, about("trtllm, vllm: the same for prefill workers, instead")] = ""
    decode_engine_args: Annotated[str, about("trtllm, vllm: the same for decode workers, instead")] = ""
    encode_engine_args: Annotated[str, about("trtllm: the same for encode workers, instead")] = ""
    override_engine_args: Annotated[str, about("trtllm, vllm: JSON of its arguments, laid over all others")] = ""
    logits_processor: Annotated[
        tuple[str, ...], about("name=module:Class of logits processors that requests may choose, comma-separated")
    ] = ()
    default_logits_processors: Annotated[str, about("logits processors of every request, JSON as in a request")] = ""
    gateways: Annotated[Positive, about("gateway processes, on consecutive ports")] = 1
    routers: Annotated[Positive, about("router processes")] = 1
    router_mode: Annotated[
        Literal["kv", "round_robin", "random", "least_loaded", "direct"], about("how a worker is picked")
    ] = "kv"
    http_host: Annotated[str, about("address the gateways listen on")] = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port of the first gateway; 0: any free one")] = 8000
    metrics_port: Annotated[
        int, Meta(ge=-1, le=65535, description="first Prometheus port of workers and routers; 0: any free; -1: none")
    ] = 0
    data_dir: Annotated[str, about("store, secrets, logs and state.json")] = ".penstock"
    nats_url: Annotated[str, about("use this server or cluster instead of starting one")] = ""
    nats_port: Annotated[int, Meta(ge=0, le=65535, description="port of the embedded broker; 0: any free one")] = 0
    durability: Annotated[Durability, _DURABILITY] = "process"
    record: Annotated[bool, RECORD] = False
    namespace: Annotated[str, about("prefix of all subjects and streams")] = "ps"
    chat_template: Annotated[str, about("Jinja file that replaces the model's own chat template")] = ""
    reasoning_parser: Annotated[ReasoningParser, about("how the model writes thoughts; auto: by the template")] = "auto"
    tool_call_parser: Annotated[ToolCallParser, about("how it writes tool calls; auto: by the template")] = "auto"
    block_size: Annotated[Positive, about("tokens per KV block")] = 32
    kv_blocks: Annotated[int, Meta(ge=0, description="blocks per worker; 0: from free memory")] = 0
    max_running: Annotated[Positive, about("sequences per worker and step")] = 256
    max_queue: Annotated[
        Positive, about("unrouted requests of a class (interactive, standard, batch) beyond which its clients get 429")
    ] = 4096
    max_media_bytes: Annotated[Positive, about("largest image or embedding file, as sent or fetched")] = 20 << 20
    max_image_pixels: Annotated[Positive, about("largest image, width x height")] = 40_000_000
    max_images: Annotated[Positive, about("images per request")] = 16
    media_timeout_s: Annotated[Seconds, about("for fetching one image")] = 10.0
    allowed_local_media_path: Annotated[str, about("folder below which files may be named; empty: none may")] = ""
    allow_private_media_addresses: Annotated[
        bool, about("fetch images from any address and port, also of this machine and its network")
    ] = False
    mock_speedup: Annotated[float, Meta(ge=0, description="mock engine: times faster than life; 0: no waiting")] = 1.0
    threads: Annotated[int, Meta(ge=0, description="CPU threads per native worker; 0: cores / workers")] = 0
    handoff_lease_s: Annotated[Seconds, about("how long blocks are kept for the next stage")] = 30.0
    local_prefill_tokens: Annotated[
        int, Meta(ge=0, description="prompts with no more left to compute stay on their decode worker")
    ] = 256
    log_format: Annotated[Literal["auto", "text", "json"], about("auto: text on a terminal, else json")] = "auto"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about("least severe level logged")] = "info"
    ready_s: Annotated[
        float, Meta(ge=0, description="how long to wait for readiness; 0: 120, or 3600 with trtllm, vllm or diffusion")
    ] = 0.0
    drain_s: Annotated[Seconds, about("on Ctrl-C, how long open answers may go on")] = 30.0
    otlp_endpoint: Annotated[
        str, about("trace every request and send the spans there, such as http://127.0.0.1:4318/v1/traces")
    ] = ""
