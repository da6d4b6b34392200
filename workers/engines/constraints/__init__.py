"""Structured output in a worker: grammars, compiled once (``compiler``), and the ``token_mask`` beside each sequence.

Requests bring constraints: ``infra.constraints`` makes grammars of them. Those of tool calls are made in
``gateway.grammars``.
"""
