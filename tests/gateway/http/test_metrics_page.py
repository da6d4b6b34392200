"""The page at ``/metrics``."""

import threading
from types import SimpleNamespace

from penstock.gateway.http.app import _Api
from penstock.infra.metrics.scope import MetricScope


async def test_the_page_is_made_beside_the_event_loop_which_sends_answers_meanwhile() -> None:
    scope, threads = MetricScope(), []

    def value() -> float:
        threads.append(threading.current_thread())
        return 5.0

    scope.gauge("a", "asked for when the page is made").set_function(value)
    response = await _Api(SimpleNamespace(metrics=scope)).metrics(None)  # type: ignore[arg-type]
    assert b"penstock_a 5.0" in response.body
    assert threading.main_thread() not in threads
