"""vLLM (0.32 and 0.33, the V1 engine) through ``AsyncLLM``, as one of our engines.

Start: ``penstock worker --engine vllm --model DIR [--role prefill|decode] [--connector nixl,lmcache]
[--extra-engine-args FILE.yaml] [--override-engine-args JSON]``. The YAML overrides our defaults (``args.defaults``) and
the JSON overrides the YAML, merged at every depth. A wrong argument is refused at start, with its fix.

KV events come over ZMQ, from a socket file in a private folder (several ranks: loopback ports), and are translated to
our block names. Prefill and decode hand off KV with vLLM's NIXL connector; its ``kv_transfer_params`` are
``PinnedPrompt.opaque``.

Modules. Pure: ``args`` (arguments), ``engine_inputs`` (a request and its handoff). The shell: ``api`` (what the
installed release has), ``adapter`` (its output), ``plugin`` and ``logits_processors`` (what
runs in vLLM's processes), ``build``. Nothing here imports vllm before an engine is built.
"""
