"""The log as a file, and recorded requests run again.

Pure: ``record_line`` (a message as a line of JSON), ``redaction``, ``recording`` (requests of a log, paired and
compared by ``comparison``), ``report``. Shells: ``export``, ``import_log``, ``replay``.
"""
