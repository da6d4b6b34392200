"""FastStream on a connection that Penstock opened: handlers of jobs, and of messages that are not stored.

FastStream's own connection wraps the error callback in one that can raise inside the reconnect task, after which the
client never connects again. Its pull subscriber has no request open while a handler runs, and hangs the event loop
when the connection is closed. So ``jobs`` makes a subscriber of FastStream's whose subscription is a ``Puller``.

Only this module touches FastStream's private parts.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import UnionType
from typing import Any, cast, get_args

import msgspec
import structlog
from faststream import AckPolicy
from faststream._internal.broker.registrator import Registrator
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.endpoint.subscriber.utils import default_filter
from faststream.exceptions import StopConsume
from faststream.middlewares import BaseMiddleware
from faststream.nats import JStream, NatsBroker, NatsMessage
from faststream.nats.subscriber.config import NatsSubscriberConfig, NatsSubscriberSpecificationConfig
from faststream.nats.subscriber.specification import NatsSubscriberSpecification
from faststream.nats.subscriber.usecases import LogicSubscriber
from faststream.nats.subscriber.usecases.stream_basic import StreamSubscriber
from nats.js.api import ConsumerConfig

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.jetstream import Message
from penstock.infra.bus.puller import Puller

log = structlog.get_logger("bus")

GRACE_S = 5.0  # for handlers that run when their subscriber is stopped

Subscriber = LogicSubscriber[Any]
Remake = Callable[[str], Awaitable[bool]]


class Specification(NatsSubscriberSpecification):
    """What ``faststream docs`` says of a subscriber: the payload's schema is msgspec's.

    FastStream's own makes a Pydantic model of the handler's parameters, which fails for the Structs of
    ``penstock.schemas``.

    Args:
        payload: the type on the wire, or a union of them.
    """

    def __init__(
        self, outer: Any, config: NatsSubscriberSpecificationConfig, calls: "CallsCollection[Any]", payload: Any
    ) -> None:
        super().__init__(outer, config, calls)
        self._payload = payload

    def get_payloads(self) -> list[tuple[dict[str, Any], str]]:
        types = get_args(self._payload) if isinstance(self._payload, UnionType) else (self._payload,)
        payloads = []
        for type_ in types:
            (schema,), components = msgspec.json.schema_components((type_,), ref_template="#/$defs/{name}")
            body = components.pop(schema["$ref"].rpartition("/")[2]) if "$ref" in schema else schema
            payloads.append(({"title": type_.__name__, **body, "$defs": components}, type_.__name__))
        return payloads


class JobSubscriber(StreamSubscriber):
    """Hands the messages of a durable pull consumer to one handler, in order, one at a time.

    As many are requested as ``room()`` returns, and requests stay open while the handler runs (see ``Puller``). The
    handler acknowledges. A message that cannot be decoded is terminated and logged. What a handler raises is logged,
    and its message is delivered again after the consumer's ``ack_wait``.

    A message that needs nothing of FastStream's is decoded and handed over without ``process_message``: 1.3 µs of CPU
    time instead of 50 (``python -m tests.perf.jobs``). With a middleware, a second handler, a test client, or a handler
    that wants a context or a dependency, it takes FastStream's own way.
    """

    subscription: Any  # a ``Puller``, or None

    def __init__(
        self,
        config: NatsSubscriberConfig,
        specification: Specification,
        calls: "CallsCollection[Any]",
        *,
        bus: Bus | None,
        stream: JStream,
        consumer: str,
        room: Callable[[], int],
        decode: Callable[[Message], Any],
        remake: Remake | None,
    ) -> None:
        super().__init__(config, specification, calls, stream=stream, queue="")
        self._bus = bus
        self._consumer = consumer
        self._room = room
        self._decode = decode
        self._remake = remake
        self._decoder = self._decode_message
        self._plain: Callable[[Any], Awaitable[Any]] | None = None  # the handler, if it wants nothing of FastStream

    # --- start and stop ---

    async def _create_subscription(self) -> None:
        if self.subscription is not None:
            return
        assert self._bus is not None, "this broker was made for its documentation or for a test client"
        self.running = True  # before the first message can come: ``consume`` drops what comes earlier
        self.subscription = Puller(
            self._bus, self.stream.name, self._consumer, self.consume, self._room, remake=self._remake
        )
        await self.subscription.start()

    async def top_up(self) -> None:
        """As ``Puller.top_up``; nothing happens before the start."""
        if self.subscription is not None:
            await self.subscription.top_up()

    def missing_s(self, now: float) -> float:
        """As ``Puller.missing_s``."""
        return self.subscription.missing_s(now) if self.subscription is not None else 0.0

    async def stop(self) -> None:
        """Request nothing more, handle what is on its way, and end."""
        if self.subscription is not None:
            await self.subscription.drain()
        await self.close()

    async def close(self) -> None:
        """End at once: what the server still sends is delivered again to someone else."""
        puller, self.subscription = self.subscription, None
        self.running = False
        if puller is not None:
            await puller.close()
        await super().stop()

    # --- messages ---

    async def consume(self, msg: Any) -> None:
        """Handle one message. Does not raise: FastStream's own says nothing about errors either."""
        if not self.running:
            return
        try:
            handler = self._plain
            if handler is None or self.calls[0].handler.is_test or self._broker_middlewares:
                await self.process_message(msg)
            else:
                try:
                    work = self._decode(msg)
                except Exception as error:
                    await _unreadable(msg, error)
                else:
                    await handler(work)
        except UnreadableJob:
            pass
        except (StopConsume, SystemExit) as error:
            await self.close()
            if isinstance(error, SystemExit) and (app := self._outer_config.context.get("app")):
                app.exit()
        except Exception:
            log.exception("handler_failed", subject=msg.subject, action="its message is delivered again")

    async def _decode_message(self, message: NatsMessage) -> Any:
        return self._decode(message.raw_message)

    async def _decode_or_terminate(self, decoder: Callable[[Any], Awaitable[Any]], message: Any) -> Any:
        """
        Raises:
            UnreadableJob: the message cannot be decoded, and is terminated.
        """
        try:
            return await decoder(message)
        except Exception as error:
            await _unreadable(message.raw_message, error)
            raise UnreadableJob(str(error)) from error

    def _get_parser_and_decoder(self, *of_item: Any, **named: Any) -> Any:
        parser, decoder = super()._get_parser_and_decoder(*of_item, **named)
        return parser, partial(self._decode_or_terminate, decoder)

    def _build_fastdepends_model(self) -> None:
        super()._build_fastdepends_model()
        self._plain = self._handler_without_wishes()

    def _handler_without_wishes(self) -> Callable[[Any], Awaitable[Any]] | None:
        """The handler, if all it takes is the decoded message."""
        config, options = self._outer_config, self._call_options
        if len(self.calls) != 1:
            return None
        call = self.calls[0]
        model = call.dependant
        if (
            call.filter is not default_filter
            or any((call.item_parser, call.item_decoder, options.parser, options.decoder, options.codec))
            or any((config.broker_parser, config.broker_decoder, config.broker_codec))
            or call.handler._publishers
            or model is None
            or getattr(model, "serializer", self) is not None  # parameters are cast
            or any((model.dependencies, model.extra_dependencies, model.custom_fields))
            or len(model.params) != 1
            or model.args_name
            or model.kwargs_name
            or not inspect.iscoroutinefunction(call.handler._composed_call)
        ):
            return None
        return call.handler._composed_call


