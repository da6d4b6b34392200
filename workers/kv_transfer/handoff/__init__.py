"""Handoff of blocks between workers: tickets, leases on blocks, and the ledger of what happened to them.

The blocks move through ``penstock.workers.kv_transfer``; the messages about them, here, are small.
"""
