"""Settings: one frozen Struct per process, built from flags and ``PENSTOCK_*`` variables, checked once at start.

A field ``http_port`` is the flag ``--http-port`` and the variable ``PENSTOCK_HTTP_PORT``; flags win. Units are in the
names: ``_s`` seconds, ``_bytes`` bytes, ``_tokens`` and ``_len`` tokens, ``_blocks`` KV blocks.
"""

import re
import socket
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

from msgspec import Meta, Struct, structs

from penstock.schemas.subjects import Namespace

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]

Durability = Literal["process", "power"]
RouterMode = Literal["kv", "round_robin", "random", "least_loaded", "direct"]

CONFIG_FILE = "penstock.yaml"  # read by ``penstock up`` if it is in the working directory


def about(text: str) -> Meta:
    """The help text of a flag."""
    return Meta(description=text)


class SameAs(NamedTuple):
    """In an annotation: type, limits and help text are those of the field of this name in another Struct."""

    kind: type[Struct]


class Common(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every process."""

    nats_url: Annotated[str, about("broker URLs with credentials, comma-separated")] = "nats://127.0.0.1:4222"
    namespace: Annotated[Namespace, about("prefix of all NATS subjects and streams")] = "ps"
    log_format: Annotated[Literal["auto", "text", "json"], about("auto: text on a terminal, else JSON lines")] = "auto"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about("least severe level logged")] = "info"
    name: Annotated[
        str,
        about(
            "name of this process in logs and tables; keep it the same across restarts; default of a gateway, router "
            "or worker: its role, host and port"
        ),
    ] = ""


CommonT = TypeVar("CommonT", bound=Common)


def named(settings: CommonT, role: str, port: int) -> CommonT:
    """With a name, if it has none, so that processes of several hosts differ.

    Args:
        port: distinguishes those of one host; 0: it listens on none.
    """
    if settings.name:
        return settings
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname().partition(".")[0])
    return structs.replace(settings, name="-".join(filter(None, (role, host, str(port or "")))))


def traces_url(endpoint: str) -> str:
    """Where OTLP/HTTP takes traces: a collector's URL without a path, as most pages print it, gets the standard one.

    https://opentelemetry.io/docs/specs/otlp/#otlphttp-request
    """
    found = re.fullmatch(r"(https?://[^/?#]+)/?(\?.*)?", endpoint, re.IGNORECASE)
    return f"{found[1]}/v1/traces{found[2] or ''}" if found else endpoint


def served_names(text: str) -> tuple[str, ...]:
    """The names in ``--served-model-name``."""
    return tuple(text.replace(",", " ").split())


def fallbacks_of(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The models that may run the requests of each, in order, by ``--fallback``: "big=small", "hosted" are two for big.

    Raises:
        ValueError: it names no models, or a model in place of itself.
    """
    found: dict[str, tuple[str, ...]] = {}
    model = ""
    for each in given:
        before, equals, other = each.rpartition("=")
        model, other = before.strip() if equals else model, other.strip()
        if not (model and other):
            raise ValueError(f"--fallback {each}: write MODEL=OTHER,OTHER with the models that may run its requests")
        if other == model:
            raise ValueError(f"--fallback {model}={other}: a model cannot take its own place; name other ones")
        if other in found.get(model, ()):
            raise ValueError(f"--fallback {model}: {other} is named twice, and no request comes back; name it once")
        found[model] = (*found.get(model, ()), other)
    return found


class GatewaySettings(Common, frozen=True, kw_only=True):
    model: Annotated[
        tuple[str, ...],
        about(
            "model directories or Hugging Face ids, comma-separated, for their tokenizers and chat templates, each as "
            "FOLDER or NAME=FOLDER (or 'NAME ALIAS'=FOLDER); default: those of all models that workers register"
        ),
    ] = ()
    learn_models: Annotated[
        bool, about("serve other models that workers register, too, besides those of --model; always without --model")
    ] = False
    max_models: Annotated[
        Positive,
        about(
            "models whose tokenizer and chat template are in memory at a time (0.2 GB each with 150,000 tokens); "
            "unused ones make room"
        ),
    ] = 16
    unload_models_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds without a request after which a model that was not named with --model leaves memory, "
            "until its next request; 0: never",
        ),
    ] = 3600.0
    served_model_name: Annotated[
        str,
        about(
            "model names that clients may use, the canonical one first, with commas or spaces between; for one "
            "--model; default: the name of its folder"
        ),
    ] = ""
    chat_template: Annotated[str, about("Jinja file to use instead of the model's own; for one --model")] = ""
    parser_families: Annotated[
        str,
        about("TOML or JSON file with formats of reasoning and tool calls beside the known ones; workers need it too"),
    ] = ""
    template_cpu_s: Annotated[
        Seconds, about("seconds of CPU time that the chat template may take for one request, which is then refused")
    ] = 5.0
    max_messages: Annotated[int, Meta(ge=1, le=16_384, description="messages of one chat, checked before others")] = (
        4_096
    )
    http_host: Annotated[str, about("address to listen on; ::: all addresses; 0.0.0.0: all of IPv4")] = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free port")] = 8000
    listen_fd: Annotated[
        int, Meta(ge=-1, description="inherited listening socket to accept from, too (file descriptor); -1: none")
    ] = -1
    counts_fd: Annotated[
        int,
        Meta(
            ge=-1,
            description="file descriptor of inherited memory with the connections of each gateway on --listen-fd; -1: "
            "none, and any idle gateway accepts",
        ),
    ] = -1
    cells: Annotated[
        Positive,
        about(
            "cells of the deployment, each with streams, routers and workers of its own: the first has the namespace "
            "NAME of this deployment, the others NAME-1, NAME-2, ..."
        ),
    ] = 1
    cell_nats_urls: Annotated[
        tuple[str, ...],
        about(
            "broker URLs of the cells after the first, in order, for cells with their own brokers; several "
            "servers of one cell with ';' between; default: --nats-url"
        ),
    ] = ()
    active_cells: Annotated[
        int,
        Meta(
            ge=0,
            description="number of the first --cells that take new requests; requests in the others are still found, "
            "so that a deployment can shrink; 0: all",
        ),
    ] = 0
    nearest_cell: Annotated[
        int, Meta(ge=-1, description="cell that requests stay in unless another one is clearly cheaper; -1: none")
    ] = -1
    max_body_bytes: Annotated[Positive, about("largest request body, in bytes")] = 16 << 20
    max_header_bytes: Annotated[
        Positive, about("largest header of an HTTP request, in bytes; a single line has at most 8192")
    ] = 32_768
    header_timeout_s: Annotated[Seconds, about("seconds until the header of an HTTP request must have arrived")] = 30.0
    body_timeout_s: Annotated[
        Seconds, about("seconds until the body must have arrived, plus one second per 16 KiB")
    ] = 30.0
    keep_alive_s: Annotated[Seconds, about("seconds that an idle HTTP connection is kept open")] = 75.0
    stream_ping_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="seconds without an event after which a stream gets a comment (in the Messages API a ping), so "
            "that proxies keep it; 0: none",
        ),
    ] = 10.0
    write_timeout_s: Annotated[
        Seconds, about("seconds that a client may read nothing before its connection is closed")
    ] = 60.0
    max_connections: Annotated[Positive, about("open HTTP connections; further ones get 503")] = 16_384
    max_connections_per_address: Annotated[
        int, Meta(ge=0, description="open HTTP connections per client address; 0: no limit (clients may share a proxy)")
    ] = 0
    access_log: Annotated[
        bool, about("log a line per HTTP request (http_request): method, path, status, duration, request id")
    ] = False
    runtime_lora_updating: Annotated[
        bool,
        about(
            "answer POST /v1/load_lora_adapter and /v1/unload_lora_adapter without API keys: every client of the port "
            "can then change which adapters are served"
        ),
    ] = False
    list_requests: Annotated[
        bool,
        about(
            "answer GET /v1/requests without API keys: every client of the port can then list all requests and read "
            "all answers"
        ),
    ] = False
    api_key: Annotated[
        tuple[str, ...],
        about(
            "keys of your own choice, comma-separated, each with the rights of an operator's key; prefer "
            "PENSTOCK_API_KEY, since other users of the machine can read a command line"
        ),
    ] = ()
    require_keys: Annotated[
        bool, about("refuse requests without an API key even before the first key is made; once there is one, always")
    ] = False
    tls_cert: Annotated[
        str, about("PEM file with the certificate and its chain, to serve HTTPS; read again when it changes")
    ] = ""
    tls_key: Annotated[str, about("PEM file with the certificate's private key, without a password")] = ""
    cors_origins: Annotated[
        tuple[str, ...],
        about("origins whose pages may use the API in a browser, comma-separated: https://app.example.com, or *"),
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        about(
            "addresses or networks of proxies, comma-separated, whose X-Forwarded-For and X-Forwarded-Proto headers "
            "name the client; --max-connections-per-address does not limit them"
        ),
    ] = ()
    state_dir: Annotated[
        str,
        about(
            "folder that outlives the process and records that API keys exist, so that requests without a key are "
            "refused even if the broker has lost the keys; default: $STATE_DIRECTORY, which systemd sets, else none"
        ),
    ] = ""
    insecure: Annotated[
        bool,
        about("listen on other addresses than loopback, or behind --trusted-proxies, without API keys: open to anyone"),
    ] = False
    special_tokens_in_messages: Annotated[
        Literal["text", "control"],
        about(
            "special tokens that are written out in a message: plain text, or control tokens (as apply_chat_template)"
        ),
    ] = "text"
    reasoning_fields: Annotated[
        Literal["auto", "both", "reasoning_content", "reasoning"],
        about(
            "names under which chat answers have reasoning; auto: both in whole answers, reasoning_content in streams"
        ),
    ] = "auto"
    always_no_store: Annotated[
        bool, about("keep prompt and answer of every request in memory only, and delete them soon after its end")
    ] = False
    no_store_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="seconds after the end of a request with no_store until its prompt and answer leave memory; "
            "its client can read them until then",
        ),
    ] = 30.0
    strict_options: Annotated[
        bool, about("refuse requests with options that this version does not know; otherwise a header names them")
    ] = False
    default_max_tokens: Annotated[
        int, Meta(ge=0, description="output tokens of a request without max_tokens; 0: the rest of the model's context")
    ] = 0
    clamp_max_tokens: Annotated[
        bool, about("lower a max_tokens beyond the room in the context instead of refusing the request")
    ] = False
    max_tenant_file_bytes: Annotated[
        Positive, about("bytes that the files of a tenant may take: what it uploads, and the results of its batches")
    ] = 1 << 30
    canary: Annotated[
        str,
        Meta(
            pattern=r"^(|100%|[0-9]{1,2}(\.[0-9]+)?%)$",
            title="a percentage such as 5%",
            description="share of each model's requests, such as 5%, that go to workers of the newest revision while "
            "another one serves; default: none",
        ),
    ] = ""
    fallback: Annotated[
        tuple[str, ...],
        about(
            "models that may run another model's requests, in this order: big=small,hosted; repeat the flag for other "
            "models. They do so when its workers fail before the first token, when it has no worker, and after "
            "--fallback-after-s"
        ),
    ] = ()
    fallback_after_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds that a request waits for a worker until a model of --fallback runs it; 0: it waits "
            "until its deadline",
        ),
    ] = 30.0
    default_deadline_s: Annotated[Seconds, about("seconds until a request that sets no deadline fails")] = 600.0
    max_queue: Annotated[
        Positive, about("unrouted requests per priority (interactive, standard, batch); beyond it, clients get 429")
    ] = 4096
    queue_full_status: Annotated[
        int,
        Meta(
            ge=400,
            le=599,
            description="HTTP status with which --max-queue refuses; 503: a load balancer can tell it from the limits "
            "of API keys (429), and ask another cell",
        ),
    ] = 429
    cell: Annotated[
        int,
        Meta(
            ge=-1,
            le=4095,
            description="number of this cell behind a load balancer; ids of requests end in it, as three hexadecimal "
            "digits; -1: a single cell, whose ids end in 000",
        ),
    ] = -1
    block_size: Annotated[Positive, about("tokens per KV block, until a worker has registered with its own")] = 32
    max_media_bytes: Annotated[Positive, about("largest image, video or embedding file, in bytes")] = 20 << 20
    max_image_pixels: Annotated[Positive, about("largest image, in pixels (width x height)")] = 40_000_000
    max_images: Annotated[Positive, about("images per request")] = 16
    max_videos: Annotated[Positive, about("videos per request")] = 2
    max_video_frames: Annotated[
        Positive, about("frames of the longest video; a worker decodes all of them, some hundred a second")
    ] = 9_000
    media_timeout_s: Annotated[Seconds, about("seconds for fetching one image or video")] = 10.0
    allowed_local_media_path: Annotated[
        str, about("folder whose files requests may name as images or videos; default: no local files")
    ] = ""
    allow_private_media_addresses: Annotated[
        bool, about("fetch images and videos from private addresses and any port too, those of this machine included")
    ] = False
    public_url: Annotated[
        str, about("URL under which clients reach this gateway, for links to images; default: the request's Host")
    ] = ""
    drain_s: Annotated[Seconds, about("seconds that open requests may take to finish after SIGTERM")] = 30.0
    ready_without_workers: Annotated[
        bool, about("ready also while no worker serves: requests wait for one that an autoscaler starts")
    ] = False
    tracing: Annotated[
        Literal["asked", "all", "off"],
        about("requests to trace in detail; asked: those whose traceparent header has the sampled flag"),
    ] = "asked"


