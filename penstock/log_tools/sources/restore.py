"""Writes recorded messages as the streams of a data folder, under their own sequences and times."""

from collections.abc import Collection
from pathlib import Path

from penstock.infra.nats_server.apply_streams import stream_configs
from penstock.log_tools.sources.data_folder import MEDIA, STREAMS_DIR, stream_name
from penstock.log_tools.sources.export_file import ExportFile
from penstock.log_tools.sources.log_line import STREAMS, BadLine
from penstock.log_tools.sources.store_files import StreamFiles
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects

RESTORED = (*STREAMS, MEDIA)


def prefix(namespace: str, stream: str) -> str:
    """The common beginning of a stream's or a bucket's subjects."""
    return f"$O.{namespace}_media." if stream.startswith("OBJ_") else f"{namespace}."


def restore(
    exported: ExportFile, data_dir: Path, namespace: str, streams: Collection[str] = RESTORED
) -> dict[str, int]:
    """Write an export into a data folder without these streams; the number of messages by stream.

    The streams have no age limit. No broker may run on the folder.

    Args:
        namespace: the streams' own; the file's subjects move there.
        streams: whose messages are written; the others stay empty.
    Raises:
        BadLine: a damaged line; see ``ExportFile.records`` and ``StreamFiles.add``.
        OSError: the folder cannot be written.
    """
    subjects = Subjects(namespace)
    targets = {stream_name(subjects, stream): stream for stream in RESTORED}
    configs = {config["name"]: config for config in stream_configs(topology(subjects)) if config["name"] in targets}
    files = {
        targets[name]: StreamFiles(
            data_dir / STREAMS_DIR / name,
            config | {"created": "2026-01-01T00:00:00Z"},
            prefix(exported.header.namespace, name),
            prefix(namespace, name),
        )
        for name, config in configs.items()
    }
    for record in exported.records(streams):
        if record.stream in files:  # others are of a later build
            try:
                files[record.stream].add(record)
            except BadLine as error:
                exported.reject(error)
    for each in files.values():
        each.close()
    return {stream: each.messages for stream, each in files.items()}
