"""Conversations that grew are rendered from where they grew, and give the prompt of a whole rendering."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.model import modeldir
from penstock.infra.text import resumed_rendering
from penstock.infra.text.chat_template import ChatTemplate, PromptEnd, TemplateError
from penstock.infra.text.resumed_rendering import LEAST_MESSAGES
from tests.properties import examples

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NS = "{% set ns = namespace(last='', count=0) %}"
# One habit of real templates each, and whether a prompt can be resumed.
HABITS: dict[str, tuple[str, bool]] = {
    "plain": ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ messages | length }}", True),
    "index": ("{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ m.content }}{% endfor %}", True),
    "last": ("{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}", True),
    "the next one": (
        "{% for m in messages %}{{ m.content }}{{ '' if loop.last else loop.nextitem.role }},{% endfor %}",
        True,
    ),
    "the one before": (
        "{% for m in messages %}{{ '' if loop.first else loop.previtem.role }}{{ m.content }}{% endfor %}",
        True,
    ),
    "one ahead by index": (
        "{% for m in messages %}{{ m.content }}{% if not loop.last and messages[loop.index].role == 'tool' %}|"
        "{% endif %}{% endfor %}",
        True,
    ),
    "system apart": (
        "{% if messages[0].role == 'system' %}S{{ messages[0].content }}{% set rest = messages[1:] %}{% else %}"
        "{% set rest = messages %}{% endif %}{% for m in rest %}{{ loop.index0 }}{{ m.content }}{% endfor %}",
        True,
    ),
    "a namespace": (
        NS + "{% for m in messages %}{% if m.role != ns.last %}<{{ m.role }}>{% endif %}{% set ns.last = m.role %}"
        "{% set ns.count = ns.count + 1 %}{{ m.content }}{% endfor %}{{ ns.count }}{{ ns.last }}",
        True,
    ),
    "a list in a namespace": (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m.content] %}{{ m.role }}"
        "{% endfor %}{{ ns.all | join(',') }}",
        True,
    ),
    "the last user first": (
        NS + "{% for m in messages[::-1] %}{% if not ns.count and m.role == 'user' %}{% set ns.count = loop.revindex %}"
        "{% endif %}{% endfor %}{% for m in messages %}{% if loop.index >= ns.count %}*{% endif %}{{ m.content }}"
        "{% endfor %}",
        True,  # as long as the last user stays the same
    ),
    "two loops": (
        NS + "{% for m in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}{% for m in messages %}"
        "{{ m.content }}{% endfor %}",
        False,  # the second depends on the first one's count
    ),
    "a macro": (
        "{% macro w(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{{ w(m) }}{% endfor %}",
        True,
    ),
    "continue and break": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        True,
    ),
    "the number of messages": ("{% for m in messages %}{{ m.content }}/{{ messages | length }} {% endfor %}", False),
    "what comes": ("{% for m in messages %}{{ m.content }}{{ messages[-1].content }}{% endfor %}", False),
    "the time": ("{% for m in messages %}{{ strftime_now('%Y') }}{{ m.content }}{% endfor %}", False),
    "the time in a macro": (
        "{% macro t() %}{{ strftime_now('%Y') }}{% endmacro %}{% macro u() %}{{ t() }}{% endmacro %}"
        "{% for m in messages %}{{ u() }}{{ m.content }}{% endfor %}",
        False,
    ),
    "the time before": (
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
        True,
    ),
    "a generator's state": (
        "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{{ m.content }}{% endfor %}",
        False,
    ),
    "changes": ("{% for m in messages %}{% if loop.changed(m.role) %}#{% endif %}{{ m.content }}{% endfor %}", False),
    "a condition": ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", False),
    "messages as json": ("{% for m in messages %}{{ m | tojson }}{% endfor %}{{ messages | tojson }}", True),
    "a captured block": ("{% for m in messages %}{% set x %}<{{ m.content }}>{% endset %}{{ x }}{% endfor %}", True),
}
ROLES = ("user", "assistant", "tool", "assistant")


def conversation(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    start = [{"role": "system", "content": f"s{draw.random()}"}] if draw.random() < 0.5 else []
    start.append({"role": "user", "content": "task"})
    return start + [
        {"role": ROLES[1 + at % 3], "content": f"{at}:{draw.choice('abc')}"} for at in range(count - len(start))
    ]


def render(template: ChatTemplate, messages: list[dict[str, Any]], owner: str | None = "t", **options: Any) -> str:
    return template.render(messages, options.pop("tools", None), PromptEnd.generation, None, owner, **options)


class Seen:
    """How each rendering went."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tracks: list[Any] = []
        seen = self.tracks

        begin = resumed_rendering._Track.__init__

        def made(self: Any, *args: Any) -> None:
            begin(self, *args)
            seen.append(self)

        monkeypatch.setattr(resumed_rendering._Track, "__init__", made)

    @property
    def resumed(self) -> list[bool]:
        return [track.resumed for track in self.tracks]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


