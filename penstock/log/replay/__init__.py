"""Exports the log to a file, imports it, and runs recorded requests again.

Pure: ``log_line`` (a message as a line of JSON), ``redaction``, ``recording`` (requests of a log, paired and
compared by ``comparison``), ``report``. Shells: ``export``, ``import_log``, ``replay``.
"""
