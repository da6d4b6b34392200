"""Who asks, and what they may see: API keys and tenants. How much they may ask is decided in ``gateway.admission``."""
