"""Requests whose worker was lost, hangs or is late: another one continues them."""
