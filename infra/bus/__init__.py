"""The client side of NATS: each process's connection to the broker, and the ways in which Penstock uses it.

``connection`` opens it, ``publisher`` stores messages, ``puller`` takes work, ``log_tail`` follows a stream,
``direct_get`` reads one, ``object_store`` keeps large values. Shells use these; pure cores never import them.
"""
