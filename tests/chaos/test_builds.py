"""Two builds take turns, and the other one gets flags that it understands."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.chaos.builds import ROOT, OtherBuild, counted, module_of, prepare, snapshot

OTHER = OtherBuild("/other", {"router": ("--name", "--waiting-room", "--trace"), "gateway": ("--name",)})


@pytest.mark.parametrize(
    ("name", "turns"),
    [("router-0", [False, True, False]), ("router-1", [True, False, True]), ("router", [False, True])],
)
def test_a_process_alternates_between_builds_and_neighbours_begin_with_different_ones(
    name: str, turns: list[bool]
) -> None:
    assert [OTHER.takes_turn("router", name, earlier) for earlier in range(len(turns))] == turns


def test_a_role_that_does_not_take_part_stays_with_this_build() -> None:
    assert not any(OTHER.takes_turn("worker", f"worker-{n}", earlier) for n in range(3) for earlier in range(3))


def test_flags_that_the_other_build_lacks_are_left_out() -> None:
    argv = ["--name=router-0", "--max-held-bytes=9", "--revision-wait-s=3", "--no-trace"]
    assert OTHER.adapted("router", argv) == ["--name=router-0", "--no-trace"]
    assert OTHER.adapted("gateway", argv) == ["--name=router-0"]


def test_a_build_is_started_by_the_name_that_its_command_has(tmp_path: Path) -> None:
    assert module_of(ROOT) == "penstock"
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "cli.py").touch()
    assert module_of(tmp_path) == "infra.cli"


def test_a_build_is_prepared_from_a_folder_with_the_flags_of_its_roles(tmp_path: Path) -> None:
    found = prepare(str(ROOT), tmp_path, ["router"])
    assert found.root == str(ROOT)
    assert found.nats
    assert {"--name", "--max-held-bytes", "--mode"} <= set(found.flags["router"])
    assert found.adapted("router", argv := ["--name=r", "--max-held-bytes=9"]) == argv


def test_what_is_neither_a_folder_nor_a_revision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'no-such-thing' is neither a folder nor a git revision"):
        prepare("no-such-thing", tmp_path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ("worker-0 this 0\nworker-1 other -15\nworker-0 other 3.5\n", {("worker", "this"): 1, ("worker", "other"): 2}),
    ],
)
def test_starts_are_counted_by_kind_and_build(tmp_path: Path, text: str, wanted: Mapping[tuple[str, str], int]) -> None:
    starts = tmp_path / "starts"
    starts.write_text(text)
    assert counted(starts) == wanted
    assert not counted(tmp_path / "none")


def test_a_model_as_a_snapshot_has_the_snapshots_name_as_its_revision(tmp_path: Path) -> None:
    from penstock.infra.model.modeldir import revision

    assert revision(snapshot("tiny", tmp_path)) == "chaos"
