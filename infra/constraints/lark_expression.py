"""A Lark grammar as one regular expression. Pure.

What a tool's text must match stands within a call, mostly as a JSON string: llguidance quotes regular expressions, but
not grammars. And one expression has no lexemes whose ends a lexer must guess: in JSON, where a line ends by ``\\n``, it
would take the backslash for the text before.

A rule that refers to itself only at the ends of its alternatives is a repetition. Any other is followed as often as the
expression stays small, ``NESTS`` times at most: what it matches is in the grammar, and nested less deeply.

The dialect is that of llguidance, whose expressions are those of Rust's ``regex``:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

MAX_CHARACTERS = 65_536  # of an expression, and of a grammar
MAX_DEPTH = 64  # of rules and groups within each other
NESTS = 8
MAX_NESTED_CHARACTERS = 16_384  # of an expression with nested rules: llguidance compiles it in about half a second
MAX_STEPS = 50_000  # for nested rules, some 0.1 s
COMMON: Mapping[str, str] = {  # of ``%import common``, as llguidance defines them
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
_PART = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*"i?)|(?P<comment>//[^\n]*|#[^\n]*)|(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)'
    r"|(?P<name>[!?]*[_a-zA-Z][_a-zA-Z0-9]*)|(?P<line>\s*\n\s*)|(?P<space>[ \t\r\f]+)"
    r"|(?P<times>~\s*\d+(?:\s*\.\.\s*\d+)?)|(?P<sign>->|\.\.|%[a-z]+|[:|()\[\]?*+,.])"
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})|(.))", re.S)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"}
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/\-#&~\"]")


class BadLark(ValueError):
    """It is not a Lark grammar; the text says where."""


class NotOneExpression(ValueError):
    """It is a grammar of another kind; the text says why."""


class Steps:
    """What is left of ``MAX_STEPS`` to the grammars of one request."""

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def take(self) -> None:
        """
        Raises:
            NotOneExpression: nothing is left.
        """
        self.left -= 1
        if self.left < 0:
            raise NotOneExpression(f"nested rules take more than {MAX_STEPS} steps")


class _Part(NamedTuple):
    kind: str
    text: str
    line: int


def expression(grammar: str, steps: Steps | None = None) -> str:
    """The expression that matches the same texts, unanchored, each ``/`` and line break in it escaped.

    Args:
        steps: shared with other grammars; None: it has all for itself.
    Raises:
        BadLark, NotOneExpression
    """
    if len(grammar) > MAX_CHARACTERS:
        raise NotOneExpression(f"it has {len(grammar)} characters; the limit is {MAX_CHARACTERS}")
    read = _Grammar(_parts(grammar), steps or Steps())
    return read.nested() if read.nests else read.expression()


def of_regex(pattern: str) -> str:
    """An expression as ``expression`` gives them."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2  # by the last backslash before it, itself not escaped
    return slashed(pattern if escaped else body)


def _parts(grammar: str) -> list[_Part]:
    found, at, line = [], 0, 1
    while at < len(grammar):
        match = _PART.match(grammar, at)
        if match is None:
            rest = grammar[at:].partition("\n")[0]
            if rest.startswith(("&", "~", "{", "<", "@", "-", "=")):
                raise NotOneExpression(f"line {line}: {rest[:40]!r} has no regular expression")
            raise BadLark(f"line {line}: {rest[:40]!r} is not Lark")
        kind, text = str(match.lastgroup), match.group()
        if kind not in ("comment", "space"):
            found.append(_Part(kind, text, line))
        line += text.count("\n")
        at = match.end()
    return found


