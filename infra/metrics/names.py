"""Names that Prometheus accepts, made from any text."""

import re

_METRIC = re.compile(r"[^a-zA-Z0-9_:]")
_LABEL = re.compile(r"[^a-zA-Z0-9_]")
RESERVED = ("le", "quantile")  # Prometheus sets them on buckets and summaries


def metric_name(text: str) -> str:
    """A metric name (``[a-zA-Z_:][a-zA-Z0-9_:]*``): other characters become underscores.

    Raises:
        ValueError: the text is empty.
    """
    return _begun(_METRIC.sub("_", text), text)


def label_name(text: str) -> str:
    """A label name (``[a-zA-Z_][a-zA-Z0-9_]*``): other characters become underscores, leading ones are merged.

    Raises:
        ValueError: the text is empty, or Prometheus sets this label itself.
    """
    name = re.sub(r"^__+", "_", _begun(_LABEL.sub("_", text), text))  # two leading ones are Prometheus' own
    if name in RESERVED:
        raise ValueError(f"the label name {name!r} is set by Prometheus; choose another")
    return name


def _begun(name: str, text: str) -> str:
    if not name:
        raise ValueError(f"{text!r} is not a name: it is empty")
    return f"_{name}" if name[0].isdigit() else name
