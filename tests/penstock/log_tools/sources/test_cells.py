"""Which cells a deployment has, and in which of them a request is looked for."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.configs.flags import Parser
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.state import CellState, DeploymentState, read_state, write_state
from penstock.log_tools.export.export import output_of, parts_of
from penstock.log_tools.sources.data_folder import STREAMS_DIR, CopyFailed
from penstock.log_tools.sources.open_log import LogSource, add_flags, cells_for, cells_of, open_cells
from penstock.log_tools.timeline.read import read_timeline
from penstock.schemas.requests import new_request_id
from tests.penstock.log_tools.sources.test_stopped import stored


def seen(source: LogSource) -> list[tuple[int, str, str, str]]:
    """Number, namespace, URL and the folder's name of each cell."""
    return [
        (cell.number, cell.source.namespace, cell.source.nats_url, cell.source.data_dir.name)
        for cell in cells_of(source)
    ]


def write(folder: Path, *cells: CellState) -> None:
    write_state(folder / "state.json", DeploymentState("", "nats://home", "", "", "ps", "tiny", cells=cells))


def streams_of(folder: Path, namespace: str) -> None:
    stream = folder / STREAMS_DIR / f"{namespace}_DONE"
    stream.mkdir(parents=True)
    (stream / "meta.inf").touch()


def test_a_running_deployment_says_which_cells_it_has(tmp_path: Path) -> None:
    folder = tmp_path / "cells" / "1"
    write(tmp_path, CellState(4, "ps", "nats://home", "", str(tmp_path)), CellState(5, "ps-1", "x", "", str(folder)))
    assert seen(LogSource(tmp_path)) == [(4, "ps", "", tmp_path.name), (5, "ps-1", "", "1")]
    assert [cell.cells for cell in cells_of(LogSource(tmp_path))] == [2, 2]
    assert seen(LogSource(tmp_path, namespace="ps")) == seen(LogSource(tmp_path))
    assert seen(LogSource(tmp_path, namespace="ps-1")) == [(5, "ps-1", "", "1")]
    assert seen(LogSource(tmp_path, namespace="other")) == [(0, "other", "", tmp_path.name)]


def test_cells_on_brokers_of_others_are_reached_by_their_urls(tmp_path: Path) -> None:
    write(tmp_path, CellState(0, "ps", "nats://a"), CellState(1, "ps-1", "nats://b"))
    assert seen(LogSource(tmp_path)) == [(0, "ps", "nats://a", tmp_path.name), (1, "ps-1", "nats://b", tmp_path.name)]


def test_the_state_of_an_earlier_release_has_one_cell(tmp_path: Path) -> None:
    write(tmp_path)
    [home] = read_state(tmp_path / "state.json").all_cells
    assert (home.number, home.namespace, home.nats_url) == (0, "ps", "nats://home")
    assert seen(LogSource(tmp_path)) == [(0, "", "", tmp_path.name)]


def test_a_stopped_deployment_has_the_cells_whose_streams_are_there(tmp_path: Path) -> None:
    assert seen(LogSource(tmp_path)) == [(0, "", "", tmp_path.name)]
    streams_of(tmp_path, "ps")
    assert seen(LogSource(tmp_path)) == [(0, "", "", tmp_path.name)]
    streams_of(tmp_path / "cells" / "1", "ps-1")
    streams_of(tmp_path / "cells" / "2", "ps-2")
    names = [("ps", tmp_path.name), ("ps-1", "1"), ("ps-2", "2")]
    assert seen(LogSource(tmp_path)) == [(cell, name, "", folder) for cell, (name, folder) in enumerate(names)]
    assert seen(LogSource(tmp_path, namespace="ps-2")) == [(2, "ps-2", "", "2")]


def test_cells_may_share_the_broker_of_a_folder_and_strangers_are_no_cells(tmp_path: Path) -> None:
    streams_of(tmp_path, "ps")
    streams_of(tmp_path, "ps-1")
    assert seen(LogSource(tmp_path)) == [(0, "ps", "", tmp_path.name), (1, "ps-1", "", tmp_path.name)]
    streams_of(tmp_path, "blue")
    assert seen(LogSource(tmp_path)) == [(0, "", "", tmp_path.name)]
    chosen = seen(LogSource(tmp_path, namespace="ps"))
    assert chosen == [(0, "ps", "", tmp_path.name), (1, "ps-1", "", tmp_path.name)]
    assert seen(LogSource(tmp_path, namespace="blue")) == [(0, "blue", "", tmp_path.name)]


