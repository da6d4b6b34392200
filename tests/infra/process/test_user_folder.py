"""What ends with a process, in a folder that no other user can have prepared."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from penstock.infra.process.user_folder import FolderTaken, OwnFolder, user_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_made_once_and_for_its_user_alone(temporary: Path) -> None:
    path = user_folder()
    assert path == user_folder() == temporary / f"penstock-{os.geteuid()}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "open", "of another user"])
def test_what_somebody_else_may_have_prepared_is_refused(
    temporary: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = temporary / f"penstock-{os.geteuid()}"
    (temporary / "elsewhere").mkdir(mode=0o700)
    if kind == "link":
        path.symlink_to(temporary / "elsewhere")
    elif kind == "file":
        path.write_text("")
    else:
        path.mkdir(mode=0o700)
    if kind == "open":
        path.chmod(0o777)
    elif kind == "of another user":
        user = os.geteuid()
        path.rename(temporary / f"penstock-{user + 1}")
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(FolderTaken, match=r"TMPDIR|chmod 700"):
        user_folder()
    assert list((temporary / "elsewhere").iterdir()) == []


def test_a_folder_is_deleted_by_its_process_and_left_alone_by_others() -> None:
    first, second = OwnFolder("kv"), OwnFolder("kv")
    (first.path / "events").write_text("")
    assert first.path.is_dir()
    first.close()
    first.close()
    assert not first.path.exists()
    assert second.path.is_dir()
    second.close()


def test_two_threads_may_delete_a_folder_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that ends an engine, and the one that has seen a rank of it end."""
    folder, delete = OwnFolder("ranks"), shutil.rmtree
    second = threading.Thread(target=folder.close)

    def deleting(path: Path, **_: object) -> None:
        if not second.ident:
            second.start()
            second.join(0.2)
        delete(path, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", deleting)
    folder.close()
    second.join(5)
    assert not second.is_alive()
    assert not folder.path.exists()


def test_what_a_killed_process_left_is_deleted_by_the_next_one_of_its_kind(temporary: Path) -> None:
    code = (
        "import time\nfrom penstock.infra.process.user_folder import OwnFolder\n"
        "made = OwnFolder('ranks')\n(made.path / 'store').write_text('x')\nprint(made.path, flush=True)\ntime.sleep(60)"
    )
    environ = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        OwnFolder("ranks").close()
        assert (left / "store").exists(), "its process runs"
        child.send_signal(signal.SIGKILL)
    OwnFolder("profile").close()
    assert left.exists(), "it is of another kind"
    OwnFolder("ranks").close()
    assert not left.exists()
