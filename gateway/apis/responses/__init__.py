"""The Responses API: from a body to a chat, and from an answer to items and events."""
