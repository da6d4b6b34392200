"""One request as the log holds it: ``explain``, ``trace`` and ``leases`` read the same ``RequestTimeline``.

``request_timeline`` folds stored messages into typed ``events`` (pure), ``read`` fills one from a broker.
"""
