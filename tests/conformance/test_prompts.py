"""The comparison of templates with transformers finds a difference, and none where there is none."""

from pathlib import Path

import pytest

from tests.conformance import prompts

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
WALKS = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<end>{% endfor %}"  # noqa: E501
REASONS = "{% for m in messages %}{{ m.reasoning }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PLAIN, "4 intended"),
        (WALKS, "43 same"),
        (WALKS.replace("{{ m.content }}", ""), "intended"),
        (REASONS, "6 intended"),
        ("{% for %}", "1 templates unusable"),
        ("{% for m in messages %}{{ '<' + m.content }}{% endfor %}", "4 only we render"),
    ],
)
def test_prompts_are_those_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, said: str
) -> None:
    (tmp_path / "one.jinja").write_text(source)
    assert prompts.main([str(tmp_path)]) == 0
    assert said in capsys.readouterr().out


def test_a_difference_is_shown_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.jinja").write_text(PLAIN)
    monkeypatch.setattr(prompts, "theirs", lambda source, given: "<s>something else")
    assert prompts.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "-<s>something else" in out
    assert "one.jinja, one message" in out


def test_a_folder_without_templates_fails(tmp_path: Path) -> None:
    assert prompts.main([str(tmp_path)]) == 1