class _Grammar:
    """Rules by name, as parts. ``ignored``: expressions of what may stand between lexemes."""

    def __init__(self, parts: list[_Part], steps: Steps) -> None:
        self._steps = steps
        self._rules: dict[str, list[_Part]] = {}
        self._ignored: list[list[_Part]] = []
        self._made: dict[
            str | tuple[str, ...], str | None
        ] = {}  # by name; of rules that lead to themselves, what is open
        self._open: list[str] = []  # rules that are being made
        self._between = ""
        self._depth = self._nest = 0
        self._most = MAX_CHARACTERS
        self._read(parts)
        self._rules = {name: rule if _lexical(name) else _repeated(name, rule) for name, rule in self._rules.items()}
        self.recursive = self._leading_to_themselves()
        if endless := [name for name in self.recursive if _lexical(name)]:
            raise BadLark(f"the terminal {min(endless)} refers to itself")
        used = {part.text for rule in self._ignored for part in rule} | {"start"}
        self.nests = not self.recursive.isdisjoint(used)

    def _leading_to_themselves(self) -> set[str]:
        """Rules that refer to themselves, and those that lead to one."""
        refers = {
            name: {part.text.lstrip("!?") for part in rule if part.kind == "name"} & self._rules.keys()
            for name, rule in self._rules.items()
        }
        users: dict[str, list[str]] = {}
        for name, used in refers.items():
            for each in used:
                users.setdefault(each, []).append(name)
        left = {name: len(used) for name, used in refers.items()}
        due = [name for name, count in left.items() if not count]
        while due:
            name = due.pop()
            del left[name]
            for user in users.get(name, ()):
                left[user] -= 1
                if not left[user]:
                    due.append(user)
        return left.keys() & self._rules.keys()

    def nested(self) -> str:
        """The expression with rules nested as deeply as its size allows."""
        made, self._most = "", MAX_NESTED_CHARACTERS
        for self._nest in range(1, NESTS + 1):
            try:
                made = self.expression()
            except NotOneExpression as error:
                if not made:
                    raise NotOneExpression(f"{min(self.recursive)} refers to itself: {error}") from None
                break
            self._depth = 0
        return made

    def expression(self) -> str:
        if "start" not in self._rules:
            raise BadLark("there is no rule 'start'")
        if self._ignored:
            choices = ""
            for each in self._ignored:
                if (ignored := self._alternatives(each, lexical=True)) is not None:
                    choices = self._bounded(f"{choices}|{ignored}")
            self._between = f"(?:{choices[1:]})*" if choices else ""
        made = self._named("start", 1)
        if made is None:
            raise BadLark("the rule start has no end: each alternative leads to itself")
        return made

    def _bounded(self, made: str, before: int = 0) -> str:
        """``before``: characters of other alternatives."""
        if before + len(made) > self._most:
            raise NotOneExpression(f"it takes more than {self._most} characters as a regular expression")
        return made

    def _read(self, parts: list[_Part]) -> None:
        for statement in _statements(parts):
            first = statement[0]
            if first.text == "%import":
                self._import(statement)
            elif first.text == "%ignore":
                self._ignored.append(statement[1:])
            elif first.text.startswith("%"):
                raise NotOneExpression(f"line {first.line}: {first.text} has no regular expression")
            elif first.kind == "name" and len(statement) > 1 and statement[1].text == ":":
                name = first.text.lstrip("!?")
                if name in self._rules:
                    raise BadLark(f"line {first.line}: {name} is defined twice")
                self._rules[name] = statement[2:]
            elif len(statement) > 1 and statement[1].text == "[":
                raise NotOneExpression(f"line {first.line}: options of rules have no regular expression")
            else:
                raise BadLark(f"line {first.line}: a rule begins with its name and a colon")

    def _import(self, statement: list[_Part]) -> None:
        names = [each.text for each in statement if each.kind == "name"]
        renamed = any(each.text == "->" for each in statement)
        if not names or names[0] != "common":
            raise NotOneExpression(f"line {statement[0].line}: only common can be imported")
        wanted = {names[2]: names[1]} if renamed and len(names) == 3 else {name: name for name in names[1:]}
        for name, own in wanted.items():
            if own not in COMMON:
                raise NotOneExpression(f"line {statement[0].line}: common has no {own}")
            self._made[name] = f"(?:{slashed(COMMON[own])})"

    def _named(self, name: str, line: int) -> str | None:
        """None: it is nested more deeply than this expression goes."""
        key = (name, str(self._nest), *sorted(self._open)) if name in self.recursive else name
        if key not in self._made:
            if name not in self._rules:
                raise BadLark(f"line {line}: {name} is not defined")
            if self._open.count(name) > self._nest:
                return None
            self._open.append(name)
            made = self._alternatives(self._rules[name], lexical=_lexical(name))
            self._open.pop()
            self._made[key] = None if made is None else f"(?:{made})"
        return self._made[key]

    def _alternatives(self, parts: list[_Part], *, lexical: bool) -> str | None:
        """
        Args:
            lexical: they are parts of one lexeme, within which nothing is ignored.
        """
        out, at = self._choice(parts, 0, lexical=lexical)
        if at < len(parts):
            raise BadLark(f"line {parts[at].line}: {parts[at].text!r} is not expected here")
        return out

    def _choice(self, parts: list[_Part], at: int, *, lexical: bool) -> tuple[str | None, int]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotOneExpression(f"rules and groups are nested more than {MAX_DEPTH} deep")
        ways: list[str] = []
        before = 0  # characters of ``ways``
        out: str | None = ""
        while at < len(parts) and parts[at].text not in (")", "]"):
            part = parts[at]
            if part.text == "|":
                if out is not None:
                    ways.append(out)
                    before += len(out) + 1
                out = ""
                at += 1
            elif part.text == "->":
                at += 2  # the name of a tree
            elif part.kind == "line":
                at += 1
            else:
                atom, at = self._atom(parts, at, lexical=lexical)
                if out is not None and atom is not None:
                    out += atom  # in place, unlike the sum as an argument
                    self._bounded(out, before)
                else:
                    out = None
        self._depth -= 1
        ways += [] if out is None else [out]
        return self._bounded("|".join(ways)) if ways else None, at

    def _atom(self, parts: list[_Part], at: int, *, lexical: bool) -> tuple[str | None, int]:
        if self._nest:
            self._steps.take()
        part = parts[at]
        atom: str | None
        at += 1
        single = False
        if part.text in ("(", "["):
            inner, at = self._choice(parts, at, lexical=lexical)
            if at >= len(parts):
                raise BadLark(f"line {part.line}: {part.text!r} is not closed")
            at += 1
            atom = None if inner is None else f"(?:{inner})"
            if part.text == "[":
                atom = f"{atom or ''}{'?' if atom else ''}"
        elif part.kind == "text":
            single = True
            atom = _literal(part)
            if at + 1 < len(parts) and parts[at].text == ".." and parts[at + 1].kind == "text":
                atom = f"[{_literal(part)}-{_literal(parts[at + 1])}]"
                at += 2
        elif part.kind == "regex":
            single = True
            atom = _regex(part)
        elif part.kind == "name":
            atom = self._named(part.text, part.line)
            single = _lexical(part.text)
        else:
            raise BadLark(f"line {part.line}: {part.text!r} is not expected here")
        if atom is None:
            if at < len(parts) and (parts[at].kind == "times" or parts[at].text in ("?", "*", "+")):
                times = _times(parts[at])
                return "" if times[0] in "?*" or times.startswith(("{0,", "{0}")) else None, at + 1
            return None, at
        if single and self._between and not lexical:
            atom = f"(?:{atom}{self._between})"
        if at < len(parts) and (parts[at].kind == "times" or parts[at].text in ("?", "*", "+")):
            atom = f"(?:{atom}){_times(parts[at])}"
            at += 1
        return atom, at


