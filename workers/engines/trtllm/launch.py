"""How this process was launched among the ranks of one engine. Pure: the environment is an argument.

Under MPI or Slurm, every rank runs the same command. TensorRT-LLM's launcher runs our worker on the first rank only and
makes the others its compute processes. Without it, each rank would register a worker of its own and wait for the
others.
"""

from collections.abc import Mapping
from typing import NamedTuple

LAUNCHER = "trtllm-llmapi-launch"
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class Launch(NamedTuple):
    """
    Attributes:
        launched: by TensorRT-LLM's launcher.
        ranks: processes that were started together.
        leads: this process is the first rank.
    """

    launched: bool
    ranks: int
    leads: bool


def launch_of(environ: Mapping[str, str]) -> Launch:
    """The launch that environment variables describe."""
    if environ.get("TLLM_SPAWN_PROXY_PROCESS") == "1":
        return Launch(True, _number(environ, ("tllm_mpi_size",), 1), True)  # the launcher removes MPI's variables
    return Launch(False, _number(environ, _SIZES, 1), _number(environ, _RANKS, 0) == 0)


def problem(environ: Mapping[str, str], world: int) -> str:
    """Why an engine of ``world`` ranks cannot start here; "": it can."""
    launch = launch_of(environ)
    if not launch.launched and launch.ranks > 1:
        return (
            f"{launch.ranks} processes were started by MPI or Slurm without TensorRT-LLM's launcher; put {LAUNCHER} in "
            "front of 'penstock worker', so that one of them serves and the others compute"
        )
    if launch.launched and launch.ranks not in (1, world):
        return f"the launcher started {launch.ranks} ranks, but the engine's arguments need {world}; make them equal"
    return ""


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = environ.get(name, "")
        if value.isdigit():
            return int(value)
    return default
