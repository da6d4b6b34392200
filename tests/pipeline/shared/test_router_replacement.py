"""The only router of a deployment is killed or stopped, and its supervisor starts another one."""

import signal

import pytest

from tests.pipeline.fleet.test_survival import SLOW_MACHINE_S, longest_wait
from tests.pipeline.support import Deployment


@pytest.mark.parametrize(
    ("strike", "bound_s"), [(signal.SIGKILL, 2.0), pytest.param(signal.SIGSTOP, 5.0, marks=pytest.mark.slow)]
)
async def test_the_only_router_is_replaced_before_requests_have_waited_long(
    fast: Deployment, strike: signal.Signals, bound_s: float
) -> None:
    """1.5 s after SIGKILL and 3 s after SIGSTOP on an idle machine."""
    assert await longest_wait(fast, strike) < bound_s + SLOW_MACHINE_S