def test_a_url_has_as_many_cells_as_the_flags_say(tmp_path: Path) -> None:
    one = LogSource(tmp_path, "nats://a", "blue")
    assert seen(one) == [(0, "blue", "nats://a", tmp_path.name)]
    shared = seen(one._replace(cells=3))
    assert [(number, name, url) for number, name, url, _ in shared] == [
        (0, "blue", "nats://a"),
        (1, "blue-1", "nats://a"),
        (2, "blue-2", "nats://a"),
    ]
    apart = seen(one._replace(cells=2, cell_nats_urls=("nats://b;nats://c",)))
    assert [url for _, _, url, _ in apart] == ["nats://a", "nats://b,nats://c"]
    with pytest.raises(ValueError, match="names 1 brokers and --cells is 3"):
        cells_of(one._replace(cells=3, cell_nats_urls=("nats://b",)))


def test_flags_and_variables_name_the_cells_of_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = Parser(prog="test")
    add_flags(parser)
    monkeypatch.setenv("PENSTOCK_NATS_URL", "nats://a")
    monkeypatch.setenv("PENSTOCK_CELLS", "3")
    monkeypatch.setenv("PENSTOCK_CELL_NATS_URLS", "nats://b,nats://c")
    found = LogSource.of(parser.parse_args([]))
    assert (found.cells, found.cell_nats_urls) == (3, ("nats://b", "nats://c"))
    folder = LogSource.of(parser.parse_args(["--data-dir", "here"]))  # says it by itself
    assert (folder.nats_url, folder.cells, folder.cell_nats_urls) == ("", 0, ())
    flags = LogSource.of(parser.parse_args(["--nats-url", "nats://d", "--cells", "2"]))
    assert (flags.nats_url, flags.cells, flags.cell_nats_urls) == ("nats://d", 2, ())
    monkeypatch.setenv("PENSTOCK_CELLS", "many")
    with pytest.raises(SystemExit):
        parser.parse_args([])


def test_a_request_is_looked_for_in_the_cell_in_its_id_and_then_at_home(tmp_path: Path) -> None:
    source = LogSource(tmp_path, "nats://a", cells=3)

    def order(request_id: str) -> list[int]:
        return [cell.number for cell in cells_for(source, request_id)]

    assert order(new_request_id(cell=2)) == [2, 0, 1]
    assert order(new_request_id(cell=0)) == [0, 1, 2]
    assert order(new_request_id(cell=99)) == [0, 1, 2]
    assert order("no id") == [0, 1, 2]


def test_ids_are_divided_among_the_cells_that_have_them(tmp_path: Path) -> None:
    ids = [new_request_id(cell=cell) for cell in (1, 0, 99, 1)]
    args = argparse.Namespace(ids=[*ids[:3], f"chatcmpl-{ids[3]}"], from_seq=0, since="")
    source = LogSource(tmp_path, "nats://a", cells=3)
    parts = [(cell.number, part.ids) for cell, part in parts_of(args, source)]
    assert parts == [(0, [ids[1], ids[2]]), (1, [ids[0], f"chatcmpl-{ids[3]}"])]
    everything = argparse.Namespace(ids=[], from_seq=0)
    assert [cell.number for cell, _ in parts_of(everything, source)] == [0, 1, 2]
    with pytest.raises(ValueError, match="--from-seq counts the requests of one cell"):
        parts_of(argparse.Namespace(ids=[], from_seq=7), source)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/log.jsonl.gz", "a/log.cell-1.jsonl.gz"),
        ("log.jsonl", "log.cell-1.jsonl"),
        ("v1.2.jsonl", "v1.2.cell-1.jsonl"),
    ],
)
def test_the_file_of_a_cell_keeps_its_suffix(name: str, expected: str) -> None:
    assert output_of(name, 1) == expected


async def test_the_logs_of_a_stopped_deployments_cells_are_read(make_broker: Callable[..., EmbeddedNats]) -> None:
    home = make_broker()
    asked = await stored(home)
    (home.data_dir / "cells").mkdir()
    other = make_broker("own/cells/1", namespace="ps-1")
    late = await stored(other)
    async with open_cells(LogSource(home.data_dir), name="test", files=True) as logs:
        assert [(log.cell, log.stopped, log.reader.subjects.namespace) for log in logs] == [
            (0, True, "ps"),
            (1, True, "ps-1"),
        ]
        for log, request in zip(logs, (asked, late), strict=True):
            assert (await read_timeline(log.reader, request.id)).done is not None


async def test_a_cell_that_cannot_be_opened_is_named_and_left_out_unless_all_are_needed(
    make_broker: Callable[..., EmbeddedNats], capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_broker()
    await stored(home)
    folder = home.data_dir / "cells" / "1"
    streams_of(folder, "ps-1")
    (folder / STREAMS_DIR / "ps-1_DONE" / "meta.inf").write_text("damaged")
    async with open_cells(LogSource(home.data_dir), name="test", files=True) as logs:
        assert [log.cell for log in logs] == [0]
    assert "cell 1 is left out: " in capsys.readouterr().err
    with pytest.raises(CopyFailed, match="damaged"):
        async with open_cells(LogSource(home.data_dir), name="test", files=True, whole=True):
            pass
