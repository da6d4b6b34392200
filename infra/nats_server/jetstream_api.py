"""The JetStream API in JSON.

A client library's structs lag behind the server's fields, and the server refuses fields that it does not know, so
nothing that is asked for is lost silently.

Makes a running embedded broker reload its configuration, from any process of its user.

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
from pathlib import Path
from typing import Any

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
