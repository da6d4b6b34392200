"""Structured output: constraints as grammars of llguidance, from JSON schemas and patterns, and whether they compile.

The options of a body become a constraint in ``gateway.apis.chat.constraint``, and the grammar of a whole answer with
tool calls in ``gateway.grammars``. Workers make token masks of both in ``workers.engines.constraints``.
"""
