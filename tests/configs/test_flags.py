"""Settings from flags and variables."""

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from configs.flags import parse, to_argv, to_environ
from configs.settings import GatewaySettings, NatsSettings, RouterSettings, UpSettings, WorkerSettings


class Example(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(ge=1, le=65535, description="where, 100% sure")] = 80
    ratio: Annotated[float, Meta(gt=0)] = 0.5
    kind: Literal["one", "two"] = "one"
    cache: bool = True
    text: str = ""
    counts: tuple[Annotated[int, Meta(ge=1)], ...] = (1, 2)


class Needy(Struct, frozen=True):
    name: str


def read(*argv: str, **environ: str) -> Example:
    return parse(Example, argv, prog="example", environ={f"PENSTOCK_{key}": value for key, value in environ.items()})


def complaint(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as ended:
        read(*argv, **environ)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_flags_win_over_variables_and_both_over_defaults() -> None:
    assert read() == Example()
    assert read(PORT="7").port == 7
    assert read("--port", "8", PORT="7").port == 8


def test_each_type_is_read_from_text() -> None:
    argv = ["--port=1", "--ratio=2", "--kind=two", "--no-cache", "--text=-x y", "--counts=3,4"]
    assert read(*argv) == Example(port=1, ratio=2.0, kind="two", cache=False, text="-x y", counts=(3, 4))
    assert read(CACHE="false").cache is False
    assert read(CACHE="1").cache is True


@pytest.mark.parametrize(
    "argv",
    [["--counts=3,4,5"], ["--counts", "3", "--counts", "4", "--counts=5"], ["--counts=3,4", "--text=x", "--counts=5"]],
)
def test_a_repeated_list_flag_adds_and_any_other_holds_the_last(argv: list[str]) -> None:
    assert read(*argv, COUNTS="9").counts == (3, 4, 5)
    assert read("--port=7", "--port=8").port == 8
    assert read(COUNTS="6,7").counts == (6, 7)


def test_a_wrong_item_of_a_repeated_list_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "--counts=1", "--counts=0")
    assert all(word in said for word in ("--counts", "'1'", "'0'", ">= 1")), said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "0"], ["--port", "'0'", ">= 1"]),
        (["--port", "65536"], ["--port", "'65536'", "<= 65535"]),
        (["--port", "x"], ["--port", "'x'", "expected int"]),
        (["--ratio", "0"], ["--ratio", "'0'", "> 0"]),
        (["--kind", "three"], ["--kind", "'three'", "one, two"]),
        (["--counts", "1,0"], ["--counts", ">= 1"]),
        (["--prot", "1"], ["--prot"]),
        (["--po", "1"], ["--po"]),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_limit(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    said = complaint(capsys, *argv)
    assert all(word in said for word in words), said


def test_a_wrong_variable_is_named_as_such_and_all_problems_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "--ratio", "-1", PORT="0", KIND="?")
    assert all(word in said for word in ("PENSTOCK_PORT", "PENSTOCK_KIND", "--ratio")), said


def test_a_missing_required_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Needy, [], prog="needy", environ={})
    assert "missing: --name" in capsys.readouterr().err


def test_help_names_flags_limits_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("--port N where, 100% sure (default: 80)", "--cache, --no-cache", "{one,two}", "(default: on)"):
        assert words in said


@given(
    st.builds(
        Example,
        port=st.integers(1, 65535),
        ratio=st.floats(min_value=1e-9, max_value=1e9),
        kind=st.sampled_from(["one", "two"]),
        cache=st.booleans(),
        text=st.text(),
        counts=st.lists(st.integers(1, 99), min_size=1, max_size=4).map(tuple),
    )
)
def test_settings_survive_the_way_through_a_command_line(settings: Example) -> None:
    assert parse(Example, to_argv(settings), prog="p", environ={}) == settings
    hidden = to_argv(settings, hidden=["text"])
    assert not any(word.startswith("--text") for word in hidden)
    assert parse(Example, hidden, prog="p", environ=to_environ(settings, ["text"])) == settings


@pytest.mark.parametrize("kind", [GatewaySettings, RouterSettings, WorkerSettings, NatsSettings, UpSettings])
def test_every_process_has_defaults_that_are_valid_and_helps(
    kind: type[Struct], capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(kind, [], prog="p", environ={}) == kind()
    with pytest.raises(SystemExit):
        parse(kind, ["--help"], prog="p", environ={})
    assert "--namespace" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [WorkerSettings, UpSettings])
@pytest.mark.parametrize("flag", ["--reasoning-parser", "--tool-call-parser"])
def test_an_unknown_parser_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str], kind: type[WorkerSettings], flag: str
) -> None:
    with pytest.raises(SystemExit):
        parse(kind, [flag, "hermse"], prog="penstock", environ={})
    said = capsys.readouterr().err
    assert all(word in said for word in (flag, "'hermse'", "auto", "none", "gpt_oss", "mistral")), said
