"""SGLang (0.5.23 or 0.5.17) through ``sglang.Engine``, as one of our engines.

Start: ``penstock worker --engine sglang --model DIR [--role prefill|decode] [--extra-engine-args FILE.yaml]
[--override-engine-args JSON]``. The YAML overrides our defaults (``args.defaults``) and the JSON overrides the YAML. A
wrong argument is refused at start, with its fix.

KV events come over ZMQ, as vLLM's do. Prefill and decode hand off KV with SGLang's disaggregation over NIXL, in which
both engines run a request at the same time: see ``engine_inputs``.

Modules. Pure: ``args`` (arguments), ``engine_inputs`` (a request and its handoff). The shell: ``api`` (what the
installed release has), ``adapter`` (its output), ``plugin`` (what runs in SGLang's processes), ``build``.
Nothing here imports sglang before an engine is built.
"""
