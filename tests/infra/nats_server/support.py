"""What happens to brokers in tests."""

import os
import shutil
import signal
from pathlib import Path


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
