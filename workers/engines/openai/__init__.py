"""A server with OpenAI's API (vLLM, SGLang, llama.cpp, Ollama, a hosted one), as one of our engines.

Start: ``penstock worker --engine openai --url http://HOST:8000 --model DIR``. DIR has the model's configuration and
tokenizer; no weights are read. Prompts go to ``/v1/completions``: as token ids where the server takes them and counts
tokens as our tokenizer does, else as text. Its answer comes as token ids where it sends them (``return_token_ids``),
else its text is tokenised here, piece by piece.

``protocol`` is pure: what is sent, and what becomes of answers. ``server`` talks to the server, and builds the engine.
"""

from penstock.workers.engines.openai.server import from_settings

__all__ = ["from_settings"]
