"""Autoscaling: how many workers a deployment needs, from its load, its engines and the latencies that it promises."""
