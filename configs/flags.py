"""Settings from the command line, the environment and a file: a Struct's fields are the flags, their types the checks.

The field ``http_port`` is the flag ``--http-port``, the variable ``PENSTOCK_HTTP_PORT`` and, in a Struct that has a
field ``config``, the key ``http-port`` of a YAML file. Flags win over variables, and variables over the file. A tuple
is written with commas, and repeating its flag adds to it; of any other repeated flag the last one counts. A wrong
value ends the process with status 2 and a message that names the flag, the value and the limit.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

PREFIX = "PENSTOCK_"

OTHERS = (  # variables that are not settings
    "IMAGE",
    "GPU_IMAGE",
    "NATIVE_IMAGE",
    "STATE_DIR",
    "VLLM_PLUGIN",
    "SGLANG_PLUGIN",
    "CONTRACT_REAL",
    "CONTRACT_BOUND_S",
    "CLUSTER",
    *("NATS_CA", "NATS_CERT", "NATS_KEY", "NATS_CREDS", "NATS_NKEY"),  # infra/bus/connection.py
    *("SYS_NATS_CERT", "SYS_NATS_KEY", "SYS_NATS_CREDS", "SYS_NATS_NKEY"),
)

_SEVERAL_WORDS = ("served_model_name",)
_OF_OTHER_SERVERS = {  # flags of vLLM and SGLang, and the field that is most like each, where its name is too different
    "host": "http_host",
    "port": "http_port",
    "model_path": "model",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "context_length": "max_model_len",
    "max_num_seqs": "max_running",
    "max_running_requests": "max_running",
    "max_num_batched_tokens": "max_batched_tokens",
    "chunked_prefill_size": "max_batched_tokens",
    "kv_cache_dtype": "kv_dtype",
    "gpu_memory_utilization": "kv_memory_fraction",
    "mem_fraction_static": "kv_memory_fraction",
    "enable_prefix_caching": "prefix_cache",
    "enable_lora": "lora",
    "lora_modules": "lora",
    "lora_paths": "lora",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    "allowed_origins": "cors_origins",
}
_LIMITS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_METAVARS = {"_s": "SECONDS", "_bytes": "BYTES", "_port": "PORT", "_url": "URL", "_host": "HOST", "_dir": "FOLDER"}


class Flag(NamedTuple):
    """One field, as the command line sees it."""

    field: str
    type: Any  # with its limits, as msgspec takes it
    help: str
    choices: tuple[str, ...]  # empty: any
    kind: Any  # the bare type
    origin: Any  # the Struct whose field it is in the first place

    @property
    def name(self) -> str:
        return flag_name(self.field)

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
        for ending, shown in _METAVARS.items():
            if self.field.endswith(ending):
                return shown
        return {int: "N", float: "X"}.get(self.kind, "TEXT")

    @property
    def is_list(self) -> bool:
        """Its values are comma-separated, and each repetition of the flag adds to them."""
        return get_origin(self.kind) is tuple


class BadValue(ValueError):
    """A value that its flag does not take."""


class BadFlags(ValueError):
    """A command line that cannot be used; the text names the flags."""


class BadSettings(ValueError):
    """Flags that are missing, or that fit neither each other nor the deployment; a command raises it."""


@functools.cache
def flags_of(kind: type[msgspec.Struct]) -> tuple[Flag, ...]:
    """The flags of a settings Struct, in the order of its fields."""
    from penstock.configs.settings import SameAs  # commands without settings use this module, too

    hints = get_type_hints(kind, include_extras=True)
    flags = []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        bare, metas = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
        same = next((meta for meta in metas if isinstance(meta, SameAs)), None)
        if same is not None:
            flags.append(next(flag for flag in flags_of(same.kind) if flag.field == field.name))
            continue
        texts = [meta.description for meta in metas if isinstance(meta, msgspec.Meta) and meta.description]
        choices = tuple(get_args(bare)) if get_origin(bare) is Literal else ()
        flags.append(Flag(field.name, hint, " ".join(texts), choices, bare, kind))
    return tuple(flags)


def in_groups(kind: type[msgspec.Struct], flags: Sequence[Flag]) -> dict[str, list[Flag]]:
    """Flags by the heading that they have in help and docs, in the order of ``HELP`` of their Struct.

    ``HELP`` has fields, or Structs whose fields they are in the first place, by heading. What it does not name comes
    last. A Struct without it has one group, with the heading "".
    """
    headings: Mapping[str, Sequence[Any]] = getattr(kind, "HELP", {})
    named = {each: heading for heading, members in headings.items() for each in members}
    last = "Others" if headings else ""
    groups: dict[str, list[Flag]] = {heading: [] for heading in (*headings, last)}
    for flag in flags:
        groups[named.get(flag.field) or named.get(flag.origin) or last].append(flag)
    for heading, members in headings.items():
        groups[heading].sort(key=lambda flag: members.index(flag.field) if flag.field in members else len(members))
    return {heading: members for heading, members in groups.items() if members}


def parse(
    kind: type[S], argv: Sequence[str], *, prog: str, about: str = "", environ: Mapping[str, str] | None = None
) -> S:
    """The settings that ``argv``, the environment and a configuration file ask for.

    Raises:
        SystemExit: 0 after ``--help``, 2 for an unknown flag or a wrong value, explained on stderr.
    """
    parser = _SettingsParser(prog=prog, usage=f"{prog} [FLAGS]", description=about or None)
    parser.passed_on = getattr(kind, "PASSED_ON", {})
    try:
        return _settled(kind, parser, argv, os.environ if environ is None else environ)
    except BadFlags as error:
        parser.exit(2, f"{prog}: {error}\n(see `{prog} --help`)\n")


def read(kind: type[S], argv: Sequence[str]) -> S:
    """The settings in the flags of a process that is to be started.

    Raises:
        BadFlags: the process would refuse them.
    """
    return _settled(kind, _SettingsParser(add_help=False), argv, {})


def _settled(kind: type[S], parser: "Parser", argv: Sequence[str], env: Mapping[str, str]) -> S:
    flags = flags_of(kind)
    defaults = {field.name: field for field in msgspec.structs.fields(kind)}
    for heading, members in in_groups(kind, flags).items():
        group = parser.add_argument_group(heading) if heading else parser
        for flag in members:
            _add(group, flag, defaults[flag.field].default)
    parsed = vars(parser.parse_args(argv))
    problems: list[str] = []
    file: dict[str, tuple[object, str]] = {}
    if "config" in defaults:
        file = _from_file(parsed["config"] or env.get(PREFIX + "CONFIG", ""), flags, problems)
    values = {}
    for flag in flags:
        value, source = parsed[flag.field], flag.name
        if flag.field == "nats_url" and getattr(kind, "FOLDER_NAMES_BROKER", False) and parsed["data_dir"] is not None:
            env = {name: text for name, text in env.items() if name != flag.variable}
        if flag.is_list and value is not None:
            value = ",".join(value)
        if value is None and (text := env.get(flag.variable)) is not None and not is_of_a_service(flag.variable, text):
            value, source = text, flag.variable
        if value is None and flag.field in file:
            value, source = file[flag.field]
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


def unknown_variables(environ: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Variables that look like settings and are none: the most similar setting's variable, or "".

    Args:
        known: fields of all settings: processes of several roles share an environment.
    """
    settings = {field.upper() for field in known}
    names = settings | {*OTHERS}
    unknown = {}
    for variable, value in environ.items():
        name = variable.removeprefix(PREFIX)
        if name != variable and name not in names and not is_of_a_service(variable, value):
            near = closest(name, settings)
            unknown[variable] = PREFIX + near if near else ""
    return unknown


