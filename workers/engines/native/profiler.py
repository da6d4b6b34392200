"""A trace of the engine's steps, recorded with torch's profiler while the engine serves.

Operators are recorded only in the thread that makes a ``StepTrace``, which is the engine's; kernels of the whole
process.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.infra.process.user_folder import OwnFolder

_last: OwnFolder | None = None  # with this process's last trace


class StepTrace:
    """``end`` in the thread that made it, then ``write`` in any.

    Raises:
        RuntimeError: another profiler is active in this process.
    """

    def __init__(self) -> None:
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])
        self._profile.start()

    def end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels of a step in flight would be cut off
        self._profile.stop()

    def write(self) -> Path:
        """As a gzipped Chrome trace, in a folder that only this user can read. It replaces this process's last one.

        Raises:
            OSError, FolderTaken: there is no room, or no such folder.
        """
        global _last
        if _last is not None:
            _last.close()
        _last = OwnFolder("profile")
        path = _last.path / "trace.json.gz"
        self._profile.export_chrome_trace(str(path))
        return path
