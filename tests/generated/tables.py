"""Tables that come from the code, in pages that are written by hand.

docs/engines.md: sampling options, from what the engines' adapters do. docs/parsers.md: model families, from the rows by
which answers are read. docs/roles.md: what each user of the broker may do. configs/recipes/README.md: the recipes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from penstock.infra.engine_args.memory_estimate import GIB, GpuMemory, estimate
from penstock.infra.engine_args.rules import RULES
from penstock.infra.nats_server.permissions import (
    AUDITED,
    BROKER_ROLES,
    SECOND,
    account,
    exports,
    permissions,
    publishes,
    subscribes,
    table,
)
from penstock.infra.text.parsers.families import PACKAGED, CallFormat, Family, read_rows
from penstock.launch.recipes.catalogue import FOLDER, Recipe, RecipeEntry, context_of, load, members
from penstock.launch.recipes.recipe_command import hardware
from penstock.schemas.subjects import Subjects
from penstock.workers.engines.support import matrix, sampling_notes, sampling_table

BEGIN, END_OF = "<!-- made by `python -m tests.generated`: {} -->", "<!-- end: {} -->"
DOCS = Path(__file__).resolve().parents[2] / "docs"
END = "<!-- end -->"
_HEAD = ("name", "models", "reasoning", "tool calls", "aliases", "checked against")


def engines(page: str) -> str:
    """The page with the table of today.

    Raises:
        ValueError: its marks are missing.
    """
    notes = "\n".join(f"{number}. {note}" for number, note in enumerate(sampling_notes(), 1))
    return _between(page, "sampling options", f"{markdown(sampling_table())}\n\n{notes}")


def parsers(page: str) -> str:
    """The page with the table of today.

    Raises:
        ValueError: its marks are missing.
    """
    rows = sorted(read_rows(PACKAGED), key=lambda row: row.name)
    return _between(page, "model families", markdown((_HEAD, *map(_row, rows))))


def roles(page: str) -> str:
    """The page with its tables and commands as they must be; what stands before the first table is kept."""
    head, _, _ = page.partition("| role |")
    return "\n".join((head + table(Subjects()), denied(Subjects()), nsc(Subjects())))


def denied(s: Subjects) -> str:
    """What the table of rights does not show."""
    lines = [
        "## Denials and replies",
        "",
        "What is denied may not be published although a subject above allows it. `penstock nats --print-config` writes",
        "this, too.",
        "",
        "| role | may not publish | may reply |",
        "|---|---|---|",
    ]
    for role in BROKER_ROLES:
        allowed = permissions(role, s) if role != "client" else None
        if allowed is None or not (allowed.deny or allowed.respond):
            continue
        subjects = " ".join(f"`{subject}`" for subject in allowed.deny)
        reply = '`allow_responses: { max: 1, expires: "1m" }`' if allowed.respond else "–"
        lines.append(f"| {role} | {subjects or '–'} | {reply} |")
    return "\n".join(lines) + "\n"


NSC = """\
## With JWTs

For servers in operator mode, `nsc` makes the account of the pipeline, its users and their credentials files
(`PENSTOCK_NATS_CREDS`). Each role is a scoped signing key: its rights are in the JWT of the account, so that those of
users stay short, and `{{{{subject()}}}}` stands for the public key, as which the broker knows a user. Flags as of nsc
2.12. The audit log has public keys here, too, so nothing denies the operator to write under the name of another.

```sh
nsc add account APP
nsc edit account APP --js-mem-storage -1 --js-disk-storage -1 --js-streams -1 --js-consumer -1
{exports}
```

{roles}

```sh
# Routers log in to the system account, too (PENSTOCK_SYS_NATS_CREDS)
nsc add user --account SYS --name sys
nsc generate creds --account SYS --name sys > sys.creds
nsc push --all
```

