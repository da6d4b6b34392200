"""The page docs/log-events.md: every event that processes log, from the calls in the code and the sentences here.

Level, fields and role come from the syntax tree. What an event means is said in ``MEANINGS``; an event without a
sentence, or a sentence without an event, is an error.
"""

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "log-events.md"
LEVELS = ("error", "warning", "info")  # debug is for developers
ADVICE = ("action", "fix", "effect")  # fields that say what happens next, or what to do

# By where the call is; the longest that fits.
ROLES = {
    "gateway": "gateway",
    "router": "router",
    "workers": "worker",
    "penstock/launch": "`up`",
    "infra/nats_server": "`up`, `nats`",
    "penstock/planner": "`plan`",
    "penstock/log_tools/traces": "`trace`",
    "penstock/operate/dashboard": "`dashboard`",
    "infra/bus": "all",
    "infra/metrics": "all",
    "infra/model": "all",
    "configs": "all",
    "infra": "commands",
    "penstock": "commands",
}

INTRO = """\
# Log events

Processes log to stderr: text on a terminal, else one JSON object a line (`--log-format`). Every line has `timestamp`,
`level`, `event`, `logger` and `process`. Lines about a request have its id as `request`, `exception` is a traceback,
and `action`, `fix` and `effect` say what happens next or what to do. `--log-level warning` leaves out the last table.
These events have no text of prompts or answers; an engine's exception in `error` may quote some.

```sh
jq -c 'select(.level == "error")' .penstock/logs/*.log
```

Events of level `debug` are left out, and those of libraries (uvicorn, engines). This page is generated from the code
(`python -m tests.generated`).
"""
HEADINGS = {"error": "Errors", "warning": "Warnings", "info": "Information"}


class Event(NamedTuple):
    """One event at one level, of all calls that log it."""

    name: str
    level: str
    roles: tuple[str, ...]
    fields: tuple[str, ...]
    advice: tuple[str, ...]  # texts of ``ADVICE`` that are written in the call


class Call(NamedTuple):
    """One call of a logger; ``role``: of the process that makes it."""

    name: str
    level: str
    role: str
    fields: tuple[str, ...]
    advice: tuple[str, ...]


def page() -> str:
    """The whole page, as the code has it.

    Raises:
        ValueError: an event has no meaning, a meaning no event, or a call's event cannot be found.
    """
    found = events()
    named = {event.name for event in found}
    if missing := sorted(named - MEANINGS.keys()):
        raise ValueError(
            f"say in MEANINGS of tests/generated/log_events.py what these events mean: {', '.join(missing)}"
        )
    if left := sorted(MEANINGS.keys() - named):
        raise ValueError(f"nothing logs these events of MEANINGS in {__name__}: {', '.join(left)}")
    return INTRO + "".join(map(_section, LEVELS, ([e for e in found if e.level == level] for level in LEVELS)))


@functools.cache
def events() -> list[Event]:
    """Every event of the levels shown, sorted by name; an event with two levels comes twice."""
    calls: dict[tuple[str, str], list[Call]] = {}
    for folder in ("configs", "gateway", "infra", "penstock", "router", "workers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for call in calls_of(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).as_posix()):
                if call.level in LEVELS:
                    calls.setdefault((call.name, call.level), []).append(call)
    return [
        Event(
            name,
            level,
            tuple(dict.fromkeys(call.role for call in same)),
            tuple(dict.fromkeys(field for call in same for field in call.fields)),
            tuple(dict.fromkeys(text for call in same for text in call.advice)),
        )
        for (name, level), same in sorted(calls.items())
    ]


def calls_of(tree: ast.Module, path: str) -> Iterator[Call]:
    """Calls of a module's logger, which is always named ``log``."""
    role = next(ROLES[part] for part in sorted(ROLES, key=len, reverse=True) if path.startswith(f"{part}/"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen: set[int] = set()
    for function in reversed(functions):  # inner ones first: they come later
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or id(node) in seen or not (levels := _levels(node.func)):
                continue
            seen.add(id(node))
            shown = [word for word in node.keywords if word.arg != "exc_info"]
            fields = [word.arg or "…" for word in shown]
            if ast.unparse(node.func) == "log.exception" or len(shown) < len(node.keywords):
                fields.append("exception")
            advice = [text for word in shown if word.arg in ADVICE for text in _texts(word.value)]
            names, passed = _names(node.args[0], function, tree)
            if not names:
                raise ValueError(f"{path}:{node.lineno}: the name of this event cannot be found")
            fields = [field for field in fields if field != "…" or not passed] + passed
            for name, level in itertools.product(names, levels):
                yield Call(name, level, role, tuple(fields), tuple(advice))


def _levels(function: ast.expr) -> tuple[str, ...]:
    """The levels at which a call logs; none if it is no call of a logger."""
    match function:
        case ast.Attribute(value=ast.Name(id="log"), attr="exception"):
            return ("error",)
        case ast.Attribute(value=ast.Name(id="log"), attr=attr):
            return (attr,) if attr in LEVELS else ()
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="log"), _]):  # chosen at run time
            return ("error", "warning")
    return ()


