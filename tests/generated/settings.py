"""The page docs/settings.md, from the settings that the commands take."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from penstock.cli.commands import ARGV, COMMANDS, NOTHING
from penstock.configs.flags import Flag, flags_of, in_groups

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

NOUN: dict[object, str] = {bool: "on, off", int: "integer", float: "number", str: "text"}

INTRO = """\
# Settings

Every flag is also an environment variable: `--http-port` is `PENSTOCK_HTTP_PORT`. Those of `penstock gateway`, `router`
and `worker` that `penstock up` lacks reach its processes that way. `penstock up` also reads a YAML file, with keys
named as the flags (`http-port: 9000`): `penstock.yaml` in the working directory, or `--config FILE`. A flag wins over
its variable, and a variable over the file.

- A flag that is on or off has a negative form, `--no-NAME`. Its variable is `true` or `false`.
- Lists are written with commas. A repeated flag adds to its list.
- A wrong value ends the process with status 2. The message names the flag, the value and the limit.

Put secrets, such as a broker URL with a password, into the environment: other users can read command lines. Commands
that read or change a deployment find its broker by the first of these: `--nats-url`, `--data-dir`, `PENSTOCK_NATS_URL`
(with the namespace in `PENSTOCK_NAMESPACE`, and with `PENSTOCK_CELLS` and `PENSTOCK_CELL_NATS_URLS` where there are
[cells](cells.md#tools)), the folder `.penstock`. Where `--data-dir` of `penstock tenants` names a
folder on which no broker runs, `PENSTOCK_NATS_URL` is the broker, and the folder gets the credentials.

This page is generated from the code (`python -m tests.generated`). Commands that are not listed here have
arguments of their own: `penstock COMMAND --help`.
"""


def page() -> str:
    """The whole page, as the code has it."""
    return INTRO + "".join(
        section(name) for name, command in COMMANDS.items() if command.settings not in (ARGV, NOTHING)
    )


def section(name: str) -> str:
    """A command: what it does, and a table of its settings, or of each group of them."""
    module, _, struct = COMMANDS[name].settings.rpartition(":")
    kind = getattr(import_module(module or "penstock.configs.settings"), struct)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    about = COMMANDS[name].about
    text = f"\n## penstock {name}\n\n{about[0].upper()}{about[1:]}.\n\n"
    for number, (heading, flags) in enumerate(in_groups(kind, flags_of(kind)).items()):
        text += f"{chr(10) if number else ''}### {heading}\n\n" if heading else ""
        text += "| setting | value | default | meaning |\n|---|---|---|---|\n"
        text += "".join(row(flag, defaults[flag.field]) for flag in flags)
    return text


def row(flag: Flag, default: object) -> str:
    cells = (f"`{flag.name}`", values(flag), shown(default), flag.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def values(flag: Flag) -> str:
    """What a flag takes, with its limits."""
    if flag.choices:
        return " ".join(f"`{choice}`" for choice in flag.choices)
    if flag.is_list:
        item, *_ = get_args(flag.kind)
        if get_origin(item) is Literal:
            return "list of " + " ".join(f"`{choice}`" for choice in get_args(item))
        return f"list of {NOUN[get_args(item)[0] if get_origin(item) is Annotated else item]}s"
    return ", ".join([NOUN[flag.kind], *limits(flag.type)])


def limits(hint: Any) -> Iterator[str]:
    """``0 to 65535``, ``at least 1`` and the like, of an annotated number."""
    if get_origin(hint) is not Annotated:
        return
    for meta in hint.__metadata__:
        if meta.gt is not None:
            yield f"above {meta.gt}"
        if meta.ge is not None and meta.le is not None:
            yield f"{meta.ge} to {meta.le}"
        elif meta.ge is not None:
            yield f"at least {meta.ge}"
        elif meta.le is not None:
            yield f"at most {meta.le}"


def shown(default: object) -> str:
    """A default as it is written on the command line; a dash if there is none."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return f"`{default}`" if default not in ("", msgspec.NODEFAULT) else "–"