class RouterSettings(Common, frozen=True, kw_only=True):
    nkeys: Annotated[
        str,
        about(
            "folder with the public keys of the broker's users (USER.pub), so that the audit log leaves out what the "
            "pipeline itself does, and names the others; for users who log in by nkeys"
        ),
    ] = ""
    mode: Annotated[RouterMode, about("how a worker is chosen; kv: by cached blocks and load")] = "kv"
    overlap_weight: Annotated[
        float, Meta(ge=0, description="work that one cached token saves, in prompt tokens; 0: ignore caches")
    ] = 1.0
    prefill_weight: Annotated[float, Meta(ge=0, description="cost of one prompt token that must still be computed")] = (
        1.0
    )
    temperature: Annotated[
        float, Meta(ge=0, description="0: the best score wins; above 0: sample from a softmax over the scores")
    ] = 0.0
    transfer_weight: Annotated[
        float, Meta(ge=0, description="cost of moving KV between workers; 0: moving is free")
    ] = 1.0
    local_prefill_tokens: Annotated[
        int,
        Meta(
            ge=-1,
            description="uncached prompt tokens up to which a decode worker computes the prompt itself; "
            "-1: 0 if its KV is in a GPU's memory, otherwise 256",
        ),
    ] = -1
    prefill_queue_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="prompt tokens until a prompt is computed, its own included, beyond which at every prefill "
            "worker a decode worker computes it instead, where that costs less; 0: never",
        ),
    ] = 18_432
    max_held_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="memory per priority for requests that the router holds while no worker can take them, in "
            "bytes; prompts take up to half of it, others are read again from the log",
        ),
    ] = 64 << 20
    max_attempts: Annotated[Positive, about("attempts of one request before it fails with worker_lost")] = 4
    migrate_after_s: Annotated[
        float,
        Meta(
            ge=0,
            description="with several cells: seconds without a worker after which a request runs in another cell; 0: "
            "never",
        ),
    ] = 3.0
    stalled_after_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds without a step of its worker's engine until a request goes to another worker; "
            "0: never",
        ),
    ] = 120.0
    resteer_after_s: Annotated[
        float,
        Meta(
            ge=0,
            description="least seconds without a computed prompt after which requests waiting at a worker go to an "
            "idle one; 0: never",
        ),
    ] = 5.0
    revision_wait_s: Annotated[
        Seconds,
        about("seconds that a started answer waits for a worker of the same model revision after losing its own"),
    ] = 30.0
    kv_events: Annotated[
        bool, about("track caches by the workers' KV events; off: predict them from past routing decisions")
    ] = True
    predicted_ttl_s: Annotated[
        Seconds, about("seconds after its last use until a prompt sent to a worker without KV events counts as evicted")
    ] = 600.0
    max_index_blocks: Annotated[Positive, about("blocks in the radix index, at most")] = 8_000_000
    sys_nats_url: Annotated[
        str, about("broker URL of the system account, for disconnect events; default: rely on leases alone")
    ] = ""
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="port of Prometheus metrics; 0: none")] = 0
    metrics_host: Annotated[str, about("address of Prometheus metrics; ::: all addresses")] = "127.0.0.1"
    seed: Annotated[int, about("seed of random choices; 0: from the clock")] = 0


