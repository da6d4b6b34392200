"""Makes a shared consumer again that was deleted on the broker: without it, its stream would never be read."""

import json
import time
from typing import Any

import msgspec
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import before_time
from penstock.infra.bus.jetstream import ApiError
from penstock.schemas.errors import ServingError
from penstock.schemas.streams import ConsumerSpec

EXISTS = 10148  # it is there, configured otherwise
TIMEOUT_S = 2.0
_NS = 1_000_000_000


class _Delivered(msgspec.Struct, frozen=True):
    consumer_seq: int = 0


class _Reply(msgspec.Struct):
    error: ApiError | None = None
    delivered: _Delivered = _Delivered()


_decode = msgspec.json.Decoder(_Reply).decode


def config_of(spec: ConsumerSpec) -> dict[str, Any]:
    """As the JetStream API takes it."""
    subjects = spec.filter_subjects
    return {
        "durable_name": spec.name,
        "name": spec.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(spec.ack_wait_s * _NS),
        "max_deliver": -1,
        "max_ack_pending": spec.max_ack_pending,
        "max_waiting": 512,
        # The server wants one subject and several in different fields.
        **({"filter_subject": subjects[0]} if len(subjects) == 1 else {"filter_subjects": list(subjects)}),
        "replay_policy": "instant",
    }


async def make_again(
    bus: Bus, stream: str, config: dict[str, Any], *, start_seq: int = 0, since_s: float = 0.0, filtered: bool = False
) -> bool:
    """Create a consumer, unless it is there; False: it is.

    Args:
        config: as the JetStream API takes it.
        start_seq: of the first message that it is to deliver; 0: not given.
        since_s: deliver what was stored in the last seconds; 0: everything.
        filtered: ask with its filter in the subject, as the permissions of workers want it.
    Raises:
        OSError: the broker refused it, or did not answer.
    """
    config = dict(config)
    if start_seq:
        config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": start_seq}
    elif since_s:
        try:
            before = await before_time(bus, stream, time.time_ns() - int(since_s * 1e9))
        except ServingError as error:
            raise OSError(error.message) from None
        config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": before + 1}
    body = json.dumps({"stream_name": stream, "config": config, "action": "create"}).encode()
    subject = f"$JS.API.CONSUMER.CREATE.{stream}.{config['name']}"
    if filtered:
        subject += f".{config['filter_subject']}"
    try:
        reply = _decode((await bus.nc.request(subject, body, timeout=TIMEOUT_S)).data)
    except (NatsError, TimeoutError, msgspec.MsgspecError) as problem:
        raise OSError(f"the broker does not answer ({problem!r}); may this process create it?") from problem
    if reply.error is not None:
        if reply.error.err_code == EXISTS:
            return False
        raise OSError(str(reply.error))
    return not reply.delivered.consumer_seq