def _names(
    first: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef, tree: ast.Module
) -> tuple[list[str], list[str]]:
    """What an event may be called, and the fields that callers pass on to a function that logs for them."""
    match first:
        case ast.Constant(value=str(name)):
            return [name], []
        case ast.IfExp(body=body, orelse=orelse):
            return _names(body, function, tree)[0] + _names(orelse, function, tree)[0], []
        case ast.Name(id=variable):
            if any(argument.arg == variable for argument in function.args.args):
                callers = [
                    node
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function.name
                ]
                names = [name for call in callers for name in _names(call.args[0], function, tree)[0]]
                return names, [word.arg for call in callers for word in call.keywords if word.arg]
            values = [
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [variable]
            ]
            return [name for value in values for name in _names(value, function, tree)[0]], []
    return [], []


def _texts(value: ast.expr) -> list[str]:
    match value:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)]  # type: ignore[misc]
    return []


def _section(level: str, found: list[Event]) -> str:
    lines = [f"\n## {HEADINGS[level]}\n", "| event | where | fields | meaning |", "|---|---|---|---|"]
    for event in found:
        fields = " ".join(f if f == "…" else f"`{f}`" for f in event.fields) or "–"
        texts = "; ".join((MEANINGS[event.name], *event.advice)).replace("|", "\\|")
        lines.append(f"| `{event.name}` | {', '.join(event.roles)} | {fields} | {texts} |")
    return "\n".join(lines) + "\n"


