"""``penstock completion``: shell completion of commands, flags and their values, generated from the settings."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.cli.commands import ARGV, COMMANDS, NOTHING, is_here, load
from penstock.configs.flags import Flag, Parser, flags_of

HOW = """\
bash:  eval "$(penstock completion bash)"      in ~/.bashrc
zsh:   eval "$(penstock completion zsh)"       in ~/.zshrc, after compinit
fish:  penstock completion fish > ~/.config/fish/completions/penstock.fish
"""


class Completed(NamedTuple):
    """A command of one or two words, its flags, and what its first argument may be."""

    words: tuple[str, ...]
    about: str
    flags: tuple[Flag, ...]
    choices: tuple[str, ...] = ()


def run(argv: Sequence[str]) -> int:
    """Print the script for a shell."""
    parser = Parser(
        prog="penstock completion",
        description="print a script for shell completion",
        epilog=HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=sorted(SHELLS))
    print(SHELLS[parser.parse_args(argv).shell](completed()), end="")
    return 0


def completed() -> list[Completed]:
    """All commands that are here; those that read their arguments themselves have no flags."""
    candidates = []
    for name, command in COMMANDS.items():
        if not is_here(command):
            continue
        flags: Sequence[Flag] = ()
        if command.settings not in (ARGV, NOTHING):
            path = command.settings if ":" in command.settings else f"penstock.configs.settings:{command.settings}"
            flags = flags_of(load(path))
        candidates.append(Completed(tuple(name.split()), command.about, tuple(flags), command.choices))
    return candidates


def bash(commands: Sequence[Completed]) -> str:
    cases, values = [], []
    for command in commands:
        name = " ".join(command.words)
        cases.append(f'        "{name}") words="{" ".join(_names(command.flags))}" ;;')
        values += [f'        "{name} {f.name}") words="{" ".join(_values(f))}" ;;' for f in command.flags if _values(f)]
    nexts = _groups(commands) | {command.words[0]: command.choices for command in commands if command.choices}
    groups = [f'        "{first}") words="{" ".join(seconds)}" ;;' for first, seconds in nexts.items()]
    firsts = " ".join(dict.fromkeys(command.words[0] for command in commands))
    return f"""\
_penstock() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" name="${{COMP_WORDS[1]}}" words=""
    # bash takes "=" for a word of its own
    if [ "$cur" = "=" ]; then cur=""; elif [ "$prev" = "=" ]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    case "$name" in
        {"|".join(_groups(commands))}) [[ "${{COMP_WORDS[2]}}" == -* ]] || name="$name ${{COMP_WORDS[2]}}" ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{firsts}"
    elif [ "$COMP_CWORD" -eq 2 ] && [[ "$cur" != -* && " {" ".join(nexts)} " == *" ${{COMP_WORDS[1]}} "* ]]; then
        case "${{COMP_WORDS[1]}}" in
{_lines(groups)}
        esac
    else
        case "$name $prev" in
{_lines(values)}
        *) case "$cur" in -*) case "$name" in
{_lines(cases)}
        esac ;; esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _penstock penstock
"""


def zsh(commands: Sequence[Completed]) -> str:
    groups = _groups(commands)
    about = {command.words[0]: command.about for command in commands if len(command.words) == 1}
    firsts = [_zsh_item(first, about.get(first, ", ".join(groups.get(first, ())))) for first in _firsts(commands)]
    cases = []
    for first in _firsts(commands):
        seconds = [command for command in commands if command.words[0] == first and len(command.words) == 2]
        if not seconds:
            group = next(command for command in commands if command.words == (first,))
            choices = f"_arguments '1:{first}:({' '.join(group.choices)})' '*: :_files'"
            cases.append(f"    {first}) {choices if group.choices else _zsh_arguments(group.flags)} ;;")
            continue
        items = " ".join(_zsh_item(command.words[1], command.about) for command in seconds)
        inner = "\n".join(f"      {command.words[1]}) {_zsh_arguments(command.flags)} ;;" for command in seconds)
        alone = next((command for command in commands if command.words == (first,)), None)
        if alone is not None:  # `penstock plan --flag` beside `penstock plan simulate`
            inner += f"\n      *) (( CURRENT++ )); words=({first} $words); {_zsh_arguments(alone.flags)} ;;"
        cases.append(
            f"    {first}) if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then commands=({items}); "
            "_describe command commands; return; fi\n"
            f"      shift words; (( CURRENT-- )); case $words[1] in\n{inner}\n      esac ;;"
        )
    return f"""\
