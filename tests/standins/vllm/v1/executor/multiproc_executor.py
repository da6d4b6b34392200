"""As ``vllm.v1.executor.multiproc_executor``: here only what runs on another machine than the first."""

from vllm._standin.nodes import rank, ready
from vllm.config import VllmConfig


class MultiprocExecutor:
    """Its constructor returns when all ranks have met; it does not say whether the others are still there."""

    def __init__(self, vllm_config: VllmConfig, monitor_workers: bool = True) -> None:
        parallel = vllm_config.parallel_config
        assert parallel.node_rank > 0, "the stand-in's engine has the ranks of the first machine"
        assert not monitor_workers
        count = parallel.world_size // parallel.nnodes
        self._shutting_down = False
        self._workers = [rank(parallel.master_addr, parallel.master_port) for _ in range(count)]
        if not all(ready(worker) for worker in self._workers):
            self.shutdown()
            raise Exception("WorkerProc initialization failed due to an exception in a background process.")

    def start_worker_monitor(self, inline: bool = False) -> None:
        assert inline, "the stand-in waits in the caller's thread only"
        self._workers[0].wait()
        if not self._shutting_down:
            self.shutdown()

    def shutdown(self) -> None:
        self._shutting_down = True
        for worker in self._workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
