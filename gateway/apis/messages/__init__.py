"""The Messages API of Anthropic: from a body to a chat, and from an answer to content blocks and events."""
