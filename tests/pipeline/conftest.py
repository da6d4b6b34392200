"""Deployments of the real processes on a real nats-server.

``new_deployment`` starts one for a module. What has no need of its own is in ``shared/``, ``demo/`` and ``pairs/``.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.pipeline.support import Deployment, Oracle

NewDeployment = Callable[..., Deployment]


def deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewDeployment]:
    """Start ``penstock up`` with further flags; all that were started end in good order."""
    started: list[Deployment] = []

    def start(*flags: str, **variables: str) -> Deployment:
        deployment = Deployment(tmp_path_factory.mktemp("up"), *flags, **variables)
        started.append(deployment)
        return deployment

    yield start
    statuses = [deployment.stop() for deployment in started]  # one after the other: each has seconds to end in
    assert statuses == [0] * len(started)
    assert [deployment.killed() for deployment in started] == [[]] * len(started)


# A module's own deployments end with it: dozens of processes that idle, and that end all at once, are load too.
new_deployment = pytest.fixture(scope="module", name="new_deployment")(deployments)


@pytest.fixture(scope="package")
def oracle() -> Oracle:
    return Oracle()
