"""An expression matches what llguidance's own compiler of Lark accepts, alone and quoted as JSON."""

import json
import random
import tracemalloc
from typing import Any

import pytest

from penstock.infra.constraints.constraint_grammar import (
    JSON_SCHEMA,
    LARK,
    ConstraintError,
    byte_tokenizer,
    check,
    compiled,
)
from penstock.infra.constraints.lark_expression import (
    COMMON,
    MAX_NESTED_CHARACTERS,
    BadLark,
    NotOneExpression,
    expression,
    of_regex,
)
from penstock.schemas.requests import Constraint

# Of an agent that edits files, as it sends it with every request.
PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
GRAMMARS = (
    PATCH,
    'start: "a/b" // the first\n     | /[x-z]+\\/"/i\n',
    'start: A ~ 2..3 b?\nA: "0".."4" | "\\\\"\nb: ["q"] "\\n"\n',
    'start: pair ("," pair)*\npair: NAME "=" INT\nNAME: /[a-c]{1,3}/\n%import common (INT, LF)\n%ignore " "\n',
    "start: W\n%import common.WS -> W\n",
    '?start: (x | "é\\u0041")+\n!x: "-"i\n',
    'start: e\n?e: e "+" e -> add | "-" e | e "!" | "x" ["y"] | "(" "z" ")"\n',
    'start: list\nlist: /[ab]/ | list "," /[ab]/ | list ";"\n%ignore " "\n',
)
NESTED = {  # texts that are nested two deep
    'start: "(" start ")" | "x"': ["x", "((x))"],
    'start: e\ne: t (("+" | "-") t)*\nt: INT | "(" e ")"\n%import common.INT\n%ignore " "': ["1 + 2", "(1-(2+33))"],
    'start: t [op start]\nop: "+" | "-"\nt: "x"': ["x", "x+x-x"],
    """start: value
       value: object | array | STRING | NUMBER | "true" | "null"
       object: "{" [pair ("," pair)*] "}"
       pair: STRING ":" value
       array: "[" [value ("," value)*] "]"
       STRING: /"[^"]*"/
       %import common.NUMBER
       %ignore " " """: ["{}", '{"a": [1, 2.5, "b"], "c": null}', "[[], [true]]"],
}
MUTUAL = "".join(f'{each}: "{each}" (a|b|c|d|e|f)* | "(" (a|b|c|d|e|f) ")"\n' for each in "abcdef")
VOCABULARY = byte_tokenizer(0, [])
PLAIN = (*b"\t\n\r", *range(32, 127), *"é".encode())


def accepts(constraint: Constraint, text: str) -> bool:
    matcher, data = compiled(constraint, VOCABULARY), list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def drawn(constraint: Constraint, seed: int) -> str:
    """A random text that it allows."""
    matcher, rng, said = compiled(constraint, VOCABULARY), random.Random(seed), list[int]()
    for _ in range(400):
        if matcher.is_accepting() and rng.random() < 0.3:
            break
        plain = [each for each in PLAIN if matcher.validate_tokens([each])]
        if not plain:
            break
        ends = [each for each in plain if each in b'\n*"' and len(said) > 40]
        said.append(rng.choice(ends or plain))
        assert matcher.consume_token(said[-1])
    return bytes(said).decode() if matcher.is_accepting() else ""


def quoted(pattern: str) -> Constraint:
    properties = {"input": {"type": "string", "pattern": f"^(?:{pattern})$"}}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": ["input"]}
    return Constraint(JSON_SCHEMA, json.dumps(schema | {"additionalProperties": False}))


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_it_matches_the_texts_of_the_grammar(grammar: str) -> None:
    own, pattern = Constraint(LARK, grammar), expression(grammar)
    alone = Constraint(LARK, f"start: /{pattern}/")
    texts = [text for seed in range(12) if (text := drawn(own, seed))]
    texts += [text for seed in range(12) if (text := drawn(alone, seed))]
    assert len(set(texts)) > 3
    rng = random.Random(7)
    for text in texts:
        at = rng.randrange(len(text))
        for each in (text, text[:at] + text[at + 1 :], text[:at] + rng.choice('"\\\nx0*') + text[at:]):
            wanted = accepts(own, each)
            assert accepts(alone, each) == wanted, each
            assert accepts(quoted(pattern), json.dumps({"input": each}, ensure_ascii=False)) == wanted, each


