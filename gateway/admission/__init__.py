"""Decides whether a request is accepted now: limits of keys and tenants, queues, room in streams, repeats, poison.

Who asks is known by then, from ``gateway.access``.
"""
