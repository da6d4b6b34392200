"""Stand-in for SGLang 0.5.23, as far as an adapter touches it. It computes with the stand-ins' Llama.

``tests/standins/sglang_signatures.json`` has the signatures of the real one, read from its source.
"""

from sglang.version import __version__

__all__ = ["__version__"]