A tenant of the [NATS API](nats.md#on-a-broker-of-your-own) has an account of its own, with imports that insert its
name; so has the tenant `default`:

```sh
{tenant}
```
"""


def nsc(s: Subjects) -> str:
    """Commands for the same rights as those in a server's configuration."""
    roles = (role for role in BROKER_ROLES if role != "client")
    return NSC.format(
        exports="\n".join(_nsc_exports(s)),
        roles="\n\n".join(_nsc_role(role, s) for role in roles),
        tenant=_nsc_tenant(s),
    )


def _nsc_exports(s: Subjects) -> Iterable[str]:
    for kind, subject, more in re.findall(r'\{ (service|stream): "([^"]+)"(.*) \}', exports(s)):
        line = f"nsc add export --account APP --name {subject.split('.')[1]} --subject '{subject}'"
        if kind == "service":
            line += " --service"
        if threshold := re.search(r'response_type: "stream", response_threshold: "(\w+)"', more):
            line += f" --response-type Stream --response-threshold {threshold[1]}"
        yield line


def _nsc_role(role: str, s: Subjects) -> str:
    allowed = permissions(role, s)
    assert allowed is not None
    # Users are known by their public key. A denial would include a user's own entries.
    own, audits = s.audit(role), {s.audit(f"{each}{second}") for each in AUDITED for second in ("", SECOND)}
    publish = [f"{s.namespace}.audit.{{{{subject()}}}}" if subject == own else subject for subject in allowed.publish]
    flags = [("allow-pub", publish), ("allow-sub", allowed.subscribe)]
    flags += [("deny-pub", [subject for subject in allowed.deny if subject not in audits])]
    lines = [f"nsc edit signing-key --account APP --sk generate --role {role}"]
    lines += [f"  --{flag} '{','.join(part)}'" for flag, subjects in flags for part in _lines(subjects)]
    if allowed.respond:
        lines.append("  --allow-pub-response=1 --response-ttl 1m")
    user = f"nsc add user --account APP --name {role} --private-key {role}"
    creds = f"nsc generate creds --account APP --name {role} > {role}.creds"
    return "```sh\n" + " \\\n".join(lines) + f"\n{user}\n{creds}\n```"


def _lines(subjects: Sequence[str]) -> Iterable[Sequence[str]]:
    """Parts of about 130 characters."""
    part: list[str] = []
    for subject in subjects:
        if part and sum(map(len, part)) + len(part) + len(subject) > 130:
            yield part
            part = []
        part.append(subject)
    if part:
        yield part


def _nsc_tenant(s: Subjects) -> str:
    lines = ["nsc add account acme"]
    imports = r'\{ (\w+): \{ account: APP, subject: "([^"]+)" \}, to: "([^"]+)" \}'
    for kind, subject, to in re.findall(imports, account("acme", (), s)):
        flag = " --service" if kind == "service" else ""
        lines.append(
            f"nsc add import --account acme --src-account APP --remote-subject '{subject}' --local-subject '{to}'{flag}"
        )
    lines.append("nsc add user --account acme --name acme \\")
    lines.append(f"  --allow-pub '{','.join(publishes(s))}' --allow-sub '{','.join(subscribes(s))}'")
    return "\n".join([*lines, "nsc generate creds --account acme --name acme > acme.creds"])


def recipes(page: str) -> str:
    return refreshed(page, load(), members())


PAGES: dict[Path, Callable[[str], str]] = {
    DOCS / "engines.md": engines,
    DOCS / "parsers.md": parsers,
    DOCS / "roles.md": roles,
    FOLDER / "README.md": recipes,
}


def _between(page: str, what: str, text: str) -> str:
    mark = BEGIN.format(what)
    before, begin, rest = page.partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no marks for the table of {what}: {mark} and {END}")
    return f"{before}{mark}\n\n{text}\n\n{END}{after}"


def _row(row: Family) -> tuple[str, ...]:
    thoughts = row.thoughts
    if thoughts is None:
        reasoning = ""
    elif thoughts.channels:
        reasoning = "in channels"
    else:
        reasoning = f"{_code(thoughts.opening[0])} … {_code(thoughts.closing[0])}"
        reasoning += ", begun by the prompt" if thoughts.implied else ""
    aliases = ", ".join(_code(name) for name in row.aliases)
    return _code(row.name), row.models, reasoning, _calls(row.calls), aliases, row.checked


def _calls(form: CallFormat | None) -> str:
    if form is None:
        return ""
    if form.reader == "channels":
        return "in channels"
    opener = _code(form.openers[0]) if form.openers else ""
    begins = [f"an answer that begins with {_code(form.starts)}"] if form.starts else []
    return f"{form.reader}: {' or '.join(filter(None, (*begins, opener)))}"


def _code(text: str) -> str:
    """A text as code."""
    shown = text.strip().replace("\n", " ").replace("\x10", "\N{SYMBOL FOR DATA LINK ESCAPE}")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def memory_of(recipe: Recipe) -> GpuMemory | None:
    """The memory estimate on a recipe's GPU; None: its model's shape is unknown."""
    context = context_of(recipe)
    if context.shape is None or context.gpu_bytes is None:
        return None
    length = recipe.args.max_seq_len or context.shape.max_len
    return estimate(recipe.args, context.shape, context.gpu_bytes, length=length)


def overview(members: Mapping[str, RecipeEntry]) -> list[tuple[str, ...]]:
    """Name, model, engine, role, hardware, purpose; the first row is the header."""
    rows: list[tuple[str, ...]] = [("recipe", "model", "engine", "role", "GPUs", "for")]
    for name, (_, header, *_) in members.items():
        rows.append((name, header.model, header.engine, header.role, hardware(header), header.use))
    return rows


def memory(recipes: Mapping[str, Recipe]) -> list[tuple[str, ...]]:
    """The memory estimate of each recipe, for one GPU."""
    rows: list[tuple[str, ...]] = [
        ("recipe", "GPU, GiB", "weights, GiB", "reserve, GiB", "buffer, GiB", "KV pool, GiB", "KV per token, KiB",
         "context, tokens", "contexts", "blocks")
    ]  # fmt: skip
    for name, recipe in recipes.items():
        plan = memory_of(recipe)
        if plan is None or recipe.role == "encode":
            continue
        sizes = [f"{size / GIB:.1f}" for size in (plan.gpu, plan.weights, plan.reserve, plan.buffer, plan.pool)]
        per_token = f"{plan.kv_per_token / 1024:.1f}"
        counts = (plan.length, plan.sequences, plan.blocks)
        rows.append((name, *sizes, per_token, *(f"{count}" for count in counts)))
    return rows


def rules() -> list[tuple[str, ...]]:
    return [("rule", "what must hold", "rows"), *((r.number, r.about, ", ".join(r.rows)) for r in RULES)]


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    head, *body = rows
    lines = [head, tuple("---" for _ in head), *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def refreshed(text: str, recipes: Mapping[str, Recipe], members: Mapping[str, RecipeEntry]) -> str:
    """A README with regenerated tables.

    Raises:
        ValueError: the markers of a table are missing.
    """
    tables = (
        ("recipes", overview(members)), ("memory", memory(recipes)), ("rules", rules()), ("matrix", matrix()),
    )  # fmt: skip
    for name, rows in tables:
        begin, end = BEGIN.format(name), END_OF.format(name)
        if begin not in text or end not in text:
            raise ValueError(f"no marks for the table {name!r}")
        before, remainder = text.split(begin, 1)
        text = f"{before}{begin}\n\n{markdown(rows)}\n\n{end}{remainder.split(end, 1)[1]}"
    return text
