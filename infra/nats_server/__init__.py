"""The server side of NATS: the embedded nats-server, its configuration and users, and the streams on any server.

Its clients are in ``penstock.infra.bus``.
"""
