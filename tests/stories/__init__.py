"""What an engineer on call asks, acted out on real deployments: ``python -m tests.stories``."""
