"""Blocks on their way between workers: who holds which for whom, until when, and the ledger of it.

The bulk moves through ``workers.kv_transfer``; what is said about it here are small messages.
"""
