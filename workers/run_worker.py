"""``penstock worker``: checks the settings and serves with the backend they name."""

import contextlib
import os
import re
import stat
import sys
from pathlib import Path

import structlog
from msgspec import structs

from penstock.configs import logs
from penstock.configs.settings import WorkerSettings, named, traces_url
from penstock.infra.metrics.scope import PortTaken, check_port
from penstock.infra.model import modeldir
from penstock.infra.text.parsers import families
from penstock.schemas.errors import ServingError
from penstock.workers.engines.engine_protocol import EngineAway, EngineError, NodeLost
from penstock.workers.engines.support import SUPPORT, able, install_hint
from penstock.workers.kv_transfer.transport_protocol import TransportUnavailable
from penstock.workers.metrics.multiprocess import own_directory
from penstock.workers.session.process import EXIT_CONFIG, EXIT_START, MakeBackend, WorkerProcess

log = structlog.get_logger("worker")


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM; returns the exit status."""
    # The event loop must get its turn beside an engine that computes in Python. An engine on a GPU gives up the
    # interpreter with each call of torch, and waits for it so long where the event loop is busy: of 1 ms, launching a
    # step took up to 7 ms instead of 0.7 while requests arrived.
    sys.setswitchinterval(0.0001)
    settings = named(settings, "worker", settings.metrics_port)
    logs.setup(settings.log_format, settings.log_level, name=settings.name)
    if settings.otlp_endpoint:  # engines would take it for gRPC
        protocol = os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        if protocol == "http/protobuf":
            settings = structs.replace(settings, otlp_endpoint=traces_url(settings.otlp_endpoint))
    import uvloop

    if settings.clear_shm:
        clear_shared_memory(Path("/dev/shm"))
    try:
        with own_directory():
            check_nodes(settings)
            if settings.node_rank:
                from penstock.workers import run_engine_node

                check_settings(settings)
                return run_engine_node.run(settings)
            status: int = uvloop.run(_serve(settings))
        return status
    except NodeLost as error:
        log.error("start_failed", error=str(error))
        sys.stdout.flush()
        os._exit(EXIT_START)  # ranks that wait for the lost one hold this process's end up
    except (ServingError, PortTaken, EngineAway) as error:
        log.error("start_failed", error=str(error))
        return EXIT_START
    except (modeldir.ModelError, EngineError, TransportUnavailable, ValueError) as error:
        log.error("start_failed", error=str(error))
        return EXIT_CONFIG
    except ModuleNotFoundError as error:
        log.error("start_failed", error=install_hint(error, settings.engine, settings.role))
        return EXIT_CONFIG


def clear_shared_memory(folder: Path) -> None:
    """Remove this user's files in a folder, as processes that were killed leave shared memory there.

    A pod's /dev/shm outlives its containers. Without this, each crash takes from what it may hold, until no engine
    starts in it. Folders are not of engines: ``--weights-staging`` may be there. What a process that is seen here maps
    stays, as another worker's.
    """
    mapped, files, size = set[str](), 0, 0
    for each in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # of another user, or ended
            mapped.update(re.findall(rf"{re.escape(str(folder))}/.*", each.read_text(errors="replace")))
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may remove it, too
            about = path.lstat()
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and str(path) not in mapped:
                path.unlink()
                files, size = files + 1, size + about.st_blocks * 512
    if files:
        log.warning("shared_memory_cleared", folder=str(folder), files=files, bytes=size)


async def _serve(settings: WorkerSettings) -> int:
    if settings.publish_events_and_metrics:
        check_port(settings.metrics_host, settings.metrics_port)  # before a model is loaded
    make_backend: MakeBackend
    if settings.role == "diffusion":
        from penstock.workers.runners.pipeline_runner import DiffusionBackend

        make_backend = DiffusionBackend
    elif settings.role == "embed":
        from penstock.workers.runners.embedding_runner import EmbeddingBackend

        make_backend = EmbeddingBackend
    else:
        from penstock.workers.runners.token_backend import TokenBackend

        check_settings(settings)
        families.prepare(settings.parser_families, settings.reasoning_parser, settings.tool_call_parser)
        make_backend = TokenBackend
    return await WorkerProcess(settings, make_backend).serve()


def check_settings(settings: WorkerSettings) -> None:
    """
    Raises:
        ValueError: settings that contradict each other.
    """
    support = SUPPORT[settings.engine]
    if settings.role in ("prefill", "decode") and settings.engine in ("native", "mock"):  # others move KV themselves
        if not settings.prefix_cache:
            raise ValueError(f"--role {settings.role} hands off KV under the names of the prefix cache; leave it on")
        if settings.transfer == "none":
            raise ValueError(f"--role {settings.role} needs a transfer backend; use --transfer auto")
    elif settings.role == "encode" and settings.transfer == "none":
        raise ValueError("--role encode needs a transfer backend for its embeddings; use --transfer auto")
    if settings.scheduler_policy != "max_utilization":
        if settings.engine not in ("native", "mock"):
            raise ValueError(
                f"--scheduler-policy applies to the native engine and the mock; {settings.engine} takes it from "
                "--extra-engine-args"
            )
        if settings.role == "decode":
            raise ValueError(
                f"--scheduler-policy {settings.scheduler_policy}: a decode worker adopts blocks before it knows the "
                "longest answer; use it with --role aggregated or prefill"
            )
    if settings.move_prefixes == "on":
        if settings.engine not in ("native", "mock") or settings.role not in ("aggregated", "prefill", "decode"):
            raise ValueError(
                f"--move-prefixes on: --engine {settings.engine} --role {settings.role} reads no prefixes; leave it out"
            )
        if settings.transfer == "none" or not settings.prefix_cache:
            raise ValueError("--move-prefixes on needs the prefix cache and a transfer backend; use --transfer auto")
        if settings.sleep_after_s or settings.share_device:
            raise ValueError(
                "--move-prefixes on: other workers read this one's KV cache, so it does not sleep; leave out "
                "--sleep-after-s and --share-device"
            )
    for flag, given, engines in (
        ("--kv-offloading-size", settings.kv_offloading_size, ("native", "mock")),
        ("--kv-disk", settings.kv_disk, ("native",)),
    ):
        if given and (settings.engine not in engines or settings.role == "encode"):
            raise ValueError(f"{flag} applies to --engine {' or '.join(engines)}, where it keeps KV; leave it out")
    if settings.lora_slots and not support.lora and settings.role != "encode":
        raise ValueError(
            f"--engine {settings.engine} applies no LoRA adapters here; leave out --lora and --lora-folder, or use "
            f"--engine {' or '.join(able('lora'))}"
        )
    if settings.tensor_parallel_size > 1:
        if settings.engine not in ("native", "trtllm", "vllm", "sglang"):
            raise ValueError(f"--tensor-parallel-size: --engine {settings.engine} shares no layers; leave it out")
        if settings.engine == "native" and settings.role == "encode":
            raise ValueError("--tensor-parallel-size: a vision tower is not split; leave it out with --role encode")
    if settings.engine not in ("native", "mock", "vllm", "sglang") and (
        settings.weights_folder or settings.sleep_after_s or settings.share_device
    ):
        raise ValueError(
            f"--engine {settings.engine} changes no weights and does not sleep; leave out --weights-folder, "
            "--sleep-after-s and --share-device"
        )
    if settings.weights_staging and settings.engine not in ("native", "vllm", "sglang"):
        raise ValueError(f"--weights-staging: --engine {settings.engine} takes no tensors of a trainer; leave it out")
    if settings.engine == "openai" and settings.role != "aggregated":
        raise ValueError(f"--engine openai: a server computes whole requests; leave out --role {settings.role}")
    if settings.url and settings.engine != "openai":
        raise ValueError(f"--url names the server of --engine openai, and the engine is {settings.engine}")
    if settings.play and settings.engine != "mock":
        raise ValueError("--play applies to the mock engine: add --engine mock")
    if settings.speculative_model and settings.engine != "native":
        raise ValueError("--speculative-model applies to the native engine; others take it from --extra-engine-args")
    if settings.role == "encode" and not support.encode:
        raise ValueError(
            f"--engine {settings.engine} has no encode workers; --role encode runs on {', '.join(able('encode'))}"
        )
    if settings.kv_events_from and settings.event_plane != "zmq":
        raise ValueError("--kv-events-from: other publishers are read over ZMQ; add --event-plane zmq")
    if settings.event_plane == "zmq" and not (
        settings.prefix_cache and settings.publish_events_and_metrics and settings.role != "encode"
    ):
        raise ValueError("--event-plane zmq: this worker has no KV events; leave the prefix cache and publishing on")
    edits = settings.logits_processor or settings.default_logits_processors
    if edits and (settings.role == "encode" or not support.logits_processors):
        raise ValueError(
            f"--engine {settings.engine} --role {settings.role} runs no logits processors; leave out "
            "--logits-processor and --default-logits-processors, or use --engine "
            + " or ".join(able("logits_processors"))
        )


def check_nodes(settings: WorkerSettings) -> None:
    """
    Raises:
        ValueError: an engine over several machines that cannot be.
    """
    if settings.nodes == 1:
        if settings.node_rank:
            raise ValueError(f"--node-rank {settings.node_rank}: of how many machines? Add --nodes")
        return
    if settings.engine not in ("vllm", "sglang"):
        other = "; start TensorRT-LLM's ranks with trtllm-llmapi-launch" if settings.engine == "trtllm" else ""
        raise ValueError(f"--nodes {settings.nodes}: applies to --engine vllm and sglang{other}")
    if settings.node_rank >= settings.nodes:
        raise ValueError(f"--node-rank {settings.node_rank}: the nodes are 0 to {settings.nodes - 1}")
    if not settings.leader_address:
        raise ValueError(f"--nodes {settings.nodes}: add --leader-address, an address of node 0 that the others reach")
