"""Each process's connection to the broker, and the four ways in which Penstock uses it.

``connection`` opens it, ``publish`` gets acknowledgements, ``pull`` takes work, ``log`` follows a stream, and
``read`` looks things up in one. Shells use these; cores know nothing of them.
"""
