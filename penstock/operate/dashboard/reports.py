"""HTML reports that commands such as ``penstock replay --html`` have written into a folder."""

from pathlib import Path
from typing import NamedTuple

FOLDER = "reports"  # in the data folder
MOST = 500


class ReportFile(NamedTuple):
    """``modified_ns``: Unix time."""

    name: str
    size: int
    modified_ns: int


def list_reports(folder: Path | None) -> list[ReportFile]:
    """The newest first, at most ``MOST``; none if there is no such folder."""
    if folder is None or not folder.is_dir():
        return []
    reports = []
    for path in folder.glob("*.html"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            reports.append(ReportFile(path.name, status.st_size, status.st_mtime_ns))
    return sorted(reports, key=lambda report: report.modified_ns, reverse=True)[:MOST]
