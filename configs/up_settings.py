"""The settings of ``penstock up``: its own, and those of its processes that it passes on."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from penstock.configs.settings import (
    CONFIG_FILE,
    Common,
    Durability,
    GatewaySettings,
    NatsSettings,
    Positive,
    Quantization,
    RouterMode,
    RouterSettings,
    SameAs,
    Seconds,
    WorkerSettings,
    about,
)

_GATEWAY, _ROUTER, _WORKER, _NATS = GatewaySettings(), RouterSettings(), WorkerSettings(), NatsSettings()
_OF_GATEWAY, _OF_ROUTER, _OF_WORKER = SameAs(GatewaySettings), SameAs(RouterSettings), SameAs(WorkerSettings)
_OF_NATS, _OF_ALL = SameAs(NatsSettings), SameAs(Common)
_SET = {
    *("active_cells", "counts_fd", "learn_models", "listen_fd", "mode", "name", "nearest_cell", "role", "state_dir"),
    *("sys_nats_url", "tracing"),
}


class UpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock up``: its own settings, and those of its processes that it passes on."""

    # Fields of its processes that it does not set itself, so that their variables count.
    PASSED_ON: ClassVar[Mapping[str, frozenset[str]]] = {
        name: frozenset(kind.__struct_fields__) - _SET
        for name, kind in {"gateway": GatewaySettings, "router": RouterSettings, "worker": WorkerSettings}.items()
    }
    HELP: ClassVar[Mapping[str, tuple[Any, ...]]] = {  # flags by heading, in the order of help and docs
        "Most used": (
            *("model", "engine", "workers", "gpus", "max_model_len", "http_host", "http_port", "require_keys"),
            *("data_dir", "config"),
        ),
        "Workers and their models": (
            *("served_model_name", "recipe", "prefill", "decode", "encode", "local_prefill_tokens"),
            *("prefill_queue_tokens", "handoff_lease_s", "mixed_quantization", "move_prefixes"),
            *("diffusion", "diffusion_model", "diffusion_served_name", "diffusion_engine"),
            *("embed", "embed_model", "embed_served_name"),
        ),
        "Engines": (
            *(
                "url",
                "url_api",
                "url_model",
                "url_key_file",
                "tensor_parallel_size",
                "extra_engine_args",
                "prefill_engine_args",
                "decode_engine_args",
            ),
            *("encode_engine_args", "override_engine_args", "threads"),
            WorkerSettings,
        ),
        "HTTP API": ("chat_template", "parser_families", GatewaySettings),
        "Broker and log": ("nats_url", "nats_port", "cell_nats_urls", NatsSettings),
        "Processes": (
            *("cells", "gateways", "routers", "router_mode", "metrics_port", "dashboard_port", "scheduling", "ready_s"),
            *("drain_s", "log_format", "log_level", "otlp_endpoint"),
        ),
    }

    config: Annotated[
        str, about(f"YAML file of these settings, named as the flags; flags win; default: {CONFIG_FILE}, if it exists")
    ] = ""
    model: Annotated[
        tuple[str, ...],
        about(
            "model directory or Hugging Face id, as FOLDER or NAME=FOLDER; repeat the flag for several models behind "
            "one address, each with as many workers as --workers, --prefill, ... say; default: the demo model, or a "
            "tiny one for the mock engine"
        ),
    ] = ()
    served_model_name: Annotated[str, _OF_WORKER] = _WORKER.served_model_name
    engine: Annotated[
        Literal["auto", "native", "mock", "trtllm", "vllm", "sglang", "openai"],
        about("inference engine; auto: the recipe's, else native"),
    ] = "auto"
    recipe: Annotated[str, about("recipe for model, roles and engine arguments; `penstock recipe list` names them")] = (
        ""
    )
    workers: Annotated[
        int, Meta(ge=-1, description="aggregated workers; -1: one, or none if other workers suffice")
    ] = -1
    prefill: Annotated[int, Meta(ge=0, description="prefill workers, which compute prompts and hand off the KV")] = 0
    decode: Annotated[
        int, Meta(ge=0, description="decode workers, which generate from handed-off KV, and run short prompts alone")
    ] = 0
    encode: Annotated[int, Meta(ge=0, description="encode workers, which turn images into embeddings")] = 0
    diffusion: Annotated[int, Meta(ge=0, description="diffusion workers, which make images or videos")] = 0
    diffusion_model: Annotated[str, about("diffusers directory or Hugging Face id for the diffusion workers")] = ""
    diffusion_served_name: Annotated[str, about("its name for clients; default: the directory's name")] = ""
    diffusion_engine: Annotated[
        Literal["native", "trtllm"], about("engine of the diffusion workers; native: diffusers")
    ] = "native"
    embed: Annotated[
        int,
        Meta(ge=0, description="embed workers, which compute vectors of texts; an embedding model gets one by default"),
    ] = 0
    embed_model: Annotated[str, about("model directory or Hugging Face id for the embed workers; default: --model")] = (
        ""
    )
    embed_served_name: Annotated[str, about("its name for clients; default: the directory's name")] = ""
    gpus: Annotated[
        tuple[str, ...],
        about("GPUs to assign to workers, in order; default: CUDA_VISIBLE_DEVICES, else all; none: assign none"),
    ] = ()
    tensor_parallel_size: Annotated[int, _OF_WORKER] = _WORKER.tensor_parallel_size
    max_model_len: Annotated[int, _OF_WORKER] = _WORKER.max_model_len
    canary: Annotated[str, _OF_GATEWAY] = _GATEWAY.canary
    fallback: Annotated[tuple[str, ...], _OF_GATEWAY] = _GATEWAY.fallback
    fallback_after_s: Annotated[float, _OF_GATEWAY] = _GATEWAY.fallback_after_s
    url: Annotated[str, _OF_WORKER] = _WORKER.url
    url_api: Annotated[Literal["auto", "completions", "chat"], _OF_WORKER] = _WORKER.url_api
    url_model: Annotated[str, _OF_WORKER] = _WORKER.url_model
    url_key_file: Annotated[str, _OF_WORKER] = _WORKER.url_key_file
    extra_engine_args: Annotated[str, _OF_WORKER] = _WORKER.extra_engine_args
    prefill_engine_args: Annotated[str, about("trtllm, vllm, sglang: --extra-engine-args of the prefill workers")] = ""
    decode_engine_args: Annotated[str, about("trtllm, vllm, sglang: --extra-engine-args of the decode workers")] = ""
    encode_engine_args: Annotated[str, about("trtllm: --extra-engine-args of the encode workers")] = ""
    override_engine_args: Annotated[str, _OF_WORKER] = _WORKER.override_engine_args
    logits_processor: Annotated[tuple[str, ...], _OF_WORKER] = _WORKER.logits_processor
    default_logits_processors: Annotated[str, _OF_WORKER] = _WORKER.default_logits_processors
    gateways: Annotated[
        str,
        Meta(
            pattern=r"^(auto|\d{1,4}|[1-9]\d{0,3}-[1-9]\d{0,3})$",
            title="auto, a number, or the fewest and the most, such as 2-6",
            description="gateway processes, which share --http-port; each also has one of the ports after it. A "
            "number, or a range such as 2-6 that is scaled by load; auto: by the number of cores and workers, and "
            "more while gateways are busy and cores idle",
        ),
    ] = "auto"
    routers: Annotated[
        Positive,
        about("router processes, distributed over the cells: at least one for each; further ones are standbys"),
    ] = 1
    cells: Annotated[
        int,
        Meta(
            ge=0,
            description="cells that take requests, each with its own streams, routers, workers and broker; further "
            "cells of the data folder are only read; 0: as in the data folder, or by the number of cores and workers",
        ),
    ] = 0
    cell_nats_urls: Annotated[
        tuple[str, ...],
        about(
            "broker URLs of the cells after the first, in order, with the operator's credentials; several servers of "
            "one cell are separated by ';'; default: --nats-url, or a broker for each cell"
        ),
    ] = ()
    router_mode: Annotated[RouterMode, about("how a worker is chosen; kv: by cached blocks and load")] = _ROUTER.mode
    http_host: Annotated[str, _OF_GATEWAY] = _GATEWAY.http_host
    http_port: Annotated[int, _OF_GATEWAY] = _GATEWAY.http_port
    metrics_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65535,
            description="first port of Prometheus metrics, one per worker and router; 0: any free ports; -1: none",
        ),
    ] = 0
    dashboard_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65535,
            description="port of the dashboard on loopback, or any free one if it is taken; 0: any free one; -1: none",
        ),
    ] = 8480
    data_dir: Annotated[str, about("folder of the store, passwords, logs and state.json")] = _NATS.data_dir
    nats_url: Annotated[
        str,
        about(
            "URLs of a broker to use, comma-separated, with the operator's credentials; default: that of "
            "PENSTOCK_NATS_URL, else start one"
        ),
    ] = ""
    nats_port: Annotated[
        int, Meta(ge=0, le=65535, description="port of the embedded broker on loopback; 0: the last one, or any free")
    ] = 0
    durability: Annotated[Durability, _OF_NATS] = _NATS.durability
    record: Annotated[bool, _OF_NATS] = _NATS.record
    store_size: Annotated[float, _OF_NATS] = _NATS.store_size
    namespace: Annotated[str, _OF_NATS] = _NATS.namespace
    scheduling: Annotated[
        Literal["batch", "normal"],
        about(
            "how Linux schedules the processes; batch: they do not interrupt each other or other programs, except "
            "workers on GPUs"
        ),
    ] = "batch"
    chat_template: Annotated[str, _OF_GATEWAY] = _GATEWAY.chat_template
    reasoning_parser: Annotated[str, _OF_WORKER] = _WORKER.reasoning_parser
    tool_call_parser: Annotated[str, _OF_WORKER] = _WORKER.tool_call_parser
    parser_families: Annotated[
        str, about("TOML or JSON file with formats of reasoning and tool calls beside the known ones")
    ] = ""
    block_size: Annotated[int, _OF_WORKER] = _WORKER.block_size
    kv_blocks: Annotated[int, _OF_WORKER] = _WORKER.kv_blocks
    quantization: Annotated[Quantization, _OF_WORKER] = _WORKER.quantization
    speculative_model: Annotated[str, _OF_WORKER] = _WORKER.speculative_model
    num_speculative_tokens: Annotated[int, _OF_WORKER] = _WORKER.num_speculative_tokens
    batch_invariant: Annotated[bool, _OF_WORKER] = _WORKER.batch_invariant
    lora: Annotated[tuple[str, ...], _OF_WORKER] = _WORKER.lora
    lora_folder: Annotated[str, _OF_WORKER] = _WORKER.lora_folder
    max_loras: Annotated[int, _OF_WORKER] = _WORKER.max_loras
    max_lora_rank: Annotated[int, _OF_WORKER] = _WORKER.max_lora_rank
    max_cpu_loras: Annotated[int, _OF_WORKER] = _WORKER.max_cpu_loras
    weights_folder: Annotated[tuple[str, ...], _OF_WORKER] = _WORKER.weights_folder
    weights_staging: Annotated[str, _OF_WORKER] = _WORKER.weights_staging
    sleep_after_s: Annotated[float, _OF_WORKER] = _WORKER.sleep_after_s
    share_device: Annotated[str, _OF_WORKER] = _WORKER.share_device
    max_running: Annotated[int, _OF_WORKER] = _WORKER.max_running
    max_queue: Annotated[int, _OF_GATEWAY] = _GATEWAY.max_queue
    queue_full_status: Annotated[int, _OF_GATEWAY] = _GATEWAY.queue_full_status
    cell: Annotated[int, _OF_GATEWAY] = _GATEWAY.cell
    list_requests: Annotated[bool, _OF_GATEWAY] = _GATEWAY.list_requests
    runtime_lora_updating: Annotated[bool, _OF_GATEWAY] = _GATEWAY.runtime_lora_updating
    tls_cert: Annotated[str, _OF_GATEWAY] = _GATEWAY.tls_cert
    tls_key: Annotated[str, _OF_GATEWAY] = _GATEWAY.tls_key
    cors_origins: Annotated[tuple[str, ...], _OF_GATEWAY] = _GATEWAY.cors_origins
    trusted_proxies: Annotated[tuple[str, ...], _OF_GATEWAY] = _GATEWAY.trusted_proxies
    api_key: Annotated[tuple[str, ...], _OF_GATEWAY] = _GATEWAY.api_key
    require_keys: Annotated[bool, _OF_GATEWAY] = _GATEWAY.require_keys
    insecure: Annotated[bool, _OF_GATEWAY] = _GATEWAY.insecure
    always_no_store: Annotated[bool, _OF_GATEWAY] = _GATEWAY.always_no_store
    strict_options: Annotated[bool, _OF_GATEWAY] = _GATEWAY.strict_options
    reasoning_fields: Annotated[Literal["auto", "both", "reasoning_content", "reasoning"], _OF_GATEWAY] = (
        _GATEWAY.reasoning_fields
    )
    stream_ping_s: Annotated[float, _OF_GATEWAY] = _GATEWAY.stream_ping_s
    max_media_bytes: Annotated[int, _OF_GATEWAY] = _GATEWAY.max_media_bytes
    max_tenant_file_bytes: Annotated[int, _OF_GATEWAY] = _GATEWAY.max_tenant_file_bytes
    max_image_pixels: Annotated[int, _OF_GATEWAY] = _GATEWAY.max_image_pixels
    max_images: Annotated[int, _OF_GATEWAY] = _GATEWAY.max_images
    max_videos: Annotated[int, _OF_GATEWAY] = _GATEWAY.max_videos
    max_video_frames: Annotated[int, _OF_GATEWAY] = _GATEWAY.max_video_frames
    media_timeout_s: Annotated[float, _OF_GATEWAY] = _GATEWAY.media_timeout_s
    allowed_local_media_path: Annotated[str, _OF_GATEWAY] = _GATEWAY.allowed_local_media_path
    allow_private_media_addresses: Annotated[bool, _OF_GATEWAY] = _GATEWAY.allow_private_media_addresses
    mock_speedup: Annotated[float, _OF_WORKER] = _WORKER.mock_speedup
    mock_answer_tokens: Annotated[str, _OF_WORKER] = _WORKER.mock_answer_tokens
    mock_crash_token: Annotated[int, _OF_WORKER] = _WORKER.mock_crash_token
    play: Annotated[str, _OF_WORKER] = _WORKER.play
    skip_bad: Annotated[bool, _OF_WORKER] = _WORKER.skip_bad
    threads: Annotated[int, Meta(ge=0, description="CPU threads per native worker; 0: free cores / workers")] = 0
    handoff_lease_s: Annotated[float, _OF_WORKER] = _WORKER.handoff_lease_s
    move_prefixes: Annotated[Literal["auto", "on", "off"], _OF_WORKER] = _WORKER.move_prefixes
    mixed_quantization: Annotated[bool, _OF_WORKER] = _WORKER.mixed_quantization
    local_prefill_tokens: Annotated[int, _OF_ROUTER] = _ROUTER.local_prefill_tokens
    prefill_queue_tokens: Annotated[int, _OF_ROUTER] = _ROUTER.prefill_queue_tokens
    no_store_grace_s: Annotated[float, _OF_GATEWAY] = _GATEWAY.no_store_grace_s
    log_format: Annotated[Literal["auto", "text", "json"], _OF_ALL] = "auto"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _OF_ALL] = "info"
    ready_s: Annotated[
        float,
        Meta(ge=0, description="seconds to wait for readiness; 0: 120, or 3600 with trtllm, vllm, sglang or diffusion"),
    ] = 0.0
    drain_s: Annotated[Seconds, about("seconds for open requests to finish after Ctrl-C or SIGTERM")] = 30.0
    otlp_endpoint: Annotated[
        str, about("OTLP URL: trace every request and send the spans there, such as http://127.0.0.1:4318/v1/traces")
    ] = ""
