"""Limits of API keys, and so of their tenants: requests and tokens per minute, and requests at a time."""
