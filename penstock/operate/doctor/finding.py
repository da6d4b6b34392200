"""What a check found."""

import enum

import msgspec


class Status(enum.StrEnum):
    ok = "ok"
    warning = "warning"  # it serves, but worse than it could
    problem = "problem"  # requests fail or wait
    skipped = "skipped"  # could not be checked here


class Finding(msgspec.Struct, frozen=True):
    """One result of one check.

    Attributes:
        check: its name, the same in every release.
        what: what is the case, in one line.
        fix: what to do; "" if nothing is wrong.
    """

    check: str
    status: Status
    what: str
    fix: str = ""


def ok(check: str, what: str) -> Finding:
    return Finding(check, Status.ok, what)


def warning(check: str, what: str, fix: str) -> Finding:
    return Finding(check, Status.warning, what, fix)


def problem(check: str, what: str, fix: str) -> Finding:
    return Finding(check, Status.problem, what, fix)


def skipped(check: str, what: str) -> Finding:
    return Finding(check, Status.skipped, what)
