"""Which clients are run, each in which environment, and the features that are the table's columns."""

from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"

FEATURES = {
    "chat": "chat",
    "stream": "streaming",
    "tools": "tool calls",
    "forced": "forced calls",
    "schema": "JSON schema",
    "json": "JSON mode",
    "reasoning": "reasoning",
    "logprobs": "log-probabilities",
    "completions": "text completions",
    "responses": "Responses API",
    "messages": "Messages API",
    "media": "images and videos",
    "embeddings": "embeddings",
    "rerank": "rerank",
    "batches": "batches",
    "keys": "API keys",
    "models": "list of models",
    "errors": "typed errors",
}


class Client(NamedTuple):
    """``requirements``: a file of ``requirements/``; "": the packages of ``requirements/package.json``."""

    name: str
    title: str
    program: str
    requirements: str = ""


CLIENTS = (
    Client("openai", "`openai` (Python)", "openai_client.py", "openai.txt"),
    Client("openai-node", "`openai` (Node.js)", "openai_node.mjs"),
    Client("anthropic", "`anthropic` (Python)", "anthropic_client.py", "anthropic.txt"),
    Client("anthropic-node", "`@anthropic-ai/sdk` (Node.js)", "anthropic_node.mjs"),
    Client("ollama", "`ollama` (Python)", "ollama_client.py", "ollama.txt"),
    Client("cohere", "`cohere`", "cohere_client.py", "cohere.txt"),
    Client("litellm", "`litellm`", "litellm_client.py", "litellm.txt"),
    Client("litellm-proxy", "LiteLLM's proxy", "litellm_proxy.py", "litellm.txt"),
    Client("langchain", "`langchain-openai`", "langchain_client.py", "langchain.txt"),
    Client("pydantic-ai", "`pydantic-ai`", "pydantic_ai_client.py", "pydantic-ai.txt"),
    Client("instructor", "`instructor`", "instructor_client.py", "instructor.txt"),
    Client("llama-index", "`llama-index`", "llama_index_client.py", "llama-index.txt"),
    Client("ai-sdk", "Vercel's AI SDK", "ai_sdk.mjs"),
    Client("lm-eval", "`lm-eval`", "lm_eval_client.py", "lm-eval.txt"),
    Client("aiperf", "`aiperf`", "aiperf_client.py", "aiperf.txt"),
    Client("guidellm", "`guidellm`", "guidellm_client.py", "guidellm.txt"),
    Client("claude-code", "Claude Code, by its SDK", "claude_code.mjs"),
    Client("codex", "Codex", "codex.mjs"),
)
