"""The tests: they mirror the folders."""

from infra.cli import import_structlog

# Otherwise structlog prints each traceback with all local variables, by rich: seconds, beside other tests.
import_structlog()
