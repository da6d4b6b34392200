"""Profiles of engines: how prefill and decode perform alone, and which configuration meets given latencies."""
