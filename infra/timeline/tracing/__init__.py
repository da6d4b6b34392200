"""OpenTelemetry traces as a fold of the log: no stage sends spans, whoever reads the log can tell them.

Every stage stores messages with times anyway: the request, the router's decision, hand-overs, the ledger of moved
blocks, the terminal event. ``journey`` gathers what they say of one request and makes spans of it (pure), ``follow``
reads the streams, ``export`` sends spans by OTLP/HTTP, ``show`` prints them.
"""
