"""What engines have in common that are packages of others and answer asynchronously (TensorRT-LLM, vLLM).

Such an engine computes in threads or processes of its own, keeps its own KV cache and names blocks in its own way, and
moves KV between workers by itself. Its adapter has the same parts each time: a request is checked (``requests``) and
turned into one call, which is followed in a loop of its own (``workers.engines.loop``); what is heard becomes facts in
a queue, and ``engine`` tells them step by step. ``answer`` is what is told of a sequence, ``draw`` what is the same in
all sampling parameters, ``handed`` how its state travels to the next worker, ``arguments`` what the user gave it,
``metrics`` its own metrics beside ours, ``guard``
its processes. Nothing here knows one of the packages.
"""
