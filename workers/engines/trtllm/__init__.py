"""TensorRT-LLM (target 1.2.1) through its LLM API, as one of our engines.

Start. ``penstock worker --engine trtllm --model DIR [--role prefill|decode|encode] [--trtllm-backend autodeploy]
[--extra-engine-args FILE.yaml] [--override-engine-args JSON]``. Its arguments are ours (``args.defaults``) < the YAML
< the JSON, merged at every depth; a wrong one is refused at start with its fix. Host cache, windows, mixtures of
experts, speculation and all else are set there: see ``configs/recipes``.

Several GPUs of one node. ``tensor_parallel_size: N`` (also pipeline, context): TensorRT-LLM starts its own MPI ranks
from this process. Under Slurm that spawn can fail; launch as for several nodes.

Several nodes. Start one rank per GPU and put TensorRT-LLM's launcher in front of the worker, on every rank:

    srun --mpi=pmix -N 2 --ntasks-per-node 8 trtllm-llmapi-launch penstock worker --engine trtllm ...
    mpirun -n 16 -H a:8,b:8 trtllm-llmapi-launch penstock worker --engine trtllm ...

Only rank 0 runs the worker: one registration, one set of subjects, one metrics port per engine. The other ranks become
TensorRT-LLM's compute processes and never run our code; started without the launcher, they would each register a
worker of their own that waits for the others, so such a start is refused (``launch``). Name ``gpus_per_node``: what is
counted otherwise is rank 0's node. The launcher takes SLURM_*, UCX_*, MPI_* and OMPI_* variables away from the worker;
the ranks keep them.

Metrics of other processes of rank 0's node: with PROMETHEUS_MULTIPROC_DIR on a directory that they share, set before
the start, their series are merged into the worker's own metrics port (``metrics``).

Where things are. Pure: ``args`` (arguments), ``prepare`` and ``sampling`` (a request), ``deltas`` (its answer),
``disagg`` (its hand-over), ``kvevents`` (names of blocks), ``stats``, ``errors``, ``symptoms``, ``launch``. The shell:
``api`` (what the installed release has), ``workers.engines.loop``, ``follow``, ``engine``, ``encoder``, ``metrics``,
``watch``, ``build``. Nothing here imports tensorrt_llm before an engine is built.
"""

from workers.engines.trtllm.build import from_settings
from workers.engines.trtllm.encoder import from_settings as encoder_from_settings

__all__ = ["encoder_from_settings", "from_settings"]
