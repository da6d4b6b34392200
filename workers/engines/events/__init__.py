"""KV events between an engine and its worker: numbered messages of several publishers in, one ordered stream out.

Pure: ``translator`` (an engine's block hashes under our names; several publishers of one worker as one stream),
``wire`` (vLLM's multipart format). The shell: ``subscriber`` (ZMQ: gaps, repeats, replay), ``relay`` (an engine on the
event plane "zmq", and its publisher).
"""
