"""Callers and their rights: API keys and tenants. Their limits are enforced in ``gateway.admission``."""
