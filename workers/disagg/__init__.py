"""Requests that pass from stage to stage: tickets, leases on blocks, embeddings, and the ledger of what was moved.

The bytes themselves are moved by ``penstock.workers.kv_transfer``.
"""
