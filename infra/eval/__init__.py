"""Evaluations of answers through a running deployment."""