@pytest.mark.parametrize(("source", "resumes"), HABITS.values(), ids=HABITS)
def test_a_prompt_is_that_of_a_whole_rendering_for_each_habit(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, source: str, resumes: bool
) -> None:
    monkeypatch.setattr(resumed_rendering, "_COMPARED", 0)  # a wrong prompt must show
    template = ChatTemplate(source, {})
    for seed in range(4):
        messages = conversation(LEAST_MESSAGES + 30, seed)
        for count in range(LEAST_MESSAGES - 2, len(messages), 3):
            assert render(template, messages[:count]) == render(template, messages[:count], None)
    assert any(seen.resumed) is resumes


@examples(30)
@given(
    source=st.sampled_from([source for source, _ in HABITS.values()]),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.booleans()), min_size=2, max_size=8),
)
def test_whatever_was_rendered_before_a_prompt_is_that_of_a_whole_rendering(
    source: str, steps: list[tuple[int, int, bool]]
) -> None:
    """Conversations that grow, shrink, branch, and begin alike."""
    template = ChatTemplate(source, {})
    template._resumed._compared = 1_000
    for seed, count, edited in steps:
        messages = conversation(LEAST_MESSAGES + count, seed)
        if edited:
            at = count % len(messages)
            messages[at] = {**messages[at], "content": "edited"}
        assert render(template, messages) == render(template, messages, None)


def test_only_new_messages_are_rendered(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    begin = resumed_rendering._Track.begin

    def counted(self: Any) -> Any:
        found = begin(self)
        turns[-1] += found != ""
        return found

    monkeypatch.setattr(resumed_rendering._Track, "begin", counted)
    template = ChatTemplate(HABITS["plain"][0], {})
    messages = conversation(400)
    for count in (100, 104, 300, 400):
        turns.append(0)
        render(template, messages[:count])
    assert seen.resumed == [False, True, True, True]
    assert turns == [100, 5, 197, 101], "the last message of the one before is rendered again"


def test_nothing_is_shared_between_tenants_tools_and_variables(seen: Seen) -> None:
    template = ChatTemplate(HABITS["plain"][0], {})
    messages = conversation(60)
    for options in ({}, {"owner": "u"}, {"tools": [TOOL]}, {"mood": "calm"}, {"mood": True}, {"mood": 1}):
        render(template, messages, **options)
    assert seen.resumed == [False] * 6
    render(template, messages)
    assert seen.resumed[6:] == [True]


def test_numbers_that_are_equal_but_written_otherwise_are_not_the_same(seen: Seen) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}", {})
    for value in (1, 1.0, True):
        messages = [{"role": "user", "content": "", "n": value}, *conversation(60)]
        assert render(template, messages) == render(template, messages, None)
    assert seen.resumed == [False] * 3


def test_without_an_owner_nothing_is_kept(seen: Seen) -> None:
    template = ChatTemplate(HABITS["plain"][0], {})
    render(template, conversation(60), None)
    assert not seen.tracks
    assert not len(template._resumed._points)
    render(template, conversation(LEAST_MESSAGES - 1))
    assert not seen.tracks, "short conversations are rendered as before"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumed_rendering, "CACHED_BYTES", 100_000)
    template = ChatTemplate(HABITS["plain"][0], {})
    for seed in range(100):
        render(template, conversation(200, seed))
    points = template._resumed._points
    assert 0 < len(points) < 50
    assert points.size_bytes <= 100_000


def test_a_template_that_is_caught_in_a_difference_is_not_trusted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(HABITS["plain"][0], {})
    messages = conversation(80)
    render(template, messages[:60])
    for digest, (point, _) in list(template._resumed._points._entries.items()):
        template._resumed._points.put(digest, point._replace(text="forged"))
    assert render(template, messages) == render(template, messages, None)
    monkeypatch.setattr(resumed_rendering, "_Track", None)
    assert render(template, messages) == render(template, messages, None)


def test_what_a_template_refuses_it_refuses_behind_a_known_beginning(seen: Seen) -> None:
    refusal = "{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    template = ChatTemplate("{% for m in messages %}" + refusal + "{{ m.content }}{% endfor %}", {})
    render(template, conversation(60))
    with pytest.raises(TemplateError, match="no"):
        render(template, [*conversation(60), {"role": "user", "content": "bad"}])
    assert render(template, [*conversation(60), {"role": "user", "content": "good"}]).endswith("good")
    assert seen.resumed[-1]


@pytest.mark.parametrize("name", modeldir.BUNDLED)
def test_bundled_models_resume(seen: Seen, name: str) -> None:
    template = modeldir.load(modeldir.MODELS / name).template
    assert template is not None
    messages = conversation(100)
    for count in (50, 70, 100):
        assert render(template, messages[:count], tools=[TOOL]) == render(
            template, messages[:count], None, tools=[TOOL]
        )
    assert seen.resumed == [False, True, True]