Quantization = Literal["none", "fp8"]


class WorkerSettings(Common, frozen=True, kw_only=True):
    role: Annotated[
        Literal["aggregated", "prefill", "decode", "encode", "diffusion", "embed"],
        about(
            "stage of the pipeline; aggregated: prompt and answer; diffusion: images and videos from text; embed: "
            "vectors of texts"
        ),
    ] = "aggregated"
    engine: Annotated[
        Literal["native", "mock", "trtllm", "vllm", "sglang", "openai"],
        about("inference engine; openai: a server at --url"),
    ] = "native"
    model: Annotated[
        str,
        about("model directory or Hugging Face id; default: demo, also of mocks, for which `penstock up` takes tiny"),
    ] = ""
    served_model_name: Annotated[str, about("model name that clients use; default: the directory's name")] = ""
    block_size: Annotated[Positive, about("tokens per KV block")] = 32
    kv_blocks: Annotated[int, Meta(ge=0, description="KV blocks of a worker; 0: as many as free memory allows")] = 0
    embed_slots: Annotated[
        int, Meta(ge=0, description="images whose embeddings are kept; 0: 256, or what a tenth of the memory holds")
    ] = 0
    max_running: Annotated[Positive, about("sequences per step of a worker")] = 256
    max_batched_tokens: Annotated[Positive, about("tokens computed per step")] = 8192
    scheduler_policy: Annotated[
        Literal["max_utilization", "guaranteed_no_evict"],
        about("native, mock: start a sequence once its prompt fits the KV pool, or once its longest answer fits too"),
    ] = "max_utilization"
    max_model_len: Annotated[
        int, Meta(ge=0, description="tokens of prompt and output together; 0: the recipe's or the model's limit")
    ] = 0
    prefix_cache: Annotated[bool, about("reuse KV blocks across requests")] = True
    publish_events_and_metrics: Annotated[bool, about("publish KV events and serve metrics")] = True
    device: Annotated[Literal["auto", "cpu", "cuda"], about("device of the engine; vllm: the one it was built for")] = (
        "auto"
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], about("data type of weights and KV")] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8"],
        about("native: data type of KV; auto: as --dtype; fp8 takes half the memory of bfloat16"),
    ] = "auto"
    hybrid_kv_cache: Annotated[bool, about("native: free KV blocks that have left sliding windows")] = True
    kv_offloading_size: Annotated[
        float, Meta(ge=0, description="native, mock: GiB of host memory for KV blocks that leave the pool; 0: none")
    ] = 0.0
    kv_disk: Annotated[
        str, about('native: folder for KV blocks that leave host memory, found again after a restart; "": none')
    ] = ""
    kv_disk_bytes: Annotated[Positive, about("native: bytes of files in --kv-disk, for each worker, at most")] = 1 << 36
    quantization: Annotated[
        Quantization, about("native: weights of linear layers; fp8 takes half the memory of bfloat16")
    ] = "none"
    speculative_model: Annotated[
        str,
        about('native: proposes tokens to be verified: a draft model or EAGLE-3 head (directory or id), or "ngram"'),
    ] = ""
    num_speculative_tokens: Annotated[Positive, about("native: tokens proposed per step, at most")] = 4
    batch_invariant: Annotated[
        bool, about("native: on CUDA, compute a request in the same way whatever the batch has; slower")
    ] = False
    prompt_lookup_min: Annotated[Positive, about("native, ngram: least tokens that must repeat")] = 2
    prompt_lookup_max: Annotated[Positive, about("native, ngram: tokens that are compared")] = 4
    kv_memory_fraction: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="native: share for KV of the memory that weights and logits leave; 0: 0.85 on CUDA, 0.25 "
            "on a CPU",
        ),
    ] = 0.0
    threads: Annotated[
        int, Meta(ge=0, description="CPU threads of the engine; 0: as many as cores are free at start")
    ] = 0
    mock_speedup: Annotated[
        float, Meta(ge=0, description="mock: how many times faster than a real engine; 0: without delays")
    ] = 1.0
    mock_answer_tokens: Annotated[
        str,
        Meta(
            pattern=r"^(|[1-9][0-9]{0,6}(-[1-9][0-9]{0,6})?)$",
            title="a number of tokens, or a range such as 20-400",
            description="mock: length of answers in tokens, N or N-M: drawn from the range by prompt and seed; "
            "max_tokens, min_tokens and ignore_eos take precedence; default: max_tokens",
        ),
    ] = ""
    play: Annotated[
        str, about("mock: file of `penstock export` whose answers are played, token by token, at the recorded times")
    ] = ""
    skip_bad: Annotated[bool, about("mock: of --play: leave damaged lines out")] = False
    mock_crash_token: Annotated[
        int,
        Meta(
            ge=-1,
            description="mock: token id that ends the process with SIGSEGV when a prompt with it is computed, to test "
            "poisonous requests; -1: none",
        ),
    ] = -1
    mock_ranks: Annotated[Positive, about("mock: attention data-parallel ranks, each with its own cache")] = 1
    url: Annotated[str, about("openai: a server with OpenAI's API, such as http://127.0.0.1:8000")] = ""
    url_api: Annotated[
        Literal["auto", "completions", "chat"],
        about("openai: endpoint of the server to use; auto: completions, or chats if it has no completions"),
    ] = "auto"
    url_model: Annotated[
        str,
        about("openai: the model's name on the server; default: its only model, or the one with the same name as here"),
    ] = ""
    url_key_file: Annotated[
        str, about("openai: file with the server's key; default: the variable PENSTOCK_URL_KEY, if it is set")
    ] = ""
    trtllm_backend: Annotated[Literal["pytorch", "autodeploy"], about("trtllm: backend that runs the model")] = (
        "pytorch"
    )
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="native, trtllm, vllm, sglang: GPUs that share each layer; 0: as in the arguments, else 1",
        ),
    ] = 0
    extra_engine_args: Annotated[
        str, about("trtllm, vllm, sglang: YAML file of engine arguments; they override Penstock's defaults")
    ] = ""
    override_engine_args: Annotated[
        str, about("trtllm, vllm, sglang: JSON object of engine arguments; they override all others")
    ] = ""
    nodes: Annotated[
        Positive,
        about("vllm, sglang: machines of one engine; start the same command on each, with its own --node-rank"),
    ] = 1
    node_rank: Annotated[
        int,
        Meta(
            ge=0,
            description="vllm, sglang: number of this node, below --nodes; node 0 connects to the broker and serves, "
            "the others only compute",
        ),
    ] = 0
    leader_address: Annotated[str, about("vllm, sglang: address of node 0 that the other nodes reach")] = ""
    leader_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65000,
            description="vllm, sglang: port on --leader-address where the nodes meet; the engine uses the ports after "
            "it",
        ),
    ] = 29500
    nodes_wait_s: Annotated[Seconds, about("vllm, sglang: seconds that nodes wait for each other at start")] = 1800.0
    connector: Annotated[
        tuple[Literal["nixl", "lmcache", "kvbm", "null"], ...],
        about("vllm: KV connectors, comma-separated; default: nixl for prefill and decode workers, else null"),
    ] = ()
    use_kv_events: Annotated[bool, about("vllm, sglang: enable their KV events, which KV routing needs")] = True
    request_plane: Annotated[Literal["nats"], about("transport of requests; NATS is the only one")] = "nats"
    event_plane: Annotated[
        Literal["nats", "zmq"],
        about("transport of KV events from engine to broker; zmq: through a publisher that others can subscribe to"),
    ] = "nats"
    kv_events_host: Annotated[str, about("event plane zmq: address to publish on")] = "127.0.0.1"
    kv_events_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="event plane zmq: port of rank 0; the other ranks' ports follow, then the replay ports; "
            "0: any free ports",
        ),
    ] = 5557
    kv_events_topic: Annotated[str, about("event plane zmq: topic of the messages")] = ""
    kv_events_from: Annotated[
        tuple[str, ...],
        about(
            "event plane zmq: other publishers of this worker's KV events, comma-separated; "
            "tcp://host:port or tcp://host:port/replay_port"
        ),
    ] = ()
    logits_processor: Annotated[
        tuple[str, ...], about("logits processors that requests may choose, comma-separated, each as name=module:Class")
    ] = ()
    default_logits_processors: Annotated[
        str, about('logits processors of every request, as JSON: [{"name": ..., "args": {...}}]')
    ] = ""
    reasoning_parser: Annotated[
        str,
        about(
            "format of the model's reasoning (docs/parsers.md); auto: detected from the chat template; none: it stays "
            "in the text"
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        str, about("format of the model's tool calls, likewise; auto: detected from the chat template; none: no calls")
    ] = "auto"
    parser_families: Annotated[
        str,
        about("TOML or JSON file with formats of reasoning and tool calls beside the known ones; gateways need it too"),
    ] = ""
    lora: Annotated[
        tuple[str, ...], about("LoRA adapters that clients name as models, comma-separated, each as NAME=FOLDER")
    ] = ()
    lora_folder: Annotated[
        str,
        about(
            "folder of LoRA adapters: its adapters are served under their folders' names, and operators may load "
            "others from it while workers run"
        ),
    ] = ""
    max_loras: Annotated[
        Positive, about("LoRA adapters on the device at once; others wait in host memory until needed")
    ] = 8
    max_lora_rank: Annotated[
        Positive, about("highest rank of a LoRA adapter; each slot on the device has room for it")
    ] = 32
    max_cpu_loras: Annotated[Positive, about("LoRA adapters in host memory, at most")] = 64
    weights_folder: Annotated[
        tuple[str, ...],
        about(
            "native, mock, vllm, sglang: folders within which operators may name other weights of the model while "
            "workers run, comma-separated (POST /v1/admin/update_weights)"
        ),
    ] = ()
    weights_staging: Annotated[
        str,
        about(
            "native, vllm, sglang: folder for tensors that a trainer sends while workers run, with room for two copies "
            "of the weights, such as /dev/shm/penstock; each deployment needs its own (POST /v1/admin/update_weights)"
        ),
    ] = ""
    sleep_after_s: Annotated[
        float,
        Meta(
            ge=0,
            description="native, mock, vllm, sglang: seconds without requests after which a worker moves its weights "
            "to host memory and frees its KV cache, until a request waits; 0: it stays awake",
        ),
    ] = 0.0
    share_device: Annotated[
        str,
        about(
            "native, mock, vllm, sglang: name of a device that several workers of this machine share: one is awake at "
            "a time, and sleeps when requests wait for another"
        ),
    ] = ""
    transfer: Annotated[
        Literal["auto", "nixl", "none"], about("how KV blocks move between workers; auto: nixl where the role needs it")
    ] = "auto"
    move_prefixes: Annotated[
        Literal["auto", "on", "off"],
        about(
            "native: read the prefix of a prompt from a worker that caches it, on the same host or over RDMA, where "
            "that is cheaper than computing it; auto: prefill and decode workers. An aggregated worker that does so "
            "does not sleep"
        ),
    ] = "auto"
    mixed_quantization: Annotated[
        bool,
        about(
            "exchange KV also with workers that quantize the same weights in another way, if they have this flag, too; "
            "without it, only equal ones read prefixes or take over prompts"
        ),
    ] = False
    handoff_lease_s: Annotated[Seconds, about("seconds that a worker keeps KV blocks for the next stage")] = 30.0
    transfer_timeout_s: Annotated[Seconds, about("seconds for moving the KV blocks of one request")] = 5.0
    quarantine_s: Annotated[
        Seconds,
        about("seconds that blocks stay reserved after a transfer timed out, before its NIXL agent is replaced"),
    ] = 10.0
    max_pixels: Annotated[Positive, about("diffusion: largest image, in pixels (width x height)")] = 2 << 20
    max_frames: Annotated[Positive, about("diffusion: longest video, in frames")] = 257
    max_steps: Annotated[Positive, about("diffusion: denoising steps per request, at most")] = 100
    max_pictures: Annotated[Positive, about("diffusion: images or videos per request, at most")] = 4
    frame_rate: Annotated[float, Meta(ge=0, description="diffusion: frames per second; 0: the pipeline's own rate")] = (
        0.0
    )
    state_dir: Annotated[
        str,
        about(
            "folder that outlives the process; it records its requests there, so that the restarted worker can report "
            "a crash; default: $STATE_DIRECTORY, which systemd sets, else none"
        ),
    ] = ""
    clear_shm: Annotated[
        bool,
        about(
            "at the start, remove this user's files in /dev/shm (not folders), which engines that crashed leave there; "
            "only where nothing else uses it, as in a pod"
        ),
    ] = False
    drain_s: Annotated[Seconds, about("seconds that running requests may take to finish after SIGTERM")] = 30.0
    durability: Annotated[Durability, about("durability of the broker; power: output waits until it is on disk")] = (
        "process"
    )
    otlp_endpoint: Annotated[
        str, about("trtllm, vllm, sglang: OTLP URL for the engine's own spans; Penstock's do not need it")
    ] = ""
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="port of Prometheus metrics; 0: none")] = 0
    metrics_host: Annotated[str, about("address of Prometheus metrics; ::: all addresses")] = "127.0.0.1"

    @property
    def lora_slots(self) -> int:
        """LoRA adapters on the device at once; 0: none are served."""
        return self.max_loras if self.lora or self.lora_folder else 0


