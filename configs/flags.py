"""Settings from the command line and the environment: a Struct's fields are the flags, their types the checks.

The field ``http_port`` is the flag ``--http-port`` and the variable ``PENSTOCK_HTTP_PORT``; flags win. A tuple is
written with commas, and a flag that is repeated adds to it; of any other repeated flag the last one holds. A wrong
value ends the process with status 2 and a message that names the flag, the value and the limit.
"""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

PREFIX = "PENSTOCK_"


class Flag(NamedTuple):
    """One field, as the command line sees it."""

    field: str
    type: Any  # with its limits, as msgspec takes it
    help: str
    choices: tuple[str, ...]  # empty: any
    kind: Any  # the bare type

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.field.upper()

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        if self.is_list:
            item = get_args(self.kind)[0]
            return "N,N" if getattr(item, "__origin__", item) is int else "A,B"
        return {int: "N", float: "X"}.get(self.kind, "TEXT")

    @property
    def is_list(self) -> bool:
        """Its values are comma-separated, and each repetition of the flag adds to them."""
        return get_origin(self.kind) is tuple


class BadValue(ValueError):
    """A value that its flag does not take."""


class BadFlags(ValueError):
    """A command line that cannot be used; the text names the flags."""


def flags_of(kind: type[msgspec.Struct]) -> list[Flag]:
    """The flags of a settings Struct, in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        bare, metas = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
        texts = [meta.description for meta in metas if isinstance(meta, msgspec.Meta) and meta.description]
        choices = tuple(get_args(bare)) if get_origin(bare) is Literal else ()
        found.append(Flag(field.name, hint, " ".join(texts), choices, bare))
    return found


def parse(
    kind: type[S], argv: Sequence[str], *, prog: str, about: str = "", environ: Mapping[str, str] | None = None
) -> S:
    """The settings that ``argv`` and the environment ask for.

    Raises:
        SystemExit: 0 after ``--help``, 2 for an unknown flag or a wrong value (told on stderr).
    """
    parser = _Parser(prog=prog, description=about or None, allow_abbrev=False)
    try:
        return _settled(kind, parser, argv, os.environ if environ is None else environ)
    except BadFlags as error:
        parser.exit(2, f"{prog}: {error}\n(see `{prog} --help`)\n")


def read(kind: type[S], argv: Sequence[str]) -> S:
    """The settings that flags give which another process will be started with.

    Raises:
        BadFlags: it would not start with them.
    """
    return _settled(kind, _Parser(add_help=False, allow_abbrev=False), argv, {})


def _settled(kind: type[S], parser: "_Parser", argv: Sequence[str], env: Mapping[str, str]) -> S:
    flags = flags_of(kind)
    defaults = {field.name: field for field in msgspec.structs.fields(kind)}
    for flag in flags:
        text = f"{flag.help} (default: {_shown(defaults[flag.field].default)})".strip().replace("%", "%%")
        if flag.kind is bool:
            parser.add_argument(
                flag.name, dest=flag.field, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            # A list may be written in one word, in several, or both: what was said first must not be lost.
            action = "append" if flag.is_list else "store"
            parser.add_argument(
                flag.name, dest=flag.field, metavar=flag.metavar, action=action, default=None, help=text
            )
    given = vars(parser.parse_args(argv))
    values = {}
    problems = []
    for flag in flags:
        value = given[flag.field]
        source = flag.name
        if flag.is_list and value is not None:
            value = ",".join(value)
        if value is None and flag.variable in env:
            value, source = env[flag.variable], flag.variable
        if value is None:
            continue
        try:
            values[flag.field] = convert(flag, value)
        except BadValue as error:
            problems.append(f"{source}: {error}")
    missing = [flag.name for flag in flags if flag.field not in values and defaults[flag.field].required]
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if problems:
        parser.error("\n  ".join(problems) if len(problems) == 1 else "\n  " + "\n  ".join(problems))
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:  # a Struct's own __post_init__
        parser.error(str(error))


def convert(flag: Flag, value: object) -> Any:
    """One value, text or already typed, as its field's type.

    Raises:
        BadValue: it is none; the text tells the value and what is allowed.
    """
    if flag.choices and value not in flag.choices:
        raise BadValue(f"{value!r} is not one of {', '.join(flag.choices)}")
    if flag.is_list and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, flag.type, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).split(" - at ")[0].replace("`", "")
        raise BadValue(f"{value!r} was given: {reason[0].lower()}{reason[1:]}") from None


def to_argv(settings: msgspec.Struct, *, hidden: Iterable[str] = ()) -> list[str]:
    """Flags that give these settings again; fields in ``hidden`` (secrets) are left to the environment."""
    argv = []
    skipped = set(hidden)
    defaults = {field.name: field.default for field in msgspec.structs.fields(type(settings))}
    for flag in flags_of(type(settings)):
        value = getattr(settings, flag.field)
        if flag.field in skipped or value == defaults[flag.field]:
            continue
        if flag.kind is bool:
            argv.append(flag.name if value else flag.name.replace("--", "--no-", 1))
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            argv.append(f"{flag.name}={text}")  # one word: the value may begin with a dash
    return argv


def to_environ(settings: msgspec.Struct, fields: Iterable[str]) -> dict[str, str]:
    """The variables that give these fields again: for secrets, which do not belong on a command line."""
    return {PREFIX + name.upper(): str(getattr(settings, name)) for name in fields}


def _shown(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return "none, required"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return str(default) if default != "" else "none"


class _Parser(argparse.ArgumentParser):
    """Errors without the usage text, which would hide them."""

    def error(self, message: str) -> NoReturn:
        raise BadFlags(message)
