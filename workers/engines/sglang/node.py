"""The part of an SGLang engine on another machine than its first: schedulers that compute with those there."""

import time
from pathlib import Path

from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.tree import Tree
from penstock.workers.engines.external.nodes import environ, reached_at, towards
from penstock.workers.engines.external.runtime import shut_down, starting
from penstock.workers.engines.sglang import api
from penstock.workers.engines.sglang.args import follower_tree
from penstock.workers.engines.sglang.build import OWN_ADDRESS, VARIABLES
from penstock.workers.engines.sglang.processes import runs

POLL_S = 0.5
NO_WAIT = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"  # "0": the constructor does not return at the end only


class SglangNode:
    """
    Raises:
        EngineError: SGLang is not installed.
    """

    def __init__(self, settings: WorkerSettings, path: Path) -> None:
        self._settings = settings
        self._model = str(path)
        self._api = api.load_sglang()
        self._closing = False
        self._llm: object = None

    @property
    def version(self) -> str:
        return self._api.version

    def run(self, tree: Tree) -> str:
        """Start the schedulers of this machine, and wait until one has ended. Returns what happened.

        Raises:
            EngineError: they did not start.
        """
        variables = VARIABLES | reached_at(towards(self._settings.leader_address), OWN_ADDRESS)
        variables[NO_WAIT] = "0"
        with environ(variables), starting("SGLang", self._api.version):
            llm = self._llm = self._api.construct(self._model, follower_tree(tree, self._settings.node_rank))
        pids = sorted(llm.get_all_child_pids())
        while not self._closing:
            for pid in pids:
                if not runs(pid):
                    return f"a scheduler of SGLang (pid {pid}) has ended; its own log above says why"
            time.sleep(POLL_S)
        return "closed"

    def close(self) -> None:
        self._closing = True
        if self._llm is not None:
            shut_down(self._llm)
