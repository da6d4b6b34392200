"""Chaos: a real deployment under load while its processes are killed and stopped, then an audit of its log.

``python -m tests.chaos --minutes 10 --seed 1`` (or ``make chaos ARGS=...``). ``plan``, ``recipes``, ``seen`` and
``audit`` are pure; ``http``, ``clients``, ``system``, ``log`` and ``run`` are the shell around them. ``builds``
and ``mixed`` take some of the processes from another build.
"""
