"""Parsers of model output: reasoning, content, tool calls. Pure: pieces of text in, deltas of the OpenAI API out.

However the text is cut into pieces, the deltas add up to the same, so every gateway shows the same answer. Text that is
not a valid call becomes content; nothing is lost.
"""
