"""A load generator for OpenAI-compatible servers: requests over keep-alive connections, closed or open loop."""
