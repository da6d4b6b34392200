"""Requests to a broker in JSON: streams and their snapshots over the JetStream API, and reloads of an embedded broker.

A client library's structs lag behind the server's fields, and would drop new ones silently. With JSON, nothing is lost:
the server refuses unknown fields.

A snapshot comes in chunks that are acknowledged, so that a slow disk here slows the server down. It removes no message
and blocks no client; messages that are published meanwhile may be in it or not. Sequences and times stay.

A tenant's account that is new to the server has its stream imports at once, but its service imports only after a second
reload (nats-server 2.15.1), so there are always two. Connections, subscriptions and replies of others are not
disturbed, but while the accounts are exchanged a submission may be answered with "no responders": nothing is stored
then, and its client publishes it again (3 of 11,954 during 50 reloads).
"""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from penstock.infra.bus.jetstream import BUSY, ApiError
from penstock.infra.nats_server.server import was_started_with

Config = dict[str, Any]

_TIMEOUT_S = 30.0  # a stream is a few files; a busy disk may take its time
_PROBE_S = 2.0
_RESEND_S = 5.0
_AGAIN_S = 0.5


class BrokerProblem(Exception):
    """The server cannot run the pipeline in its present state; the text says what is wrong and how to fix it."""


async def existing_config(nc: Client, verb: str, not_found: int) -> Config | None:
    """The configuration of a stream or consumer; None: there is none."""
    info = await existing_info(nc, verb, not_found)
    config: Config | None = None if info is None else info["config"]
    return config


async def existing_info(nc: Client, verb: str, not_found: int) -> Config | None:
    """The configuration and state of a stream or consumer; None: there is none."""
    answer = await _ask(nc, verb, {})
    if isinstance(answer, ApiError) and answer.err_code == not_found:
        return None
    return _accepted(verb, answer)


async def request(nc: Client, verb: str, body: Config) -> Config:
    """The answer of the JetStream API.

    Raises:
        BrokerProblem: the server refuses, or does not answer.
    """
    return _accepted(verb, await _ask(nc, verb, body))


def _accepted(verb: str, answer: Config | ApiError) -> Config:
    if isinstance(answer, ApiError):
        raise BrokerProblem(f"$JS.API.{verb}: {answer}")
    return answer


async def _ask(nc: Client, verb: str, body: Config) -> Config | ApiError:
    """Ask the JetStream API; every verb used here may be repeated."""
    until = time.monotonic() + _TIMEOUT_S
    while isinstance(answer := await _ask_once(nc, verb, body), ApiError) and answer.err_code in BUSY:
        if time.monotonic() > until:
            raise BrokerProblem(f"$JS.API.{verb}: {answer} for {_TIMEOUT_S:.0f} s: do most servers of the cluster run?")
        await asyncio.sleep(_AGAIN_S)
    return answer


async def _ask_once(nc: Client, verb: str, body: Config) -> Config | ApiError:
    subject = f"$JS.API.{verb}"
    payload = json.dumps(body).encode() if body else b""
    # A forbidden publish is not answered, only reported separately: check after a short wait, then wait longer. While
    # a cluster elects a stream's leader, requests about it are not answered either: then they are sent again.
    for timeout_s in (_PROBE_S, *[_RESEND_S] * round(_TIMEOUT_S / _RESEND_S)):
        try:
            reply = await nc.request(subject, payload, timeout=timeout_s)
            break
        except NoRespondersError:
            raise BrokerProblem(
                "JetStream is not enabled on the server or for this account: add `jetstream { store_dir: ... }` to "
                "the server's configuration and `jetstream: enabled` to the account"
            ) from None
        except (NatsError, TimeoutError):
            if subject.lower() in str(nc.last_error).lower():
                raise BrokerProblem(
                    f"this user may not use {subject}: applying streams needs the operator's credentials "
                    f"({nc.last_error})"
                ) from None
    else:
        raise BrokerProblem(f"{subject}: no answer within {_TIMEOUT_S:.0f} s: is the server overloaded?")
    answer: Config = json.loads(reply.data)
    return msgspec.convert(answer["error"], ApiError) if "error" in answer else answer


RELOAD_S = 10.0
_DONE = re.compile(rb"Reloaded server configuration|Failed to reload server configuration: (.*)")


def reload(data_dir: Path) -> None:
    """Have the broker that runs on this folder apply the configuration in it.

    Raises:
        BrokerProblem: no broker runs there, or it refused the configuration.
    """
    pid = running_pid(data_dir)
    log = data_dir / "nats.log"
    for _ in range(2):
        seen = log.stat().st_size
        os.kill(pid, signal.SIGHUP)
        deadline = time.monotonic() + RELOAD_S
        while (match := _DONE.search(_since(log, seen))) is None:
            if time.monotonic() > deadline:
                raise BrokerProblem(f"the broker (pid {pid}) did not reload within {RELOAD_S:g} s; see {log}")
            time.sleep(0.01)
        if match[1]:
            raise BrokerProblem(f"the broker refused its new configuration: {match[1].decode(errors='replace')}")


