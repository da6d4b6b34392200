"""Moves blocks of KV cache or embeddings between the memory pools of two workers. See ``base`` for the interface."""