#compdef penstock
_penstock() {{
  local -a commands
  if (( CURRENT == 2 )); then commands=({" ".join(firsts)}); _describe command commands; return; fi
  shift words; (( CURRENT-- ))
  case $words[1] in
{_lines(cases)}
  esac
}}
if [ "$funcstack[1]" = "_penstock" ]; then _penstock "$@"; else compdef _penstock penstock; fi
"""


def fish(commands: Sequence[Completed]) -> str:
    lines = ["complete -c penstock -n __fish_use_subcommand -f"]
    groups = _groups(commands)
    about = {command.words[0]: command.about for command in commands if len(command.words) == 1}
    for first in _firsts(commands):
        text = about.get(first, ", ".join(groups.get(first, ())))
        lines.append(f"complete -c penstock -n __fish_use_subcommand -fa {first} -d {_quote(text)}")
    for command in commands:
        seen = " ; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
        if len(command.words) == 2:
            first, second = command.words
            others = " ".join(groups[first])
            lines.append(
                f"complete -c penstock -n '__fish_seen_subcommand_from {first} ; and not __fish_seen_subcommand_from "
                f"{others}' -fa {second} -d {_quote(command.about)}"
            )
        if command.choices:
            unseen = f"not __fish_seen_subcommand_from {' '.join(command.choices)}"
            lines.append(f"complete -c penstock -n '{seen} ; and {unseen}' -fa {_quote(' '.join(command.choices))}")
        for flag in command.flags:
            takes = "" if flag.kind is bool else f" -xa {_quote(' '.join(_values(flag)))}" if _values(flag) else " -r"
            for name in _names([flag]):
                lines.append(f"complete -c penstock -n '{seen}' -l {name[2:]}{takes} -d {_quote(flag.help)}")
    return "\n".join(lines) + "\n"


SHELLS: Mapping[str, Callable[[Sequence[Completed]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _firsts(commands: Sequence[Completed]) -> list[str]:
    return list(dict.fromkeys(command.words[0] for command in commands))


def _groups(commands: Sequence[Completed]) -> dict[str, list[str]]:
    """The second words of first words that have any."""
    groups: dict[str, list[str]] = {}
    for command in commands:
        if len(command.words) == 2:
            groups.setdefault(command.words[0], []).append(command.words[1])
    return groups


def _names(flags: Sequence[Flag]) -> list[str]:
    return [
        name for flag in flags for name in ([flag.name, f"--no-{flag.name[2:]}"] if flag.kind is bool else [flag.name])
    ]


def _values(flag: Flag) -> tuple[str, ...]:
    return flag.choices


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(lines)


def _quote(text: str) -> str:
    """In single quotes, for any of the shells."""
    return "'" + text.replace("\\", "").replace("'", "’") + "'"


def _zsh_item(word: str, about: str) -> str:
    return _quote(f"{word}:{about}")


def _zsh_arguments(flags: Sequence[Flag]) -> str:
    if not flags:
        return "_files"
    specs = []
    for flag in flags:
        text = flag.help.replace("[", "(").replace("]", ")").replace(":", "\\:")
        for name in _names([flag]):
            if flag.kind is bool:
                specs.append(_quote(f"{name}[{text}]"))
            else:
                action = f"({' '.join(_values(flag))})" if _values(flag) else "_files"
                specs.append(_quote(f"{name}=[{text}]:{flag.metavar if not _values(flag) else 'value'}:{action}"))
    return "_arguments " + " ".join(specs)