def is_of_a_service(name: str, value: str) -> bool:
    """Kubernetes sets variables that are named after each service: of one called penstock-http, PENSTOCK_HTTP_PORT."""
    return bool(re.search(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_", name)) or value.startswith(("tcp://", "udp://"))


def _add(parser: argparse._ActionsContainer, flag: Flag, default: object) -> None:
    text = flag.help if "default: " in flag.help and not default else f"{flag.help} (default: {_shown(default)})"
    text = text.strip().replace("%", "%%")
    if flag.kind is bool:
        parser.add_argument(flag.name, dest=flag.field, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        # A list may be written in one word, in several, or both: earlier words must not be lost.
        action: str | type[argparse.Action] = "append" if flag.is_list else "store"
        several: dict[str, Any] = {}
        if flag.field in _SEVERAL_WORDS:
            action, several = _Words, {"nargs": "+"}
        parser.add_argument(
            flag.name, dest=flag.field, metavar=flag.metavar, action=action, default=None, help=text, **several
        )


class _Words(argparse.Action):
    """The words after a flag as one value, with commas: as other servers take several names."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, ",".join(values))


def _from_file(path: str, flags: Sequence[Flag], problems: list[str]) -> dict[str, tuple[object, str]]:
    """Read a YAML file: for each field its value and its place in the file. Errors are added to ``problems``.

    Args:
        path: "": ``penstock.yaml`` in the working directory, if there is one.
    """
    import yaml  # late: only a process that may have such a file pays for it

    from penstock.configs.settings import CONFIG_FILE

    file = Path(path or CONFIG_FILE)
    if not path and not file.is_file():
        return {}
    try:
        root = yaml.compose(text := file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{file}: {getattr(error, 'strerror', None) or error}")
        return {}
    except yaml.YAMLError as error:
        problems.append(f"{file}: not valid YAML: {' '.join(str(error).split())}")
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict):
        problems.append(f"{file}: expected settings such as `http-port: 8000`, one a line")
        return {}
    fields = {flag.field: flag for flag in flags if flag.field != "config"}
    lines: dict[str, int] = {}
    for key, _ in root.value:
        field, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if field in lines:  # YAML's readers take the last one silently
            problems.append(f"{file}: {key.value} is given twice, in lines {lines[field]} and {line}")
        lines[field] = line
    values: dict[str, tuple[object, str]] = {}
    for key, value in content.items():
        field = str(key).replace("-", "_")
        if field not in fields:
            flag_names = [name.replace("_", "-") for name in fields]
            problems.append(f"{file}: unknown setting {key}{_hint(field, flag_names, '')}")
        elif value is not None:
            values[field] = (value, f"{file}: {key}")
    return values


def convert(flag: Flag, value: object) -> Any:
    """One value, text or already typed, as its field's type.

    Raises:
        BadValue: it is not allowed; the text names the value and what is allowed.
    """
    if flag.choices and value not in flag.choices:
        raise BadValue(_not_one_of(value, flag.choices))
    if flag.is_list and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
        item = get_args(flag.kind)[0]
        choices = get_args(item) if get_origin(item) is Literal else ()
        if wrong := [part for part in value if choices and part not in choices]:
            raise BadValue(_not_one_of(wrong[0], choices))
    if flag.kind is str and type(value) is int:  # as a file has it: `gateways: 2`
        value = str(value)
    try:
        return msgspec.convert(value, flag.type, strict=False)
    except msgspec.ValidationError as error:
        raise BadValue(_reason(flag, value, str(error))) from None


def _not_one_of(value: object, choices: Sequence[str]) -> str:
    near = closest(str(value), choices)
    return f"{value!r} is not one of {', '.join(choices)}" + (f": did you mean {near}?" if near else "")


def _reason(flag: Flag, value: object, error: str) -> str:
    """msgspec's error about a value, in terms of the command line."""
    if isinstance(value, list) and (at := re.search(r"\$\[(\d+)\]", error)):
        value = value[int(at[1])]
    if limit := re.search(r"Expected `(?:int|float)` (<=|>=|<|>) (\S+)", error):
        return f"must be {_LIMITS[limit[1]]} {limit[2]}, not {value}"
    if "matching regex" in error:
        titles = [meta.title for meta in flag.type.__metadata__ if isinstance(meta, msgspec.Meta) and meta.title]
        return f"{value!r} is not {titles[0] if titles else 'of the expected form'}"
    if kind := re.search(r"Expected `(int|float|bool)`", error):
        return f"{value!r} is not {_KINDS[kind[1]]}"
    reason = error.split(" - at ")[0].replace("`", "")
    return f"{value!r}: {reason[0].lower()}{reason[1:]}"


def to_argv(settings: msgspec.Struct, *, hidden: Iterable[str] = ()) -> list[str]:
    """Flags that reproduce these settings; fields in ``hidden`` (secrets) are left to the environment."""
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
    """Environment variables that reproduce these fields: for secrets, which do not belong on a command line."""
    values = {name: getattr(settings, name) for name in fields}
    return {
        PREFIX + name.upper(): ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in values.items()
    }


def _shown(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return "none, required"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return str(default) if default != "" else "none"


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def closest(word: str, candidates: Iterable[str]) -> str:
    """The known word closest to a mistyped one; "": none is close."""
    return next(iter(get_close_matches(word, list(candidates), n=1, cutoff=0.6)), "")


def _hint(field: str, names: Iterable[str], prefix: str) -> str:
    """The end of a message about an unknown name: the most similar one."""
    near = closest(field.replace("_", "-"), names)
    return f": did you mean {prefix}{near}?" if near else ""


class _Folder(str):
    """A data folder that no flag named."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated flags, and with one-line errors that suggest the most similar flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unparsed = self.parse_known_args(args, namespace)
        if unparsed:
            self.error("; ".join(self._unknown(unparsed)))
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unparsed = super().parse_known_args(args, namespace)
        if isinstance(getattr(parsed, "data_dir", None), _Folder) and not parsed.nats_url:
            parsed.nats_url = os.environ.get(PREFIX + "NATS_URL", "")
            if parsed.nats_url and hasattr(parsed, "namespace"):
                parsed.namespace = parsed.namespace or os.environ.get(PREFIX + "NAMESPACE", "")
            if parsed.nats_url and hasattr(parsed, "cells"):
                parsed.cells = parsed.cells or self._cells(os.environ.get(PREFIX + "CELLS", ""))
                parsed.cell_nats_urls = parsed.cell_nats_urls or os.environ.get(PREFIX + "CELL_NATS_URLS", "")
        return parsed, unparsed

    def _cells(self, text: str) -> int:
        try:
            return whole_number()(text) if text else 0
        except argparse.ArgumentTypeError as error:
            self.error(f"{PREFIX}CELLS: {error}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_plain(message)}\n(see `{self.prog} --help`)\n")

    def _unknown(self, arguments: Sequence[str]) -> list[str]:
        flags = [word.partition("=")[0] for word in arguments if word.startswith("-") and word not in ("-", "--")]
        if not flags:  # else the other words are probably their values
            return [f"unexpected argument {arguments[0]!r}"]
        names = [name.removeprefix("--") for name in self._flags()]
        return [self._unknown_flag(flag, names) for flag in flags]

    def _unknown_flag(self, flag: str, names: Sequence[str]) -> str:
        if owners := [f"`{one.prog}`" for one in self._verbs() if flag in one._flags()]:
            return f"unknown flag {flag} here: it is of {', '.join(owners)}"
        return f"unknown flag {flag}{_hint(flag.removeprefix('--').replace('-', '_'), names, '--')}"

    def _flags(self) -> list[str]:
        """Long flags, those of sub-commands included."""
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        for one in self._verbs():
            flags += one._flags()
        return flags

    def _verbs(self) -> "list[Parser]":
        """The parsers of sub-commands."""
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [one for action in actions for one in action.choices.values()]


def add_broker_flags(
    parser: argparse.ArgumentParser,
    *,
    folder: str,
    broker: str,
    default: str = ".penstock",
    namespace: str = "the data folder's, else ps",
    cells: bool = False,
) -> None:
    """``--data-dir`` and ``--nats-url``, either of which says where a deployment's broker is, and ``--namespace``.

    A URL goes before a folder. If neither flag is given, ``nats_url`` is ``PENSTOCK_NATS_URL``, ``namespace``
    ``PENSTOCK_NAMESPACE``, and so on: a URL holds a password, and other users can read command lines. ``--cells`` and
    ``--cell-nats-urls`` are for brokers that a URL names: a folder says by itself which cells its deployment has.

    Args:
        parser: a ``Parser``, of a command or of its verb.
        folder, broker: the flags' help, without the default.
        default: the folder where neither is given.
        namespace: the namespace where none is given, in words.
        cells: with the flags of deployments that have several.
    """
    about_folder = folder + (" (default: %(default)s)" if default else "")
    parser.add_argument("--data-dir", default=_Folder(default), metavar="FOLDER", help=about_folder)
    about_broker = f"{broker}; default: {PREFIX}NATS_URL, unless --data-dir is given"
    parser.add_argument("--nats-url", default="", metavar="URL", help=about_broker)
    about_namespace = f"prefix of all subjects; default: {namespace}"
    parser.add_argument("--namespace", default="", metavar="TEXT", help=about_namespace)
    if not cells:
        return
    about_cells = "cells of the deployment; default: as the data folder says, else 1"
    parser.add_argument("--cells", type=whole_number(), default=0, metavar="N", help=about_cells)
    about_urls = "brokers of the cells after the first, as the gateway's flag; default: that of the first"
    parser.add_argument("--cell-nats-urls", default="", metavar="URL,...", help=about_urls)


def whole_number(most: int = sys.maxsize) -> Callable[[str], int]:
    """The type of an argument that is a whole number from 1 to ``most``."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= most:
            limits = "above 0" if most == sys.maxsize else f"from 1 to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
        return int(text)

    return read


def or_none(number: Callable[[str], int]) -> Callable[[str], int]:
    """The type of an argument that is a limit; "none" is 0, which stands for no limit."""
    return lambda text: 0 if text == "none" else number(text)


class _SettingsParser(Parser):
    """Raises, so that all problems are reported together.

    Attributes:
        passed_on: fields of the commands that this one runs, which take them from the environment.
    """

    passed_on: Mapping[str, frozenset[str]] = {}

    def _unknown_flag(self, flag: str, names: Sequence[str]) -> str:
        field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if owners := [f"`penstock {name}`" for name, fields in self.passed_on.items() if field in fields]:
            return f"unknown flag {flag} here: it is of {', '.join(owners)}; set {PREFIX}{field.upper()} instead"
        message = super()._unknown_flag(flag, names)
        near = _OF_OTHER_SERVERS.get(field, "")
        if flag_name(near)[2:] in names:
            message = f"unknown flag {flag}: did you mean {flag_name(near)}?"
        elif any(near in fields for fields in self.passed_on.values()):
            message = f"unknown flag {flag}: did you mean {PREFIX}{near.upper()}, a variable?"
        if "override-engine-args" in names and "did you mean" not in message:
            message += f"; if it is of the engine: --override-engine-args '{{\"{field}\": VALUE}}'"
        return message

    def _unknown(self, arguments: Sequence[str]) -> list[str]:
        messages = super()._unknown(arguments)
        if messages[0].startswith("unexpected") and "--model" in self._flags():
            messages[0] += f": did you mean --model {arguments[0]}?"
        return messages

    def error(self, message: str) -> NoReturn:
        raise BadFlags(_plain(message))


def _plain(message: str) -> str:
    """An error of argparse in our words."""
    if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"missing: {re.sub(r'{(.*)}', lambda choice: 'one of ' + choice[1].replace(',', ', '), missing[1])}"
    if alone := re.fullmatch(r"argument (\S+): expected (?:one|at least one) argument", message):
        return f"{alone[1]} needs a value"
    if match := re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message):
        where = f"{match[1]}: " if match[1].startswith("-") else ""
        return where + _not_one_of(match[2], match[3].replace("'", "").split(", "))
    return re.sub(r"^argument (\S+): ", r"\1: ", message)
