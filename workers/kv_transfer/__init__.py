"""Moves blocks of KV cache or embeddings between the memory pools of two workers. See ``transport_protocol``.

Which request hands which blocks to whom is decided in ``penstock.workers.disagg``.
"""
