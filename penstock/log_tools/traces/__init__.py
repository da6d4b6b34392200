"""OpenTelemetry traces, made from the log: no process of the pipeline sends spans.

Every stage stores messages with times anyway: the request, the router's decision, handoffs, the ledger of moved
blocks, the terminal event. ``spans`` makes spans of a request's timeline (pure), ``follow`` reads the streams,
``export`` sends spans by OTLP/HTTP. ``penstock inspect`` prints those of one request.
"""
