"""KV events between an engine and its worker: publishers with sequence numbers in, one ordered stream of ours out.

Pure: ``order`` (sequence numbers, gaps, repeats), ``forest`` (an engine's own block hashes to our names),
``consolidator`` (several publishers of one worker to one stream), ``wire`` (the public multipart format). The shell:
``subscribe`` and ``publish`` (ZMQ, with replay), ``relay`` (an engine on the event plane "zmq").
"""
