"""Decides whether a request is accepted now: limits of keys and tenants, queues, room in streams, repeats, poison.

``gateway.access`` has identified the caller before.
"""
