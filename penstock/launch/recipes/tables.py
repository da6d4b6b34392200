"""Tables of the recipes, for the terminal and for configs/recipes/README.md."""

from collections.abc import Iterable, Mapping

from penstock.infra.engine_args.memory_estimate import GIB, Memory, estimate
from penstock.infra.engine_args.rules.check import RULES
from penstock.launch.recipes.catalogue import Header, Recipe, RecipeEntry, context_of
from penstock.workers.engines import support

BEGIN, END = "<!-- made by `python -m penstock.docs.readme`: {} -->", "<!-- end: {} -->"
MIB = 1 << 20


def memory_of(recipe: Recipe) -> Memory | None:
    """The memory estimate on a recipe's GPU; None: its model's shape is unknown."""
    context = context_of(recipe)
    if context.shape is None or context.gpu_bytes is None:
        return None
    length = recipe.args.max_seq_len or context.shape.max_len
    return estimate(recipe.args, context.shape, context.gpu_bytes, length=length)


def hardware(header: Header) -> str:
    nodes = f", {header.nodes} nodes" if header.nodes > 1 else ""
    return f"{header.gpus} x {header.gpu}{nodes}"


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
        ("recipes", overview(members)), ("memory", memory(recipes)), ("rules", rules()), ("matrix", support.matrix()),
    )  # fmt: skip
    for name, rows in tables:
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in text or end not in text:
            raise ValueError(f"no marks for the table {name!r}")
        before, remainder = text.split(begin, 1)
        text = f"{before}{begin}\n\n{markdown(rows)}\n\n{end}{remainder.split(end, 1)[1]}"
    return text