def _lexical(name: str) -> bool:
    """It is of a terminal, within which nothing is ignored."""
    return name.lstrip("_")[:1].isupper()


def _ways(parts: list[_Part]) -> Iterator[list[_Part]]:
    """The alternatives of a rule, without names of trees."""
    way: list[_Part] = []
    depth = skip = 0
    for part in parts:
        depth += (part.text in ("(", "[")) - (part.text in (")", "]"))
        if part.text == "|" and not depth:
            yield way
            way = []
        elif part.text == "->" and part.kind == "sign":
            skip = 1
        elif part.kind != "line":
            way += [] if skip else [part]
            skip = 0
    yield way


def _repeated(name: str, parts: list[_Part]) -> list[_Part]:
    """A rule without the references to itself with which alternatives begin or end, if it has no others.

    ``a: a x | z a | a m a | y`` matches ``z* y (x | m z* y)*``.
    """
    own = [part.kind == "name" and part.text.lstrip("!?") == name for part in parts]
    if not any(own):
        return parts
    first: list[list[_Part]] = []
    left: list[list[_Part]] = []
    right: list[list[_Part]] = []
    both: list[list[_Part]] = []
    for way in _ways(parts):
        inner = [part.kind == "name" and part.text.lstrip("!?") == name for part in way]
        begins, ends = bool(inner) and inner[0], len(inner) > 1 and inner[-1]
        kept = way[begins : len(way) - ends]
        if begins and (not kept or kept[0].kind == "times" or kept[0].text in ("?", "*", "+")):
            return parts
        if any(inner[begins : len(way) - ends]):
            return parts
        (both if begins and ends else left if begins else right if ends else first).append(kept)
    if not first:
        return parts
    line = parts[0].line

    def sign(text: str) -> _Part:
        return _Part("sign", text, line)

    def any_of(ways: list[list[_Part]], times: str = "") -> list[_Part]:
        inner = [part for way in ways for part in (sign("|"), *way)][1:]
        return [sign("("), *inner, sign(")"), *([sign(times)] if times else [])] if ways else []

    one = [*any_of(right, "*"), *any_of(first)]
    return [*one, *any_of([*left, *([[*any_of(both), *one]] if both else [])], "*")]