MEANINGS = {
    "abort_unanswered": "TensorRT-LLM did not confirm that it stopped a request",
    "adapter_entry_unreadable": "an entry of a LoRA adapter on the broker is of another version; it is ignored",
    "adapter_failed": "a LoRA adapter cannot be served by this worker; `error` says why",
    "adapter_kept": "SGLang did not unload an unused LoRA adapter; it stays in memory",
    "adapter_loaded": "a LoRA adapter is served, by this id: its name and a digest of its content",
    "adapter_slots": "there is room for so many LoRA adapters on the device",
    "adapter_unloaded": "a LoRA adapter is no longer served, or was replaced",
    "adapters_not_followed": "loaded and unloaded adapters are not known: the bucket cannot be read",
    "adopted_outputs": "how TensorRT-LLM's answers from another engine's KV begin, found by a probe",
    "another_planner_decides": "another planner of this model holds the lease; this one waits",
    "answer_completed_from_record": "the end of an answer did not come as tokens and was taken from its record",
    "answer_completed_from_tokens": "the rest of an answer was read from the stream of tokens",
    "answer_lost": "a part of an ended request's text is lost: clients that read it get an error",
    "answer_not_completed": "looking for the rest of an answer failed; it is tried again",
    "ask_without_reply": "a call over NATS had no reply subject and was dropped",
    "asked_to_stop": "a node that only computes received SIGTERM; the worker drains",
    "attempt_reopened": "an attempt had ended and the next one was not placed: its request is recovered again",
    "attempt_not_revoked": "a lost worker could not be stopped; its output is ignored",
    "batch_ended": "a batch has its files; `status` is how it ended, `failed` how many of its lines have no answer",
    "batch_failed": "a bug ended this gateway's work on a batch; a gateway continues it after 5 s",
    "batch_interrupted": "the broker was away too long to drive a batch; the first gateway to reach it continues",
    "batch_left": "another gateway drives the batch now: this one was too slow to renew its lease",
    "batch_line_failed": "a bug in the gateway ended a line of a batch; its result is an error",
    "batch_log_refused": "the broker does not store results of a batch, which waits: BATCHES or the disk is full",
    "batch_unreadable": "an entry of the bucket of batches cannot be read; a newer build may have written it",
    "batches_unavailable": "files and batches cannot be read; run `penstock streams apply`",
    "records_missing": (
        "a broker cannot read records of ended requests: their bytes are damaged on its disk, or they were deleted by "
        "hand; `requests` shows what remains of them as unknown"
    ),
    "block_damaged": "a stopped broker's file has a damaged block; the rest was read",
    "prompts_kept_shorter": "prompts will be deleted before the promised 7 days; their records stay",
    "options_left_out": "the server of `--engine openai` refuses these options: they have no effect, as answers say",
    "prompts_sent_as_text": (
        "prompts go to the server of `--engine openai` as text, since it counts other tokens than the model's tokenizer"
    ),
    "server_connection_lost": (
        "a connection to the server of `--engine openai` broke; the answer continues after its last token, if the "
        "server is there"
    ),
    "server_refuses": (
        "the server of `--engine openai` refuses the worker itself, for example its key; the request failed"
    ),
    "server_has_chats_only": "the server of `--engine openai` has no completions, so it is asked for chats",
    "server_ready": "the server of `--engine openai` answers, and what it can do",
    "sleep_refused": "a worker was asked to sleep and cannot, or requests still run; `error` says why",
    "streams_made_again": "the broker had lost its store; `up` or `nats` created the streams again",
    "streams_not_divided": "the streams of a cell could not be resized for another number of cells",
    "streams_not_applied": "after a restart of the broker its streams could not be read or created; tried again",
    "broker_restarts": "`up` starts the broker again after its disk was full",
    "audit": "a change, or a read of another tenant's requests; stored in the audit log, too",
    "audit_entry_unreadable": "an entry of the audit log is of a later release, and is left out",
    "audit_not_stored": "an entry is in this log only, because the broker does not store it",
    "audit_stream_missing": "a change is not in the audit log, because the broker has no stream for it yet",
    "streams_awaited": "the broker has no streams yet; this process waits for them",
    "broker_awaited": "no broker answers yet; this process waits for it",
    "broker_away": "the broker of a cell after the first does not answer a starting gateway; other cells serve",
    "budget_unreadable": "a key's stored counters cannot be read; they start from zero",
    "bus_closed": "the connection to the broker is closed for good",
    "bus_disconnected": "the connection to the broker is lost; the process reconnects",
    "bus_error": "the broker or its client reported an error",
    "bus_reconnected": "the connection to the broker is back",
    "calls_of_models_not_taken": "calls for new models that other gateways forward are not received; tried again",
    "cell_not_opened": (
        "a gateway reached the broker of a cell, but something that it needs there is missing; tried again"
    ),
    "cells_not_set": "`up` refused another number of cells; `error` says why, and nothing was changed",
    "change_failed": "a bug stops `up` from making one kind of change to the deployment; running processes continue",
    "cells_set": "`up` has another number of cells that take new requests; `restart` restarts the affected processes",
    "cell_opened": "the broker of a cell, which was away when this gateway started, is there: the cell is used",
    "catch_up_failed": "past tokens could not be read; the requests concerned fail",
    "caught_up": "the planner has read its predecessors' decisions",
    "certificate_dates_unknown": "the dates of the HTTPS certificate cannot be read",
    "certificate_expires_soon": "the HTTPS certificate expires soon",
    "certificate_loaded": "new HTTPS certificate files are in use",
    "certificate_not_loaded": "changed HTTPS certificate files cannot be used",
    "certificate_not_valid": "clients refuse the HTTPS certificate: it is expired, or not valid yet",
    "clock_differs": "this machine's clock is off by more than a second; the broker's time is used",
    "close_incomplete": "closing the connection took too long and was abandoned",
    "connections_not_accepted": "no file descriptor is left, of the process or of the machine: connections wait, and "
    "the gateway tries again every 0.25 s",
    "connections_limited": "fewer connections than asked for, because of the limit of open files",
    "requests_malformed": "clients sent TLS, HTTP/2, the PROXY protocol or no HTTP; so many since the start",
    "connections_refused": "connections beyond `--max-connections` were refused",
    "consumer_lost": "a worker's consumer was deleted and could not be made again",
    "consumer_made_again": "a consumer that the broker had lost was created again",
    "consumer_missing": "a consumer is missing and cannot be created",
    "content_not_stored": "the content of a `no_store` request could not be passed on",
    "contents_left_deleted": "content that a dead gateway had left in memory storage was deleted",
    "contents_not_deleted": "content of a `no_store` request could not be deleted; it expires",
    "contents_not_put_again": "after the broker's restart, content of `no_store` requests could not be stored again",
    "contents_put_again": "after the broker's restart, content of open `no_store` requests was stored again",
    "cpu_threads": "how many threads torch uses",
    "crash_journal_unusable": "the requests of a worker cannot be recorded: a crash will not name them",
    "cuda_without_kernels": "the native engine runs without its own kernels, and slower",
    "decision_not_stored": "the planner could not store its decision and did nothing",
    "decision_unreadable": "a stored decision of a planner is of another release, or damaged",
    "decode_without_graphs": "CUDA graphs for decode could not be captured: slower steps",
    "deleted_request_erased_again": "part of a deleted request was stored again, or a broker had it after its restart, "
    "or a replica was away",
    "deleted_requests_not_erased": "messages of deleted requests that reappeared could not be erased; tried again",
    "deletion_unreadable": "an entry about a deleted request was written by a later release and is skipped",
    "deletion_waits": (
        "a replica of a stream is away and would keep its copy: the request is erased when the replica is back, or "
        "after ten minutes; it is hidden meanwhile"
    ),
    "deletions_unknown": "the bucket of deletions cannot be read: messages of deleted requests that reappear stay",
    "diffusion_request_failed": "generating an image or a video failed",
    "store_removed": "the broker's folder was removed while it runs, and it confirms messages that it will lose",
    "disk_check_failed": "free space on the broker's disk could not be read",
    "disk_full": "the broker's disk is full, new requests get 503",
    "disk_nearly_full": "the broker's disk is filling",
    "drafts_without_graphs": "CUDA graphs for draft tokens could not be captured: slower steps",
    "drain_cut_short": "the worker was asked to stop without waiting for its requests",
    "drain_timeout": "requests were left at the end of `--drain-s` and go to other workers",
    "draining": "the worker takes no new requests and finishes its own",
    "ended_request_not_read": "a request ended that was left in the log while it was held, and its record lacks it",
    "engine_argument": "an engine argument is wrong or slow, by the rules of `penstock recipe check`",
    "engine_argument_dropped": "the installed engine does not know an argument",
    "engine_dead": "the engine's processes have ended; the worker ends, too",
    "engine_diagnosis": "a known problem in the engine's log, with advice",
    "engine_failed": "the engine failed: the worker ends, and its requests go to others",
    "engine_health": "where the worker reads whether TensorRT-LLM is alive",
    "engine_queue_unreadable": "TensorRT-LLM's queue of events or statistics cannot be read",
    "engine_ready": "the model is loaded",
    "engine_shutdown_failed": "the engine did not shut down cleanly",
    "engine_silent": "the engine has had work for a while and returned nothing",
    "engine_stop_timeout": "the engine did not stop in time",
    "engine_task_failed": "a task beside the engine failed",
    "engine_tasks_still_running": "threads of the engine did not end in time",
    "finish_publish_failed": "the end of a request could not be published; its job is delivered again",
    "forced_exit": "a second signal: the process ends at once",
    "gateway_added": "`up` has started another gateway, since all were busy and cores were idle",
    "gateway_leaves": "a gateway that is no longer needed accepts no connections, and ends with its last one",
    "gateway_leaving": "the gateway was asked to accept no connections, and ends with its last one",
    "gateway_left": "a gateway that is no longer needed has ended",
    "gateway_listening": "the gateway serves",
    "gateway_not_added": "`up` could not start another gateway, or it did not serve; tried again while it is needed",
    "gateway_stopping": "the gateway drains",
    "generation_default_ignored": "a default in the model's `generation_config.json` is out of range",
    "graphs_captured": "CUDA graphs of the native engine: how many, the most tokens of a step with prompts that one "
    "computes, and the memory and seconds that this took",
    "gpus_unread": "NVIDIA's library failed unexpectedly; until it works, GPU usage is shown as unknown",
    "handler_failed": "the handler of a job raised an error",
    "handoff_state_unpackable": "TensorRT-LLM's state for a handoff has an unknown form: decode computes the prompt",
    "handoff_state_unusable": "a ticket of another release of TensorRT-LLM",
    "handoff_token_differs": "vLLM computed a different first token than the prefill worker reported",
    "http_handler_failed": "an HTTP request failed unexpectedly: 500",
    "http_request": "one line for each HTTP request (`--access-log`)",
    "index_damaged": "a stopped broker's index is damaged; its blocks were read instead",
    "index_loaded": "a router has a worker's whole cache, from the worker",
    "index_restored": "a router has its prefix index, from a snapshot",
    "index_snapshot_not_saved": "the prefix index could not be stored: a slower next start",
    "index_snapshot_wrong": "a stored prefix index is damaged; workers are asked instead",
    "job_not_found": "a lost worker's job is not in the log any more: the request is placed again as REQUESTS has it, "
    "or the client gets an error at its deadline",
    "job_not_stored": "a job could not be published; the request is placed again",
    "job_rejected": "a worker cannot run a job; its request ends, or goes to another worker",
    "job_retention_failed": "unfinished jobs could not be published again; tried again",
    "job_unreadable": "a job cannot be decoded",
    "jobs_republished": "unfinished jobs were copied to the end of their stream, so that they do not expire",
    "requests_stored_again": "a restarted broker had lost open requests: their gateway has stored them again",
    "key_added": "an API key was made",
    "key_changed": "an API key was changed",
    "key_revoked": "an API key was revoked",
    "key_unreadable": "a stored API key cannot be read, and is refused",
    "keys_found": "a gateway whose broker had lost all API keys knows some again",
    "keys_lost": "this gateway has known keys and the broker has none: every request is refused",
    "keys_not_noted": "the existence of keys could not be recorded in the data folder",
    "keys_read": "the number of API keys at the start",
    "kv_batch_unreadable": "a worker's KV events cannot be decoded; the worker is asked for its cache",
    "kv_capacity_unknown": "the number of the engine's KV blocks is a guess",
    "kv_event_malformed": "the engine sent a KV event that was skipped",
    "kv_events_lost": "the engine's KV events have a gap",
    "kv_events_off": "the engine announces no blocks: routing without cache hits",
    "kv_events_publish_failed": "KV events could not be published; routers see the gap and ask for the worker's cache",
    "kv_events_published": "where `--event-plane zmq` publishes KV events",
    "kv_events_refused": "a publisher of KV events is not one that this worker expects",
    "kv_events_thread_still_running": "the thread of the KV events did not end in time",
    "kv_events_unreadable": "an engine's KV events cannot be decoded",
    "kv_never_came": "blocks of a handoff never came: the request is computed here",
    "kv_publisher_lost": "an engine's publisher of KV events is gone",
    "last_life_ended": "the reason why this worker's previous process ended",
    "leader_lost": "node 0 of the engine is gone; this node ends, too",
    "lease_expired": "a reader did not fetch its blocks in time; they are free",
    "lease_lost": "a lease has ended: a worker registers again, and its requests continue elsewhere",
    "lease_renewal_failed": "a worker's lease could not be renewed; tried again until it ends",
    "lease_renewal_rejected": "the broker refused to renew a lease; tried again until it ends",
    "lease_unknown": "the planner's lease could not be read",
    "lease_unreadable": "a registered worker or router of a later build cannot be read, and is left out",
    "ledger_publish_failed": "lines of the ledger of handoffs are lost (`penstock leases` only)",
    "load_unknown": "the planner could not read load or latencies and decides nothing",
    "log_end_unknown": "the end of a stream could not be read; tried again",
    "log_fell_behind": "a reader is far behind the end of a stream and reads larger batches",
    "log_handler_failed": "one message of a stream was handled wrongly and skipped",
    "log_repair_failed": "a gap in a stream could not be read again; tried again, and said again each minute",
    "lost_jobs_unknown": "the broker did not say which jobs it has lost since it restarted; asked again",
    "jobs_lost": "a restarted broker has lost jobs that workers may not have got: their requests are placed again",
    "log_lines_lost": "nobody read this process's output, so lines of its log are lost",
    "log_rewound": "a reader had passed over messages that a broker stored after it had lost others: they are read now",
    "log_repaired": "a stream is read again after `log_repair_failed`",
    "log_unreadable": "the log could not be read; tried again",
    "logits_processor_failed": "your logits processor raised an error",
    "memory_streams_missing": "streams for `no_store` are missing: such requests are refused",
    "memory_streams_renewed": "the broker had lost its memory streams",
    "message_unreadable": "a message cannot be decoded and is left out of traces",
    "messages_damaged": "messages of a stopped broker are damaged and left out",
    "migration_failed": "a bug kept a request from moving to another cell; tried again",
    "migration_postponed": "a cell does not answer while a request moves between cells; tried again",
    "migration_unreadable": "a job for another cell cannot be decoded, and is left",
    "model_forgotten": "a learned model has had no worker for an hour: its requests are refused from now on",
    "model_learned": "a worker registered a model that this gateway did not know, and serves from now on",
    "model_loaded": "tokenizer and chat template of a model were read",
    "model_not_loaded": "a model's tokenizer or chat template cannot be read: its requests get 503; it is tried again",
    "model_unloaded": "a model left the gateway's memory; the next request reads it again",
    "models_owned": "which models this router places now",
    "native_metrics_off": "metrics of TensorRT-LLM are not on the page",
    "no_disconnect_events": "no user of the system account",
    "no_index_snapshot": "no stored prefix index: workers are asked for their caches",
    "no_position": "the exporter of traces starts at the present",
    "no_request_yet": "no request of the model has ended since the planner started; it decides once one has",
    "no_snapshot": "no stored state: the router reads the whole log",
    "no_verdicts": "the bucket of poisonous requests is missing, or may not be read; tried again",
    "node_ended": "the worker has ended, and with it this node",
    "node_joined": "a node of the engine is there",
    "node_refused": "a node has another engine, version or model than node 0",
    "node_starts": "all nodes are there; the engine starts",
    "node_stops": "another node of the engine was asked to stop; the worker drains",
    "numpy_not_installed": "many targets, and no numpy",
    "operator_refused": "the broker refused the operator's password that was entered on the dashboard",
    "one_token_refused": "TensorRT-LLM refused to compute a prompt for a handoff",
    "output_unconfirmed": "the broker did not confirm in time that it has the output of a request with `no_store`",
    "peer_connect_failed": "NIXL cannot connect to another worker: blocks from there are computed here",
    "peer_connected": "NIXL is connected to another worker",
    "placement_failed": "placing a request failed unexpectedly; it is delivered again",
    "placement_postponed": "a request could not be placed now; it is delivered again",
    "planning": "the planner runs",
    "poisonous_request_repeated": "a request that crashed its workers was sent again",
    "position_not_saved": "the exporter's position could not be stored: spans may be sent twice",
    "prefix_not_read": "a prompt's prefix could not be read from another worker's cache; it is computed",
    "process_at_a_standstill": "a process does not answer",
    "process_drained": "a worker was drained and stays down",
    "process_ended": "a process ended and is restarted",
    "process_killed": "a process did not stop in time",
    "progress_publish_failed": "progress of an image could not be published",
    "prompt_logprobs_incomplete": "the engine left out log-probabilities of a prompt",
    "prompt_not_computed": "SGLang's prefill of a pair failed",
    "prompt_not_fetched": "SGLang's decode did not get its prompt",
    "prompts_without_cudnn": "attention of prompts runs without cuDNN, and slower",
    "prompts_without_graphs": "CUDA graphs for prompts, or some of them, could not be captured: slower short prompts",
    "publish_failed": "a message could not be published; it is sent again",
    "publish_refused": "the broker refused a message: its stream is full, or the user may not",
    "pull_failed": "asking for messages failed; tried again",
    "pull_not_retired": "a pull could not be ended; its messages are delivered again",
    "pull_refused": "the broker ended a pull; a new one follows",
    "pull_silent": "a pull did not answer; a new one follows",
    "rank_lost": "a process of a native engine over several GPUs has ended, and its worker with it",
    "ranks_ready": "all processes of a native engine over several GPUs have loaded",
    "ranks_without_peer_memory": "sums over the GPUs of one engine are all NCCL's: slower small steps",
    "reader_task_failed": "a handoff's reader failed; the prompt is computed",
    "ready": "`up`: all processes serve",
    "reconnect_hook_failed": "a step after a reconnect failed",
    "record_unreadable": "a record cannot be decoded and is not listed",
    "recorded_request_unreadable": "a stored request is of a later release, or damaged",
    "recording_lines_skipped": "lines of the mock engine's recording cannot be used",
    "records_kept_shorter": "records will be deleted before the promised 7 days",
    "recovery_failed": "an error of ours in the recovery of one request; tried again half a minute later",
    "recovery_postponed": "requests of a lost worker could not be placed again now; tried again",
    "registration_unreadable": "a worker's registration is of a later release, or damaged; it is not used",
    "registration_waits": "the broker refuses to register the worker again; tried again",
    "renewal_callback_failed": "announcing a renewed NIXL agent failed",
    "repeat_failed": "a submission over NATS could not be handled; it is delivered again",
    "request_deleted": "`forget` or `DELETE`: a request was deleted",
    "request_ended_by_router": "a router ended a request: its code says why",
    "request_failed": "a request failed on this worker: a first attempt goes to another one",
    "request_moved_to_revision": "a request's revision has no worker; it runs on the serving one",
    "request_not_deleted": "a request could not be deleted",
    "request_not_migrated": "another cell did not accept a request; it returns to its own",
    "request_requeued": "a request continues on another worker",
    "request_fell_back": "a request without a token runs on another model from now on (--fallback)",
    "fallback_unreadable": "a fallback of a request was written by another build, and cannot be read by this one",
    "request_resteered": "a late prefill was taken back and given to another worker",
    "request_retention_failed": "waiting requests could not be published again; tried again",
    "request_stalled": "a worker makes no progress with a request, which goes to another one",
    "request_unreadable": "a stored request cannot be decoded, and ends",
    "requests_migrated": "held requests run in other cells from now on",
    "requests_not_stored_again": "requests that a restarted broker had lost could not be stored: they end at their "
    "deadlines",
    "requests_republished": "waiting requests were copied to the end of their stream, so that they do not expire",
    "resumption_postponed": (
        "the streamed tokens of a request from another cell cannot be read yet; it is delivered again"
    ),
    "response_not_counted": "a stored response is missing in the metrics",
    "restart_failed": "a process could not be started",
    "return_unreadable": "a worker returned a request in a message that cannot be decoded",
    "revision_serving": "requests go to this revision of the model",
    "revision_stands_by": "workers of another revision of the model are not used yet",
    "rewritten": "what the native engine changed in the model",
    "router_left": "a router has left; others own its models",
    "router_open": "the router takes requests",
    "router_task_failed": "a task for one request failed; the request is delivered again",
    "router_unreadable": "another router's registration cannot be read",
    "routers_coordinated": "routers share models among them",
    "routers_not_coordinated": "the bucket of routers is missing: every router takes any request",
    "routers_unknown": "other routers could not be read; tried again",
    "service_failed": "a call over NATS failed unexpectedly",
    "session_lost": "the worker has lost its lease or consumer",
    "settle_failed": "a handoff's lease could not be ended",
    "sglang": "version and arguments of SGLang",
    "sglang_ready": "the model is loaded",
    "sglang_version": "another release of SGLang than was tested",
    "snapshot_failed": "the dashboard could not read the broker",
    "snapshot_ahead": "streams have lost their ends since the stored state: the router reads the whole log",
    "snapshot_not_saved": "a router's state could not be stored: a slower next start",
    "span_export_failed": "the collector does not take traces",
    "stale_registrations_ignored": "registrations from before the broker's restart are not used",
    "stale_registrations_removed": "registrations that a killed broker had brought back were removed",
    "start_failed": "the process cannot start",
    "shared_memory_cleared": "engines that were killed had left files (`--clear-shm`)",
    "state_not_written": "`state.json` could not be written",
    "stop_incomplete": "a step of stopping took too long and was skipped",
    "stop_step_failed": "a step of stopping failed",
    "stop_timeout": "stopping took too long",
    "stopped_during_startup": "stopped before it served",
    "stream_filling": "unfinished work takes half of a stream",
    "stream_full": "unfinished work takes four fifths of a stream",
    "stream_truncated": "a stream lost its end, for example in a power failure, or was recreated: readers start over",
    "structured_output_off": "the worker serves no constrained requests",
    "submission_failed": "a submission over NATS failed unexpectedly; it is delivered again",
    "submission_not_erased": "a refused submission stays on the broker's disk until its file is removed",
    "sweep_failed": "a periodic check of the gateway failed; the next one follows",
    "system_connection_closed": "the connection to the system account is closed",
    "task_failed": "a background task failed: its process ends, or logs what it continues without",
    "tasks_still_running": "background tasks did not end in time",
    "tenant_unreadable": "a tenant's stored limits cannot be read",
    "tensors_received": "this worker has all tensors of a trainer, which it does not serve yet",
    "tenant_weights_followed": "tenants' weights can be read now",
    "tenant_weights_unknown": "tenants' weights may not be read; tried again",
    "tensorrt_llm": "version and interface of TensorRT-LLM",
    "tensorrt_llm_version": "another release of TensorRT-LLM than was tested",
    "terminal_event_failed": "the end of a request could not be stored; its job is delivered again",
    "terminal_event_unreadable": "a record is of a later release, or damaged",
    "ticket_mismatch": "a handoff's blocks do not fit this worker; the prompt is computed",
    "token_batch_unreadable": "tokens of an interrupted attempt cannot be decoded",
    "too_many_models": "workers register more models than a gateway learns",
    "trace_closed": "the exporter of traces has ended, with the number of sent traces",
    "trace_open": "the exporter of traces runs",
    "traces_dropped": "traces that the collector did not take in time are lost",
    "transfer_buffer_without_memory": "reads from workers of other widths have no buffer of this size; the next is a "
    "quarter of it, and without one prompts are computed here",
    "transfer_agent_renewed": "NIXL was set up again after an error",
    "transfer_cleanup_failed": "closing NIXL failed",
    "transfer_failed": "reading blocks of another worker failed; the prompt is computed",
    "transfer_thread_failed": "the transport's thread failed",
    "transfer_thread_join_timeout": "the transport's thread did not end in time",
    "transfer_unavailable": "this worker moves no blocks",
    "trtllm_ready": "the model is loaded",
    "trtllm_sampling": "which sampling options TensorRT-LLM applies, found by a probe",
    "unplaced_requests_not_returned": "a stopping router could not return requests",
    "unplaced_requests_returned": "requests that a dead router had not placed were taken over",
    "unstored_sweep_failed": "deleting the content of ended `no_store` requests failed; tried again",
    "verdict_not_stored": "the finding that a request crashes workers could not be stored",
    "verdict_unreadable": "a stored verdict about a poisonous request cannot be read",
    "verdict_withdrawn": "a request that had crashed workers was answered",
    "budgets_unknown": "the ledger of usage is missing, or may not be read: budgets are not enforced; tried again",
    "usage_unreadable": "a part of the ledger of usage cannot be read; a newer build may have written it",
    "usage_count_failed": "a bug: the usage of ended requests is counted again from the log",
    "usage_missed": "records were discarded before they were counted: `penstock usage` shows the gap",
    "usage_not_counted": "the usage of ended requests cannot be counted now, or a request was deleted uncounted",
    "verdicts_followed": "the bucket of poisonous requests is there now",
    "visual_gen": "version and parameters of TensorRT-LLM's VisualGen",
    "vllm": "version and arguments of vLLM",
    "vllm_checks_grammars": "vLLM compiles each schema a second time, while other requests wait",
    "vllm_ready": "the model is loaded",
    "vllm_version": "another release of vLLM than was tested",
    "waiting_for_leader": "this node waits for node 0 of its engine",
    "waiting_for_nodes": "the worker waits for the other nodes of its engine",
    "weights_entry_ignored": "weights changed for workers that were started with other weights than this one",
    "weights_entry_unreadable": "a request about a model's weights was written by another version; it is ignored",
    "weights_failed": "a worker could not change its weights or be paused; it continues to serve",
    "weights_missing": "this worker missed a trainer's tensors: it waits for the next ones",
    "weights_not_followed": "operators' requests about the weights are not known: the bucket cannot be read",
    "weights_paused": "this worker starts no request until it is resumed",
    "kv_cache_allocated": "the native engine's memory for KV, and what tokens take of it",
    "kv_disk_hangs": "--kv-disk did not answer when the worker ended: what was not written to it is computed again",
    "kv_disk_opened": "a worker uses a folder for KV blocks, and found some from before",
    "kv_disk_paused": "KV blocks cannot be written to files, because the disk is full or fails; tried again later",
    "kv_file_failed": "a KV block was neither written to a file nor read; it is computed if it is needed",
    "kv_not_spilled": "a worker ended without writing its cache to files",
    "weights_quantized": "the native engine quantized weights as it loaded them",
    "weights_resumed": "this worker starts requests again",
    "weights_updated": "this worker has the weights of an update: read from its folder, or there already",
    "work_header_unreadable": "a job's header cannot be decoded; its load is not counted",
    "worker_asleep": "the weights are in host memory, and there is no KV cache",
    "worker_awake": "the weights are on the device again",
    "worker_end_not_stored": "that a worker's process ended could not be stored",
    "worker_ended": "a worker's process ended: its exit and its requests",
    "worker_left": "a worker is gone",
    "worker_lost": "a worker is dead or out of reach; its requests continue elsewhere",
    "worker_refused": "a worker serves the model's name with another tokenizer",
    "worker_registered": "the worker takes requests",
    "worker_task_failed": "loading a worker's cache failed; tried again",
    "worker_woken": "a router asks a sleeping worker to wake up, because requests wait for its model",
    "workers_name_different_parsers": "workers of one model disagree about its parsers",
    "workers_name_unknown_parsers": "workers name parsers that this gateway does not have",
    "worker_joins": "a worker starts in another cell than planned, which has fewer of its kind",
    "worker_moved": "a worker drains, and starts again in a cell that has lacked such workers for a minute",
    "workers_not_added": "`up` could not start more workers",
}