class UnreadableJob(Exception):
    """A message could not be decoded: it is terminated and logged."""


async def _unreadable(message: Any, error: Exception) -> None:
    """Terminate a message that cannot be decoded; it would be delivered again forever."""
    log.error("job_unreadable", subject=message.subject, error=str(error))
    await message.term()


class BusBroker(NatsBroker):
    """A FastStream broker over an open ``Bus``, which keeps owning the connection.

    Parameters of handlers are not cast: what a decoder returns is what the handler gets.

    Args:
        bus: None: for documentation, and for FastStream's ``TestNatsBroker``.
        middlewares: of all subscribers.
    """

    def __init__(self, bus: Bus | None, *, middlewares: Sequence[type[BaseMiddleware]] = ()) -> None:
        super().__init__(serializer=None, logger=None, graceful_timeout=GRACE_S, middlewares=middlewares)
        self._bus = bus
        self._kept: set[Subscriber] = set()  # FastStream refers weakly to those that can be removed

    async def _connect(self) -> Any:
        assert self._bus is not None, "this broker was made for its documentation or for a test client"
        self.config.connect(self._bus.nc)
        return self._bus.nc

    def jobs(
        self,
        subject: str,
        *,
        stream: str,
        consumer: str,
        room: Callable[[], int],
        decode: Callable[[Message], Any],
        payload: Any,
        title: str,
        remake: Remake | None = None,
    ) -> JobSubscriber:
        """A subscriber for the messages of a durable pull consumer. Decorate one handler with it, and ``start`` it.

        Args:
            subject: of the messages, for documentation and test clients; the consumer has its filter.
            room: how many more messages could be started now. Call ``top_up`` when there is more.
            decode: makes of a message what the handler gets. It may raise: then the message is terminated.
            payload: the type on the wire, or a union of them, for documentation.
            title: of this subscriber there.
            remake: as in ``Puller``.
        """
        calls: CallsCollection[Any] = CallsCollection()
        outer = cast(Any, self.config)
        subscriber = JobSubscriber(
            NatsSubscriberConfig(
                subject=subject,
                sub_config=ConsumerConfig(durable_name=consumer, filter_subjects=[]),
                extra_options={},
                no_reply=True,
                _outer_config=outer,
                _ack_policy=AckPolicy.MANUAL,
            ),
            Specification(
                outer,
                NatsSubscriberSpecificationConfig(subject=subject, queue=None, title_=title, description_=None),
                calls,
                payload,
            ),
            calls,
            bus=self._bus,
            stream=JStream(stream, declare=False),
            consumer=consumer,
            room=room,
            decode=decode,
            remake=remake,
        )
        Registrator.subscriber(self, subscriber, persistent=False)
        self._kept.add(subscriber)
        return subscriber

    def orders(
        self, subject: str, decode: Callable[[bytes], Any], *, payload: Any, title: str, at_once: int = 1
    ) -> Subscriber:
        """A subscriber for messages that are not stored. What its handler returns is the answer.

        Args:
            decode: makes of a message's body what the handler gets.
            payload: the type on the wire, or a union of them, for documentation.
            title: of this subscriber there.
            at_once: how many run at once.
        """

        async def decoder(message: NatsMessage) -> Any:
            return decode(message.body)

        subscriber: Subscriber = self.subscriber(
            subject, decoder=decoder, persistent=False, max_workers=at_once, title=title
        )
        old = cast(Any, subscriber.specification)
        subscriber.specification = cast(Any, Specification(old._outer_config, old.config, old.calls, payload))
        self._kept.add(subscriber)
        return subscriber

    async def remove(self, subscriber: Subscriber) -> None:
        """Stop a subscriber of ``jobs`` or ``orders``, and forget it. FastStream itself never forgets one."""
        try:
            await subscriber.stop()
        finally:
            self._subscribers.discard(subscriber)
            self._kept.discard(subscriber)
