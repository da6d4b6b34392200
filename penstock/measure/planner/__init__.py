"""How many workers a deployment needs: from its load, what its engines can do, and the latencies it promises."""
