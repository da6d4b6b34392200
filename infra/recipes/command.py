"""The command line that runs a recipe, as text to copy."""

import shlex

from infra.recipes.catalogue import Header, Recipe

LAUNCHER = "trtllm-llmapi-launch"  # rank 0 runs our worker, the other ranks only compute


def worker_command(recipe: Recipe, path: str, *, model: str = "") -> str:
    """A shell command; of several nodes, the one for Slurm.

    Args:
        path: of the recipe's file, as the worker will open it.
        model: a local directory that replaces the model id.
    """
    header = recipe.header
    if header is None:
        raise ValueError(f"{recipe.name} has no header; a command needs its role and model")
    argv = ["penstock", "worker", "--engine", header.engine, "--role", header.role]
    argv += ["--model", model or header.model, "--extra-engine-args", path]
    block = recipe.args.kv_cache_config.tokens_per_block
    argv += ["--block-size", str(block)]
    if recipe.args.max_seq_len:
        argv += ["--max-model-len", str(recipe.args.max_seq_len)]
    words = [*_launch(header), *map(shlex.quote, argv)]
    return " ".join(words)


def _launch(header: Header) -> list[str]:
    environ = [f"CUDA_VISIBLE_DEVICES={header.devices}"] if header.devices else []
    if header.nodes == 1:
        return environ
    per_node = header.gpus // header.nodes
    return [
        *environ, "srun", "--mpi=pmix", f"--nodes={header.nodes}", f"--ntasks={header.gpus}",
        f"--ntasks-per-node={per_node}", LAUNCHER,
    ]  # fmt: skip
