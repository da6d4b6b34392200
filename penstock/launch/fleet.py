"""Which workers are registered right now, asked once: for the start of a deployment, not for serving."""

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from penstock.schemas import fleet
from penstock.schemas.subjects import Subjects


async def registered(nc: Client, subjects: Subjects) -> set[str]:
    """The names of workers with a live lease; empty if the broker does not answer."""
    js, stream = nc.jetstream(), f"KV_{subjects.bucket('workers')}"
    names = set()
    try:
        info = await js.stream_info(stream, subjects_filter=subjects.lease(">"))
        for key in info.state.subjects or ():
            message = await js.get_last_msg(stream, key, direct=True)
            if message.data:  # else the marker of a lease that ended
                names.add(fleet.decode(message.data).name)
    except (NatsError, TimeoutError, msgspec.DecodeError):  # a key may end between the two questions
        pass
    return names
