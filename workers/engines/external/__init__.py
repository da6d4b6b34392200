"""Shared parts of the adapters for asynchronous third-party engines (TensorRT-LLM, vLLM, SGLang).

Such an engine computes in threads or processes of its own, keeps its own KV cache with its own block names, and moves
KV between workers itself. ``engine`` implements our engine protocol for all of them; what differs is an
``EngineAdapter``. Each package has the same parts: ``args`` resolves the user's arguments, ``build`` starts the engine,
``engine_inputs`` validates a request and turns it into one call, and the follower in ``adapter`` reads its outputs in
an event loop and queues them as events, which ``engine`` returns step by step. ``runtime`` has the started engine, that
queue and a guard of its processes, ``start`` an engine of several processes, ``sequences`` the state of a sequence, its
tokens and failures, ``sampling`` what all sampling parameters share, ``constrained`` the constraints on its output,
``handoff_state`` the state passed to the next worker, ``event_streams`` the KV events, ``images`` those of prompts,
``arguments`` the user's engine arguments, ``nodes`` the machines of one engine and ``engine_metrics`` the engine's own
metrics. Nothing here imports one of the packages.
"""
