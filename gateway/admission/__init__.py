"""Whether a request may come in now: limits of keys and tenants, queues, room in the streams, repeats, poison.

Who asks is known by then, from ``gateway.access``.
"""
