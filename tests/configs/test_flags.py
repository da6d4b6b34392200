"""Settings from flags and variables."""

from pathlib import Path
from typing import Annotated, Literal, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from penstock.configs.flags import flags_of, parse, to_argv, to_environ, unknown_variables
from penstock.configs.settings import (
    GatewaySettings,
    NatsSettings,
    RouterSettings,
    SameAs,
    TraceSettings,
    WorkerSettings,
    served_names,
)
from penstock.configs.up_settings import UpSettings


class Example(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(ge=1, le=65535, description="where, 100% sure")] = 80
    ratio: Annotated[float, Meta(gt=0)] = 0.5
    kind: Literal["one", "two"] = "one"
    cache: bool = True
    text: str = ""
    counts: tuple[Annotated[int, Meta(ge=1)], ...] = (1, 2)
    sizes: tuple[Literal["small", "large"], ...] = ()


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


def test_a_wrong_item_of_a_repeated_list_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    message = complaint(capsys, "--counts=1", "--counts=0")
    assert all(word in message for word in ("--counts", "must be at least 1", "not 0")), message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "0"], ["--port: must be at least 1, not 0"]),
        (["--port", "65536"], ["--port: must be at most 65535, not 65536"]),
        (["--port", "x"], ["--port: 'x' is not a whole number"]),
        (["--ratio", "0"], ["--ratio: must be above 0", "not 0"]),
        (["--kind", "three"], ["--kind", "'three'", "one, two"]),
        (["--counts", "1,0"], ["--counts: must be at least 1, not 0"]),
        (["--counts", "1,x"], ["--counts: 'x' is not a whole number"]),
        (["--sizes", "small,lage"], ["--sizes: 'lage' is not one of small, large: did you mean large?"]),
        (["--port"], ["--port needs a value"]),
        (["--prot", "1"], ["--prot"]),
        (["--po", "1"], ["--po"]),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_limit(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    message = complaint(capsys, *argv)
    assert all(word in message for word in words), message


def test_a_wrong_variable_is_named_as_such_and_all_problems_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    message = complaint(capsys, "--ratio", "-1", PORT="0", KIND="?")
    assert all(word in message for word in ("PENSTOCK_PORT", "PENSTOCK_KIND", "--ratio")), message


def test_a_missing_required_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Needy, [], prog="needy", environ={})
    assert "missing: --name" in capsys.readouterr().err


def test_help_names_flags_limits_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    message = " ".join(capsys.readouterr().out.split())
    for words in ("--port N where, 100% sure (default: 80)", "--cache, --no-cache", "{one,two}", "(default: on)"):
        assert words in message


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


@pytest.mark.parametrize(
    "kind", [GatewaySettings, RouterSettings, WorkerSettings, TraceSettings, NatsSettings, UpSettings]
)
def test_every_flag_has_a_help_text_that_names_the_unit(kind: type[Struct]) -> None:
    units = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens", "_port": "port", "_pixels": "pixels"}
    for flag in flags_of(kind):
        assert flag.help, flag.name
        for ending, unit in units.items():
            assert not flag.field.endswith(ending) or unit in flag.help, f"{flag.name}: {flag.help}"


def test_a_setting_that_up_hands_down_is_the_one_of_its_process() -> None:
    hints = get_type_hints(UpSettings, include_extras=True)
    shared = 0
    for flag in flags_of(UpSettings):
        hint = hints[flag.field]
        same = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, SameAs)]
        if not same:
            continue
        shared += 1
        theirs = next(other for other in flags_of(same[0].kind) if other.field == flag.field)
        assert flag == theirs
        assert getattr(UpSettings(), flag.field) == getattr(same[0].kind(), flag.field)
        bare = hint.__origin__
        assert bare == (theirs.kind.__origin__ if get_origin(theirs.kind) is Annotated else theirs.kind)
    assert shared > 20
    with pytest.raises(SystemExit):
        parse(UpSettings, ["--max-queue", "0"], prog="p", environ={})  # the limits hold here, too


def up_with(tmp_path: Path, text: str, *argv: str, **environ: str) -> UpSettings:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    return parse(
        UpSettings,
        ["--config", str(file), *argv],
        prog="penstock up",
        environ={f"PENSTOCK_{key}": value for key, value in environ.items()},
    )