class TraceSettings(Common, frozen=True, kw_only=True):
    """``penstock trace``: the traces of all requests to a collector."""

    FOLDER_NAMES_BROKER: ClassVar[bool] = True  # a --data-dir on the command line goes before PENSTOCK_NATS_URL
    nats_url: Annotated[
        str, about("broker URL with credentials of the role reader; default: of the data folder's broker")
    ] = ""
    namespace: Annotated[str, about("prefix of all NATS subjects and streams; default: the data folder's, else ps")] = (
        ""
    )
    data_dir: Annotated[str, about("data folder of the deployment, running or stopped")] = ".penstock"
    cells: Annotated[int, Meta(ge=0, description="cells of the deployment; 0: as the data folder says, else 1")] = 0
    cell_nats_urls: Annotated[
        tuple[str, ...],
        about("brokers of the cells after the first, as the gateway's flag; default: that of the first"),
    ] = ()
    file: Annotated[str, about("an export of `penstock export` instead")] = ""
    skip_bad: Annotated[bool, about("of --file: leave damaged lines out")] = False
    otlp_endpoint: Annotated[str, about("OTLP URL to send traces to, such as http://127.0.0.1:4318")] = ""
    since: Annotated[
        str, about("how far back to begin: 90s, 30m, 2h, 1d; default: where the last export stopped, else now")
    ] = ""
    once: Annotated[bool, about("exit once everything up to now has been sent")] = False
    sample: Annotated[
        float, Meta(ge=0, le=1, description="share of requests without a traceparent header to send, from 0 to 1")
    ] = 1.0
    export_timeout_s: Annotated[Seconds, about("seconds that a batch is retried before it is dropped")] = 300.0


class NatsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded broker."""

    data_dir: Annotated[str, about("folder of the store, passwords and generated configuration")] = ".penstock"
    namespace: Annotated[Namespace, about("prefix of all NATS subjects and streams")] = "ps"
    nats_host: Annotated[
        str, about("address to listen on; 0.0.0.0: all addresses, unencrypted, so in a trusted network only")
    ] = "127.0.0.1"
    nats_port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free port")] = 4222
    monitor_port: Annotated[int, Meta(ge=0, le=65535, description="port of HTTP monitoring; 0: none")] = 0
    monitor_host: Annotated[
        str, about("address of HTTP monitoring, which needs no password and shows users and connections")
    ] = "127.0.0.1"
    durability: Annotated[
        Durability,
        about("failures that messages survive; process: the end of any process; power: also a power cut, slower"),
    ] = "process"
    print_config: Annotated[
        bool,
        about(
            "print a nats-server configuration with the limits, users and rights of Penstock, instead of running one; "
            "its passwords are in secrets.json of --data-dir"
        ),
    ] = False
    cluster: Annotated[
        tuple[str, ...],
        about("--print-config: the servers of a cluster, comma-separated, as HOST or HOST:PORT (of routes; 6222)"),
    ] = ()
    node: Annotated[str, about("--print-config: server of --cluster that the configuration is for")] = ""
    cells: Annotated[
        int, Meta(ge=0, description="cells of the deployment that use the broker, each with streams of its own; 0: one")
    ] = 0
    store_dir: Annotated[str, about("--print-config: folder of the store on the server")] = "/var/lib/nats"
    tenants_file: Annotated[
        str, about("--print-config: file beside it with the accounts of tenants, which `penstock tenants` writes")
    ] = ""
    tls_cert: Annotated[
        str, about("--print-config: PEM file of the server's certificate, for clients and for other servers")
    ] = ""
    tls_key: Annotated[str, about("--print-config: PEM file of its key")] = ""
    tls_ca: Annotated[
        str, about("--print-config: PEM file of the authority of the servers' certificates, and of --client-certs")
    ] = ""
    nkeys: Annotated[
        str,
        about(
            "--print-config: users log in by nkeys; folder with a seed (USER.nk) or public key (USER.pub) of each "
            "user, where missing seeds are created"
        ),
    ] = ""
    client_certs: Annotated[
        bool,
        about(
            "--print-config: users log in by certificates of --tls-ca, each with its user's name as DNS name, such as "
            "DNS:worker"
        ),
    ] = False
    record: Annotated[
        bool, about("keep tokens, jobs and KV events for 7 days, as records are, for replay; cannot be undone")
    ] = False
    store_size: Annotated[
        float,
        Meta(
            ge=0,
            description="GiB that all streams together may take on the disk, when they are created; 0: their default "
            "sizes, 31.8",
        ),
    ] = 0.0
