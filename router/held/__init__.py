"""Requests that wait for a worker, and the order in which they are tried."""
