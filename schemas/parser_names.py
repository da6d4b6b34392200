"""Names that stand for no format in which models write reasoning and tool calls.

A worker registers the names of its own (``--reasoning-parser``, ``--tool-call-parser``), which are those of rows of
``penstock.infra.text.parsers.families``.
"""

NONE = "none"
AUTO = "auto"
