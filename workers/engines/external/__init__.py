"""Shared parts of the adapters for asynchronous third-party engines (TensorRT-LLM, vLLM, SGLang).

Such an engine computes in threads or processes of its own, keeps its own KV cache with its own block names, and moves
KV between workers itself. ``engine`` implements our engine protocol for all of them and owns an ``Adapter``, which is
what differs. Each adapter has the same parts: ``requests`` validates a request, the adapter turns it into one call, and
a follower reads its outputs in an event loop (``runtime``) and queues them as events, which
``engine`` returns step by step. ``runtime`` has the started engine and that queue, ``sequences`` what is known of one
sequence, ``outputs`` the tokens and failures, ``sampling`` what all sampling parameters share, ``prompt_logprobs`` the
scores of prompts, ``handoff_state`` the state passed to the next worker, ``arguments`` the user's engine arguments,
``metrics`` the engine's own metrics and ``guard`` its processes. Nothing here imports one of the packages.
"""
