"""One request as the log holds it: ``inspect``, ``trace`` and ``leases`` read the same ``RequestTimeline``.

``request_timeline`` folds stored messages into typed ``events`` (pure), ``read`` fills one from a broker.
"""
