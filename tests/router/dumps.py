"""Loads dumps of workers' caches at once; a router does so in steps."""

from collections.abc import Sequence

from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas.kv import KvDump


def load_dump(index: PrefixIndex, pages: Sequence[KvDump]) -> bool:
    """Run ``index.loading`` to its end and return its result."""
    loading = index.loading(pages)
    try:
        while True:
            next(loading)
    except StopIteration as end:
        return bool(end.value)
