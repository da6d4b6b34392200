"""The chat and generate endpoints of Ollama: from a body to a chat, and from an answer to lines of JSON."""
