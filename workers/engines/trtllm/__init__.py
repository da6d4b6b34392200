"""TensorRT-LLM (target 1.2.1) through its LLM API, as one of our engines.

Start: ``penstock worker --engine trtllm --model DIR [--role prefill|decode|encode] [--trtllm-backend autodeploy]
[--extra-engine-args FILE.yaml] [--override-engine-args JSON]``. The YAML overrides our defaults (``args.defaults``) and
the JSON overrides the YAML, merged at every depth. A wrong argument is refused at start, with its fix. Host cache,
attention windows, mixtures of experts, speculation and the like are set there: see ``configs/recipes``.

Several GPUs of one node: set ``tensor_parallel_size`` (also pipeline, context). TensorRT-LLM starts its own MPI ranks
from this process. Under Slurm that spawn can fail; then launch as for several nodes.

Several nodes: start one rank per GPU, on every rank with TensorRT-LLM's launcher in front of the worker:

    srun --mpi=pmix -N 2 --ntasks-per-node 8 trtllm-llmapi-launch penstock worker --engine trtllm ...
    mpirun -n 16 -H a:8,b:8 trtllm-llmapi-launch penstock worker --engine trtllm ...

Only rank 0 runs the worker: one registration, one set of subjects, one metrics port per engine. The other ranks become
TensorRT-LLM's compute processes and never run our code. Without the launcher, each of them would register a worker of
its own that waits for the others, so such a start is refused (``build``). Set ``gpus_per_node``: by default
TensorRT-LLM counts the GPUs of rank 0's node. The launcher removes SLURM_*, UCX_*, MPI_* and OMPI_* variables from the
worker's environment; the ranks keep them.

Metrics of rank 0's other processes: set PROMETHEUS_MULTIPROC_DIR to a directory that they share before the start, and
their series are merged into the worker's own metrics port (``trtllm_metrics``).

Modules. Pure: ``args`` (arguments), ``engine_inputs`` (a request and its output), ``disagg`` (its handoff),
``kv_events`` (names of blocks), ``interface`` (what is used of TensorRT-LLM). The shell: ``api`` (what the installed
release has), ``adapter`` (its output), ``encoder``, ``logits_processors``, ``trtllm_metrics``,
``engine_health`` (whether it still works), ``build``; ``visual_gen`` for images and videos. Nothing here
imports tensorrt_llm before an engine is built.
"""

from penstock.workers.engines.trtllm.build import from_settings
from penstock.workers.engines.trtllm.encoder import encoder_from_settings

__all__ = ["encoder_from_settings", "from_settings"]
