"""How a running deployment is scheduled."""

import os
import sys

import pytest

from tests.pipeline.support import Deployment


@pytest.mark.skipif(sys.platform != "linux", reason="batch processes are Linux's")
def test_the_broker_and_all_processes_of_a_deployment_are_batch_processes(fast: Deployment) -> None:
    policies = {each.name: os.sched_getscheduler(each.pid) for each in fast.state.processes if each.pid is not None}
    assert set(policies.values()) == {os.SCHED_BATCH}
    assert policies.keys() >= {"nats", "router-0", "gateway-0", "worker-0"}
