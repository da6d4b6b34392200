"""Grammars of whole answers: reasoning, tool calls in the model's own format, and content.

What one JSON schema or pattern allows is in ``infra.constraints``; masks are made in ``workers.engines.constraints``.
"""
