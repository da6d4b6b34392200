"""Grammars of whole answers: reasoning, tool calls in the model's own format, and content."""
