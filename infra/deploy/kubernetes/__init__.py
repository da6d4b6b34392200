"""Kubernetes manifests of a deployment: plain YAML, no operator. ``penstock kubernetes render``."""