def running_pid(data_dir: Path) -> int:
    """
    Raises:
        BrokerProblem: no broker runs there.
    """
    config = str((data_dir / "nats.conf").resolve())
    try:
        pid = int((data_dir / "nats.pid").read_text())
        if pid > 0 and was_started_with(pid, config):
            return pid
    except (OSError, ValueError):
        pass
    raise BrokerProblem(f"no broker runs on {data_dir}: start 'penstock up' or 'penstock nats', or give --data-dir")


def _since(log: Path, offset: int) -> bytes:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read()


CHUNK_BYTES = 128 << 10
CHUNK_S = 30.0  # for the next chunk, or for its acknowledgement; the server itself gives up after a few seconds
HEARD_S = 10.0  # for the servers of a cluster to hear of the subject of chunks
END_S = 300.0  # for a stream to be rebuilt from a snapshot of gigabytes
_STATUS, _DESCRIPTION = "Status", "Description"
_WHOLE = "204"  # the status of the last message, if it has one


class SnapshotHead(NamedTuple):
    """What has to be given back with a snapshot: the stream's configuration, and its state."""

    config: Config
    state: Config


async def take_snapshot(nc: Client, stream: str, write: Callable[[bytes], object]) -> SnapshotHead:
    """Read a stream on file, without its consumers.

    Args:
        write: called with the chunks, in order.
    Raises:
        BrokerProblem: there is no such stream, this user may not read it, or the broker did not send all of it.
    """
    inbox = nc.new_inbox()
    chunks = await nc.subscribe(inbox)
    try:
        body = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES}
        head = await request(nc, f"STREAM.SNAPSHOT.{stream}", body)
        if head["config"]["storage"] != "file":
            raise BrokerProblem(f"{stream} is in memory, so that nothing of it is on a disk: it has no snapshot")
        while True:
            chunk = await chunks.next_msg(timeout=CHUNK_S)
            if not chunk.data:
                break
            write(chunk.data)
            if chunk.reply:
                await nc.publish(chunk.reply)
        headers = chunk.headers or {}
        if headers.get(_STATUS, _WHOLE) != _WHOLE:
            raise BrokerProblem(f"the broker stopped sending {stream}: {headers.get(_DESCRIPTION, headers[_STATUS])}")
        return SnapshotHead(head["config"], head["state"])
    except (NatsError, TimeoutError) as error:
        raise BrokerProblem(f"the broker did not send all of {stream} ({error!r}): back up again") from error
    finally:
        await chunks.unsubscribe()


async def restore_snapshot(nc: Client, head: SnapshotHead, chunks: Iterable[bytes]) -> None:
    """Make a stream of a snapshot; there must be none of its name.

    Args:
        head: of the snapshot; placement and the number of replicas may differ, the name not.
    Raises:
        BrokerProblem: there is such a stream, no room for it, or the snapshot is damaged.
    """
    name = head.config["name"]
    # The server adds metadata of its own to its answers; it must not be sent back.
    metadata = {k: v for k, v in (head.config.get("metadata") or {}).items() if not k.startswith("_nats.")}
    body = {"config": head.config | {"metadata": metadata}, "state": head.state}
    to = (await request(nc, f"STREAM.RESTORE.{name}", body))["deliver_subject"]
    try:
        for chunk in chunks:
            await asyncio.sleep(0)  # a reply that is there at once would leave no turn to others
            _check(name, await _taken(nc, to, chunk, CHUNK_S))
        _check(name, await _taken(nc, to, b"", END_S))
    except (NatsError, TimeoutError) as error:
        raise BrokerProblem(f"the broker did not take all of {name} ({error!r})") from error


async def _taken(nc: Client, to: str, chunk: bytes, timeout_s: float) -> bytes:
    """The reply to a chunk. In a cluster, the client's server may hear of the subject after its first chunk."""
    until = time.monotonic() + HEARD_S
    while True:
        try:
            reply: bytes = (await nc.request(to, chunk, timeout=timeout_s)).data
            return reply
        except NoRespondersError:  # the chunk has reached no subscriber
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.05)


def _check(name: str, reply: bytes) -> None:
    error = json.loads(reply).get("error") if reply else None
    if error:
        raise BrokerProblem(f"the broker does not take the snapshot of {name}: {error.get('description', error)}")
