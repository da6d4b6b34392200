"""The Helm chart, and ``penstock kubernetes render``, which makes values for it."""
