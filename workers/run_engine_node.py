"""``penstock worker`` with ``--node-rank`` above 0: a machine of an engine that only computes.

It needs no broker: the first machine's process is the worker. It ends with that one, and tells it of its own end.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from penstock.configs.settings import WorkerSettings
from penstock.infra.metrics.scope import check_port, serve_page
from penstock.infra.model import modeldir
from penstock.workers.engines.engine_protocol import EngineError, NodeLost
from penstock.workers.engines.external.nodes import JoinRequest, NodeFollower, place_of
from penstock.workers.engines.external.runtime import ProcessGuard, children, in_thread
from penstock.workers.engines.external.start import EngineNode
from penstock.workers.metrics.multiprocess import VARIABLE, Merged
from penstock.workers.metrics.worker_metrics import GpuMetrics, GpuReader, find_library
from penstock.workers.runners.token_backend import model_path
from penstock.workers.session.process import EXIT_CONFIG, EXIT_ENGINE, EXIT_OK, EXIT_START, GRACE_S

log = structlog.get_logger("worker")

CLOSE_S = 15.0


def run(settings: WorkerSettings) -> int:
    """Compute until the leader ends; returns the exit status."""
    if settings.publish_events_and_metrics:
        check_port(settings.metrics_host, settings.metrics_port)
    path = model_path(settings)
    node, revision = _node(settings, path), modeldir.load(path).revision
    if settings.publish_events_and_metrics:
        registry = CollectorRegistry()
        if shared := os.environ.get(VARIABLE):  # of the ranks of this machine
            registry.register(Merged(Path(shared)))
        serve_page(settings.metrics_host, settings.metrics_port, registry)
    before = children()
    status = asyncio.run(_Process(settings, node, revision).serve())
    # Ranks that wait for others do not end by themselves, and Python would wait for them.
    ProcessGuard(children() - before)
    os._exit(status)


def _node(settings: WorkerSettings, path: Path) -> EngineNode:
    if settings.engine == "vllm":
        from penstock.workers.engines.vllm.build import node_from_settings
    else:
        from penstock.workers.engines.sglang.build import node_from_settings
    return node_from_settings(settings, path)


class _Process:
    def __init__(self, settings: WorkerSettings, node: EngineNode, revision: str) -> None:
        self._settings = settings
        self._node = node
        own = JoinRequest(settings.node_rank, settings.nodes, settings.engine, node.version, revision)
        # Read in a thread that does not keep the process from ending; without GPUs, or the library, there are none.
        seen = GpuMetrics(library, "") if (library := find_library()) is not None else None
        gpus = GpuReader(seen.use) if seen is not None and seen.count else None
        self._follower = NodeFollower(own, place_of(settings), lambda: gpus.use if gpus is not None else ())
        self._signals = 0
        self._asked = asyncio.Event()

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        # SGLang's schedulers send it to their parent when they fail; ``EngineNode.run`` sees their end.
        loop.add_signal_handler(signal.SIGQUIT, lambda: None)
        try:
            return await self._serve()
        except (NodeLost, EngineError) as error:
            log.error("start_failed", error=str(error))
            return EXIT_START if isinstance(error, NodeLost) else EXIT_CONFIG
        finally:
            await asyncio.to_thread(self._follower.close)

    def _on_signal(self, signum: int) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("forced_exit", signal=signal.Signals(signum).name)
            ProcessGuard(children())
            os._exit(128 + signum)
        log.info("asked_to_stop", action="the leader drains, and this node ends with it")
        self._follower.stop()
        self._asked.set()

    async def _serve(self) -> int:
        joined = asyncio.wrap_future(in_thread(self._follower.join, "node-join"))
        asked = asyncio.create_task(self._asked.wait(), name="asked")
        start: list[asyncio.Future[Any]] = [joined, asked]
        await asyncio.wait(start, return_when=asyncio.FIRST_COMPLETED)
        if not joined.done():
            joined.cancel()
            return EXIT_OK
        tree = joined.result().arguments
        log.info("node_starts", node=self._settings.node_rank, of=self._settings.nodes)
        ended = asyncio.wrap_future(in_thread(lambda: self._node.run(tree), "node-run"))
        over = asyncio.wrap_future(self._follower.over)
        ends: list[asyncio.Future[Any]] = [ended, over, asked]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and not over.done():  # the leader has the time that it may take
            bound_s = self._settings.drain_s + 2 * GRACE_S
            await asyncio.wait([ended, over], timeout=bound_s, return_when=asyncio.FIRST_COMPLETED)
        status = self._status(ended, over)
        closed = asyncio.wrap_future(in_thread(self._node.close, "node-close"))
        with contextlib.suppress(Exception):  # the shutdown of an engine that is broken
            await asyncio.wait_for(asyncio.shield(closed), CLOSE_S)
        return status

    def _status(self, ended: "asyncio.Future[str]", over: "asyncio.Future[str]") -> int:
        if over.done():
            if reason := over.result():
                log.error("leader_lost", error=reason)
            else:
                log.info("node_ended")
            return EXIT_START if reason else EXIT_OK
        if not ended.done():
            log.error("stop_timeout", action="exiting although the leader still runs")
            return EXIT_ENGINE
        error = ended.exception()
        reason = str(error) if error is not None else ended.result()
        log.error("engine_failed", error=reason)
        self._follower.failed(reason)
        return EXIT_CONFIG if isinstance(error, EngineError) else EXIT_ENGINE
