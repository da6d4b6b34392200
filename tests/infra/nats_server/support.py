"""What happens to brokers in tests."""

import os
import shutil
import signal
from pathlib import Path

from penstock.log_tools.sources.data_folder import STREAMS_DIR
from penstock.log_tools.sources.store_files import records


def lose_store(data_dir: Path) -> int:
    """Empty the store of the broker that runs on a folder, and kill it; its process.

    The process stands still meanwhile, so that it writes nothing any more.
    """
    pid = int((data_dir / "nats.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    for _ in range(1000):  # its threads stop one after the other, and may write meanwhile
        shutil.rmtree(data_dir / "nats", ignore_errors=True)
        if not (data_dir / "nats").exists():
            break
    os.kill(pid, signal.SIGKILL)
    return pid


def lose_end(data_dir: Path, stream: str, messages: int) -> None:
    """Take the last messages of a stream from a folder whose broker does not run, as a power failure does.

    They are all in the stream's newest block.
    """
    folder = data_dir / STREAMS_DIR / stream / "msgs"
    block = max(folder.glob("*.blk"), key=lambda each: int(each.stem))
    os.truncate(block, records(block.read_bytes()).places[-messages][2])
    (folder / "index.db").unlink(missing_ok=True)
