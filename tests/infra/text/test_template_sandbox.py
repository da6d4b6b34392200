"""Templates end with an error where they would take too long or make too much, and are not slower for it otherwise."""

import gc
from typing import Any

import pytest

from penstock.infra.text import template_sandbox
from penstock.infra.text.chat_template import ChatTemplate, TemplateBudgetError, TemplateError
from penstock.infra.text.template_sandbox import cpu_budget

MANY = [{"role": "user", "content": "a"}] * 2_000
TAKING_LONG = {
    "nested loops": "{% for m in messages %}{% for n in messages %}{% for o in messages %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "a range in a loop": "{% for m in messages %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(messages | length // 50) }}",
    "a recursive loop": "{% for m in messages recursive %}{% if loop.depth < 9 %}{{ loop(messages) }}{% endif %}"
    "{% endfor %}",
    "a loop within a captured block": "{% set x %}{% for m in messages %}{% for n in messages %}{% for o in messages %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endset %}{{ x }}",
    "a filter over items": "{% set many = range(30000) | list %}{{ many | select('in', many) | list | length }}",
    "a call block": "{% macro f() %}{% for m in messages %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}{% call f() %}{% call f() %}{% endcall %}{% endcall %}{% endcall %}",
}
GROWING = {
    "a text": "{% set n = namespace(s='ab') %}{% for m in messages %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a text joined": "{% set n = namespace(s='ab') %}{% for m in messages %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a list": "{% set n = namespace(s=[1, 2]) %}{% for m in messages %}{% set n.s = n.s + n.s %}{% endfor %}",
    "the output": "{% set s = messages[0].content * 10000 %}{% for m in messages %}{{ s }}{{ s }}{{ s }}{{ s }}"
    "{% endfor %}",
    "a captured block": "{% set s = messages[0].content * 40000 %}{% set x %}{% for m in messages %}{{ s }}{% endfor %}"
    "{% endset %}{{ x | length }}",
    "a factor": "{{ messages[0].content * 100000000 }}",
    "a list with a factor": "{{ ([0] * 100000000) | length }}",
    "a power": "{{ 10 ** 1000000000 }}",
    "a method that pads": "{{ messages[0].content.ljust(100000000) }}",
    "a filter that pads": "{{ messages[0].content | center(100000000) }}",
    "a format": "{{ '%0100000000d' % (messages | length) }}",
    "a width of a format": "{{ '%*d' % (100000000, 1) }}",
    "a filter that formats": "{{ '%0100000000d' | format(1) }}",
    "a method that formats": "{{ '{:>{}}'.format(1, 100000000) }}",
    "a method that replaces": "{{ (messages[0].content * 9999).replace('a', 'b' * 9999) | length }}",
    "a filter that replaces": "{{ (messages[0].content * 9999) | replace('a', 'b' * 9999) | length }}",
    "a method that joins": "{{ (messages[0].content * 99999).join('abcdefghijklmnopqrstuvwxyz') | length }}",
    "a filter that joins": "{{ range(99) | join(messages[0].content * 99999) | length }}",
    "a sum of a macro": "{% macro f(s, n) %}{% if n %}{{ f(s + s, n - 1) }}{% endif %}{% endmacro %}{{ f('ab', 40) }}",
    "a text of a macro": "{% macro f(s, n) %}{% if n %}{{ f(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ f('ab', 40) }}",
    "an indent of JSON": "{{ messages | tojson(indent=100000000) }}",
    "a batch that is filled": "{{ [1] | batch(100000000, 0) | list | length }}",
    "a filter that indents": "{{ messages[0].content | indent(100000000, true) }}",
}


@pytest.mark.parametrize("source", TAKING_LONG.values(), ids=TAKING_LONG)
def test_a_template_that_takes_too_long_is_ended(source: str) -> None:
    template = ChatTemplate(f"{{% if messages | length > 99 %}}{source}{{% endif %}}{{{{ messages[0].content }}}}", {})
    assert template.render(MANY[:3]) == "a"
    with cpu_budget(0.05) as budget, pytest.raises(TemplateBudgetError, match=r"more than 0\.05 s of CPU") as caught:
        template.render(MANY)
    assert (caught.value.cpu_s, budget.spent) == (0.05, True)


@pytest.mark.parametrize("source", GROWING.values(), ids=GROWING)
def test_a_template_that_makes_too_much_is_ended(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(template_sandbox, "LARGEST", 1 << 20)
    text = f"{{% if messages | length > 20 %}}{source}{{% endif %}}{{{{ messages[0].content }}}}"
    template = ChatTemplate(text, {})
    with pytest.raises(TemplateBudgetError, match="the limit is 1048576") as caught:
        template.render(MANY[:100])
    assert caught.value.cpu_s == 0


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ 'a-a-a' | replace('a', 'b', 2) }} {{ 'a-a'.replace('a', 'bc') }} {{ 11 | replace(1, 2) }}",
            "b-b-a bc-bc 22",
        ),
        (
            "{{ [1, 'x', none] | join(', ') }} {{ 'ab' | join(0) }} {{ nothing | join }}{{ '-'.join(['a']) }}",
            "1, x, None a0b a",
        ),
        ("{{ [{'a': 1}, {'a': 2}] | join('+', attribute='a') }} {{ [{'a': 1}] | join('+', 'a') }}", "1+2 1"),
        ("{{ '%s %05.1f' % ('a', 2) }} {{ '%s' | format(3) }} {{ '{:>4}|{x}'.format(1, x=2) }}", "a 002.0 3    1|2"),
        ("{{ 1 ~ none ~ 'a' ~ nothing }} {{ 1 + 2 }} {{ [1] + [2] }} {{ 7 % 4 }}", "1Nonea 3 [1, 2] 3"),
        ("{{ none | map('upper') | list }}{{ nothing | select | list }}{{ [0, 1] | reject | list }}", "[][][0]"),
        ("{{ [1, 2, 3] | slice(2) | list }} {{ [1, 2, 3] | batch(2, 0) | list }}", "[[1, 2], [3]] [[1, 2], [3, 0]]"),
        ("{{ 'a' | center(3) }}|{{ 'a\\nb' | indent(2) }} {{ [1] | tojson(indent=1) }}", " a |a\n  b [\n 1\n]"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}", "a"),
    ],
)
def test_operators_and_filters_that_are_bounded_do_what_jinjas_do(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).render(MANY[:1]) == expected


