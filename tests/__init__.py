"""The tests: they mirror the folders."""

from functools import wraps
from typing import Any

from penstock.cli.commands import import_structlog

# Otherwise structlog prints each traceback with all local variables, by rich: seconds, beside other tests.
import_structlog()

import structlog  # noqa: E402 - only now, as a command does

_configure = structlog.configure


@wraps(_configure)
def _uncached(*args: Any, **options: Any) -> None:
    """A module's logger that was cached by a test would write to that test's output for good."""
    _configure(*args, **options | {"cache_logger_on_first_use": False})


structlog.configure = _uncached
