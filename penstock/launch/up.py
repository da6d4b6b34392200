"""``penstock up``: broker, streams, workers, routers and gateways as supervised processes of this machine."""

import asyncio
import sys
from collections.abc import Callable, Sequence

from penstock.configs.logs import OutputStream, setup
from penstock.configs.up_settings import UpSettings
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.nats_server.binary import NoServerBinary, ServerFailed
from penstock.infra.nats_server.datadir import DataDirBusy, DataDirUnusable
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.infra.process import scheduling
from penstock.infra.process.sockets import CannotListen
from penstock.infra.process.supervisor import USAGE
from penstock.launch.deployment import Deployment, UpFailed, command
from penstock.launch.groups import PlanError
from penstock.launch.plan import PlannedProcess

FAILED = 1


def run(settings: UpSettings, *, command: Callable[[PlannedProcess], Sequence[str]] = command) -> int:
    """Run a deployment until Ctrl-C or SIGTERM; the exit status.

    Args:
        command: the command line of each process.

    0: stopped as asked. 1: it failed, and may succeed later. 2: it cannot run with these flags on this machine.
    130: a second Ctrl-C cut the stop short.
    """
    setup(settings.log_format, settings.log_level, name="up")
    if settings.scheduling == "batch":
        scheduling.batch()
    try:
        deployment = Deployment(settings, command=command)
        deployment.check()
        return asyncio.run(deployment.run())
    except (PlanError, BadArguments, DataDirUnusable) as error:
        return _explain(error, USAGE)
    except CannotListen as error:
        return _explain(error, USAGE if error.permanent else FAILED)
    except UpFailed as error:
        return _explain(error, error.status)
    except (ServerFailed, NoServerBinary, BrokerProblem, DataDirBusy, ValueError) as error:
        return _explain(error, FAILED)
    except OSError as error:
        return _explain(f"{error.filename}: {error.strerror}" if error.filename else error, FAILED)


def _explain(error: object, status: int) -> int:
    OutputStream(sys.stderr).write(f"penstock up: {error}\n")
    return status
