"""Fields of ``vllm.AsyncEngineArgs`` that both 0.32.0 and 0.33.0 have, but those that begin with an underscore."""

from pathlib import Path

FIELDS = tuple(Path(__file__).with_suffix(".txt").read_text().split())
