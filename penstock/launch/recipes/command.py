"""The command line that runs a recipe."""

import shlex

from penstock.launch.recipes.catalogue import Header, RecipeEntry

LAUNCHER = "trtllm-llmapi-launch"  # runs the worker on rank 0 only; the other ranks compute


def worker_command(member: RecipeEntry, *, model: str = "") -> str:
    """A shell command; for several nodes, with Slurm.

    Args:
        model: a local directory that replaces the model id.
    """
    header = member.header
    argv = ["penstock", "worker", "--engine", header.engine, "--role", header.role]
    argv += ["--model", model or header.model, "--extra-engine-args", member.path]
    argv += ["--block-size", str(member.block_size)]
    if member.max_len:
        argv += ["--max-model-len", str(member.max_len)]
    command = [*_launch(header), *map(shlex.quote, argv)]
    return " ".join(command)


def _launch(header: Header) -> list[str]:
    environ = [f"CUDA_VISIBLE_DEVICES={header.devices}"] if header.devices else []
    if header.nodes == 1:
        return environ
    per_node = header.gpus // header.nodes
    return [
        *environ, "srun", "--mpi=pmix", f"--nodes={header.nodes}", f"--ntasks={header.gpus}",
        f"--ntasks-per-node={per_node}", LAUNCHER,
    ]  # fmt: skip