def test_a_file_gives_settings_that_variables_and_flags_override(tmp_path: Path) -> None:
    text = "engine: mock\nhttp-port: 1\nworkers: 3\ngpus: [a, b]\nrecord: true\nready_s: 2.5\n"
    up = up_with(tmp_path, text, "--http-port=2", WORKERS="4")
    assert (up.engine, up.http_port, up.workers, up.gpus, up.record, up.ready_s) == (
        "mock",
        2,
        4,
        ("a", "b"),
        True,
        2.5,
    )
    assert up_with(tmp_path, "gateways: 2\n").gateways == "2"
    assert up_with(tmp_path, "gateways: 2-6\n").gateways == "2-6"
    assert up_with(tmp_path, "# nothing yet\n") == UpSettings(config=str(tmp_path / "settings.yaml"))


def test_penstock_yaml_in_the_working_directory_is_read_unless_another_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse(UpSettings, [], prog="p", environ={}) == UpSettings()
    Path("penstock.yaml").write_text("workers: 7")
    assert parse(UpSettings, [], prog="p", environ={}).workers == 7
    assert up_with(tmp_path, "max-queue: 5").workers == UpSettings().workers
    assert parse(RouterSettings, [], prog="p", environ={}) == RouterSettings()  # no other command reads it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http-prt: 1", "unknown setting http-prt: did you mean http-port?"),
        ("config: x", "unknown setting config"),
        ("http-port: 70000", "http-port: must be at most 65535, not 70000"),
        ("engine: mok", "did you mean mock?"),
        ("- workers", "expected settings such as `http-port: 8000`"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_named_with_what_was_probably_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        up_with(tmp_path, text)
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert "settings.yaml" in output


def test_a_missing_file_is_an_error_only_if_it_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(UpSettings, ["--config", "/no/such.yaml"], prog="p", environ={})
    assert "/no/such.yaml: No such file" in capsys.readouterr().err


# -- what would be ignored ----------------------------------------------------------------------------------------


def test_a_misspelt_variable_is_named_with_the_setting_that_was_meant() -> None:
    environ = {"PENSTOCK_HTTP_PRT": "1", "PENSTOCK_PORT": "2", "PENSTOCK_QWXYZ": "3", "HTTP_PORT": "4"}
    assert unknown_variables(environ, ["http_port", "port"]) == {
        "PENSTOCK_HTTP_PRT": "PENSTOCK_HTTP_PORT",
        "PENSTOCK_QWXYZ": "",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PENSTOCK_GATEWAY_SERVICE_HOST", "10.0.0.7"),
        ("PENSTOCK_GATEWAY_SERVICE_PORT_HTTP", "8000"),
        ("PENSTOCK_GATEWAY_PORT_8000_TCP_ADDR", "10.0.0.7"),
        ("PENSTOCK_GATEWAY_PORT", "tcp://10.0.0.7:8000"),
    ],
)
def test_variables_that_kubernetes_sets_for_services_are_left_alone(name: str, value: str) -> None:
    assert unknown_variables({name: value}, ["http_port"]) == {}


def test_the_port_of_a_service_that_is_named_like_a_setting_is_no_setting() -> None:
    environ = {"PENSTOCK_HTTP_PORT": "tcp://10.0.0.7:8000", "PENSTOCK_METRICS_PORT": "9095"}
    settings = parse(UpSettings, [], prog="penstock up", environ=environ)
    assert (settings.http_port, settings.metrics_port) == (UpSettings().http_port, 9095)


@pytest.mark.parametrize("second", ["http-port", "http_port"])
def test_a_key_that_is_twice_in_the_file_is_refused(
    second: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(f"http-port: 8001\nworkers: 2\n{second}: 8002\n")
    with pytest.raises(SystemExit) as ended:
        parse(UpSettings, ["--config", str(file)], prog="penstock up", environ={})
    assert ended.value.code == 2
    assert f"{second} is given twice, in lines 1 and 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--served-model-name", "a", "claude-b"],
        ["--served-model-name", "a,claude-b"],
        ["--served-model-name=a claude-b"],
    ],
)
def test_a_model_has_several_names_in_the_spelling_of_any_server(argv: list[str]) -> None:
    settings = parse(GatewaySettings, [*argv, "--http-port", "1"], prog="gateway", environ={})
    assert served_names(settings.served_model_name) == ("a", "claude-b")
    again = parse(GatewaySettings, to_argv(settings), prog="gateway", environ={})
    assert served_names(again.served_model_name) == ("a", "claude-b")


def test_a_list_of_secrets_is_passed_on_in_the_environment() -> None:
    settings = parse(GatewaySettings, ["--api-key", "a", "--api-key", "b"], prog="gateway", environ={})
    assert settings.api_key == ("a", "b")
    environ = to_environ(settings, ["api_key"])
    assert parse(GatewaySettings, [], prog="gateway", environ=environ).api_key == ("a", "b")
    assert not [word for word in to_argv(settings, hidden=["api_key"]) if "api-key" in word]