def _statements(parts: list[_Part]) -> list[list[_Part]]:
    """Of one rule or instruction each: a line break ends one, unless the next line begins with an alternative."""
    out: list[list[_Part]] = [[]]
    depth = 0
    for number, part in enumerate(parts):
        depth += (part.text in ("(", "[")) - (part.text in (")", "]"))
        following = parts[number + 1].text if number + 1 < len(parts) else ""
        if part.kind == "line" and depth == 0 and following not in ("|", "->"):
            out.append([])
        elif part.kind != "line":
            out[-1].append(part)
    return [each for each in out if each]


def _times(part: _Part) -> str:
    if part.kind != "times":
        return part.text
    least, _, most = part.text[1:].replace(" ", "").partition("..")
    return f"{{{least},{most}}}" if most else f"{{{least}}}"


def _literal(part: _Part) -> str:
    quoted, ignores_case = part.text.rstrip("i"), part.text.endswith("i")

    def unescaped(found: re.Match[str]) -> str:
        number = next((each for each in found.groups()[:4] if each is not None), None)
        if number is None:
            return _CONTROL.get(found[5], found[5])
        if (code := int(number, 16)) > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise BadLark(f"line {part.line}: {found[0]} is not a character")
        return chr(code)

    text = _SPECIAL.sub(lambda found: "\\" + found[0], _ESCAPE.sub(unescaped, quoted[1:-1]))
    text = "".join(f"\\x{ord(each):02x}" if ord(each) < 32 else each for each in text)
    return f"(?i:{text})" if ignores_case else text


def _regex(part: _Part) -> str:
    body, _, flags = part.text[1:].rpartition("/")
    if unknown := set(flags) - set("isu"):
        raise NotOneExpression(f"line {part.line}: the flag {min(unknown)!r} has no place in a part of an expression")
    kept = "".join(sorted(set(flags) - {"u"}))
    return f"(?{kept}:{of_regex(body)})"


def slashed(body: str) -> str:
    """An expression that can stand between slashes."""
    return re.sub(r"\\(.)|/|\n", lambda found: found[0] if found[1] else {"/": r"\/", "\n": r"\n"}[found[0]], body)
