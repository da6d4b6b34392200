"""vLLM (0.32 and 0.33, the V1 engine) through ``AsyncLLM``, as one of our engines.

Start. ``penstock worker --engine vllm --model DIR [--role prefill|decode] [--connector nixl,lmcache]
[--extra-engine-args FILE.yaml] [--override-engine-args JSON]``. Its arguments are ours (``args.defaults``) < the YAML
< the JSON, merged at every depth; a wrong one is refused at start with its fix.

KV events come over ZMQ, from a socket file in a private folder (several ranks: loopback ports), and become our names.
Prefill and decode hand KV over by vLLM's NIXL connector; its ``kv_transfer_params`` travel as ``Held.opaque``.

Where things are. Pure: ``args`` (arguments), ``prepare`` and ``sampling`` (a request), ``answers`` (its answer),
``handoff``, ``kvevents`` (names of blocks). The shell: ``api`` (what the installed release has), ``follow``,
``engine``, ``metrics``, ``build``. Nothing here imports vllm before an engine is built.
"""

from workers.engines.vllm.build import from_settings

__all__ = ["from_settings"]