def test_budgets_nest_and_end() -> None:
    template = ChatTemplate(TAKING_LONG["nested loops"] + "{{ messages[0].content }}", {})
    with cpu_budget(0.0) as outer:
        with cpu_budget(60.0) as inner:
            assert template.render(MANY[:20]) == "a"
        assert not inner.spent
        with pytest.raises(TemplateBudgetError):
            template.render(MANY[:20])
    assert outer.spent
    assert template.render(MANY[:20]) == "a"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ m.items() | list | length }} {{ m.keys() | list }} {{ m.get('role') }}", "2 ['role', 'content'] user"),
        ("{{ m.nothing is defined }} {{ m.values is callable }}", "False True"),
        ("{{ n.a }} {{ n['a'] }} {{ n.b is defined }} {{ n.keys is defined }}", "1 1 False False"),
        ("{{ m.content.center(5) }}{{ m.content.zfill(width=3) if 0 }}|{{ 'a\\tb'.expandtabs(4) }}", "  Hi |a   b"),
        (
            "{% for x in [1, 2] %}{{ loop.index }}{{ loop.last }}{{ loop.cycle('a', 'b') }} {% endfor %}",
            "1Falsea 2Trueb ",
        ),
        ("{{ 'ab' * 2 }} {{ [1] * 2 }} {{ 2 ** 8 }} {{ 'x' | center(3) }}|", "abab [1, 1] 256  x |"),
        ("{{ '{} {}'.format(m.role, 1) }}", "user 1"),
    ],
)
def test_what_is_read_in_a_shorter_way_is_what_jinja_reads(source: str, expected: str) -> None:
    setup = "{% set m = messages[0] %}{% set n = namespace(a=1) %}"
    assert ChatTemplate(setup + source, {}).render([{"role": "user", "content": "Hi"}]) == expected


@pytest.mark.parametrize("read", ["n.__class__.__mro__", "m.__class__.x", "m.clear()", "m.update(a=1)", "n._x.y"])
def test_what_leads_out_of_the_sandbox_is_not_read(read: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    setup = "{% set m = messages[0] %}{% set n = namespace(a=1) %}"
    template = ChatTemplate(setup + "{{ m.content }}{% if m.content == 'Hi' %}{{ " + read + " }}{% endif %}", {})
    with pytest.raises(TemplateError):
        template.render(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f(m) %}{{ m.content }}{% endmacro %}{{ f(messages[0]) }}",
        "{% if messages %}{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{% endif %}{{ f(3) }}",
        "{% macro g(n) %}{{ f(0) if n }}{% endmacro %}{% macro f(n) %}{{ g(n) }}{% endmacro %}{{ f(2) }}",
        "{% macro f(m) %}{{ caller() }}{% endmacro %}{% call f(1) %}{{ messages[0].content }}{% endcall %}",
    ],
)
def test_a_rendering_leaves_nothing_for_garbage_collection(source: str) -> None:
    template = ChatTemplate(source, {})
    template.render(MANY[:1])
    gc.collect()
    for _ in range(20):
        template.render(MANY[:1])
    assert gc.collect() < 20
