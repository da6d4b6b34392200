"""Requests whose worker was lost, hangs or is late; messages that are published again before they are discarded."""
