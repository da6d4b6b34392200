"""One request as the log has it: a ``RequestTimeline``, which ``penstock inspect`` shows and traces are made of.

``request_timeline`` folds stored messages into typed ``events`` (pure), ``read`` fills one from a broker.
"""
