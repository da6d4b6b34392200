"""Each process's connection to the broker, and the four ways in which Penstock uses it.

``connection`` opens it, ``publisher`` gets acknowledgements, ``puller`` takes work, ``log_tail`` follows a stream, and
``direct_get`` looks things up in one. Shells use these; cores know nothing of them.
"""