@pytest.mark.parametrize("grammar", NESTED)
def test_what_a_grammar_that_refers_to_itself_allows_is_matched_up_to_a_depth(grammar: str) -> None:
    own, pattern = Constraint(LARK, grammar), expression(grammar)
    alone = Constraint(LARK, f"start: /{pattern}/")
    texts = [text for seed in range(20) if (text := drawn(alone, seed))]
    assert len(set(texts)) > 1
    assert all(accepts(own, text.rstrip(" ")) for text in texts)  # llguidance ignores nothing behind a number
    for text in NESTED[grammar]:
        assert accepts(own, text)
        assert accepts(alone, text)
        assert accepts(quoted(pattern), json.dumps({"input": text}))
        assert not accepts(quoted(pattern), json.dumps({"input": text + ")"}))
    assert len(pattern) <= MAX_NESTED_CHARACTERS


def test_rules_that_are_not_used_limit_nothing() -> None:
    long = "x" * (MAX_NESTED_CHARACTERS + 1)
    assert expression(f'start: "{long}"\nr: "(" r ")" | "y"') == f"(?:{long})"
    assert expression('start: "b"\n%ignore r\nr: r "a"') == "(?:b)"  # nothing that is ignored has an end


def test_alternatives_are_limited_together() -> None:
    doubled = "".join(f"a{at}: a{at + 1} a{at + 1}\n" for at in range(13)) + 'a13: "abcd"\n'
    tracemalloc.start()
    with pytest.raises(NotOneExpression, match="65536"):
        expression("start: " + "|".join(['"x" a0'] * 7_000) + "\n" + doubled)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20  # all of them take 230 MB


def test_nested_rules_are_followed_eight_deep_where_the_expression_stays_small() -> None:
    constraint = quoted(expression('start: "(" start ")" | "x"'))
    deep = [accepts(constraint, json.dumps({"input": "(" * depth + "x" + ")" * depth})) for depth in range(12)]
    assert deep == [True] * 9 + [False] * 3


@pytest.mark.parametrize(
    ("given", "made"),
    [("^a$", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), (r"\\\$", r"\\\$"), (r"a\\", r"a\\"), ("$", "")],
)
def test_the_anchors_of_an_expression_are_left_out_and_an_escaped_dollar_stays(given: str, made: str) -> None:
    assert of_regex(given) == made


@pytest.mark.parametrize("name", COMMON)
def test_common_terminals_are_those_of_llguidance(name: str) -> None:
    own = Constraint(LARK, f"start: {name}\n%import common.{name}\n")
    alone = Constraint(LARK, f"start: /{expression(own.text)}/")
    for seed in range(8):
        assert accepts(alone, drawn(own, seed))
        assert accepts(own, drawn(alone, seed))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (f"start: a\n{MUTUAL}", "a refers to itself: it takes more than 16384 characters"),
        (f"start: a\n{MUTUAL}" + 'y: ""\nz: ' + "y " * 30_000 + '\na0: z | "q" a0 "q"', "a refers to itself: it"),
        ("start: T\nT: /a+/ & ~/aa/", "line 2: '& ~/aa/' has no regular expression"),
        ("start: %json {}", "has no regular expression"),
        ('start[max_tokens=3]: "a"', "has no regular expression"),
        ("start: X\n%import python.X", "only common can be imported"),
        ("start: " + "b " * 40 + "\nb: " + "c " * 40 + "\nc: " + '"0123456789" ' * 40, "more than 65536 characters"),
        ("start: " + "x|" * 9000 + 'x\nx: "' + "y" * 9000 + '"', "more than 65536 characters"),
        ('start: W\nW: "' + "y" * 9000 + '"\n' + "%ignore W\n" * 9, "more than 65536 characters"),
        ("start: " + '"x" ' * 20000, "it has 80007 characters; the limit is 65536"),
        ("start: " + "(" * 999 + '"x"' + ")" * 999, "nested more than 64 deep"),
        ("start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(999)) + 'r999: "x"', "nested more than 64 deep"),
    ],
)
def test_other_grammars_have_no_expression(grammar: str, words: str) -> None:
    with pytest.raises(NotOneExpression, match=words.replace("(", r"\(")):
        expression(grammar)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "there is no rule 'start'"),
        ("start: 'a'", "line 1: \"'a'\" is not Lark"),
        ("start: x", "line 1: x is not defined"),
        ("start: x y\nx: x", "line 1: y is not defined"),
        ('start: "b"\n%ignore R\nR: R "a"', "the terminal R refers to itself"),
        ('start: ("a"', r"line 1: '\(' is not closed"),
        ('start: "a")', r"line 1: '\)' is not expected here"),
        ('start: "a"\n\nstart: "b"', "line 3: start is defined twice"),
        ('start: "a"\nhello', "line 2: a rule begins with its name and a colon"),
        (r'start: "\U00110000"', r"line 1: .* is not a character"),
        (r'start: "\ud800"', r"line 1: .* is not a character"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_line_as_llguidance_refuses_it(grammar: str, words: str) -> None:
    with pytest.raises(BadLark, match=words):
        expression(grammar)
    with pytest.raises(ConstraintError):
        check(Constraint(LARK, grammar))
