"""The part of a vLLM engine on another machine than its first: processes that compute what the scheduler there says."""

from pathlib import Path

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import Tree
from penstock.workers.engines.external.nodes import environ, reached_at, towards
from penstock.workers.engines.external.runtime import shut_down, starting
from penstock.workers.engines.vllm import api
from penstock.workers.engines.vllm.api import Ranks
from penstock.workers.engines.vllm.args import follower_tree
from penstock.workers.engines.vllm.build import OWN_ADDRESS, on_device

ENDED = "a process of vLLM has ended; its own log above says why"


class VllmNode:
    """
    Raises:
        EngineError: vLLM is not installed.
    """

    def __init__(self, settings: WorkerSettings, path: Path) -> None:
        api.set_log_level(settings.log_level)
        self._settings = settings
        self._model = str(path)
        self._api = api.load_vllm()
        self._ranks: Ranks | None = None

    @property
    def version(self) -> str:
        return self._api.version

    def run(self, tree: Tree) -> str:
        """Start the ranks of this machine, and wait until one has ended. Returns what happened.

        Raises:
            EngineError: they did not start.
        """
        variables = on_device(self._settings, self._api.cpu)
        variables |= reached_at(towards(self._settings.leader_address), OWN_ADDRESS)
        with environ(variables), starting("vLLM", self._api.version):
            ranks = self._ranks = self._api.ranks(self._model, follower_tree(tree, self._settings.node_rank))
        ranks.start_worker_monitor(inline=True)
        return ENDED

    def close(self) -> None:
        if self._ranks is not None:
            shut_down(self._ranks)
