"""``penstock kubernetes render``: the shell around ``manifests``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from configs.flags import Parser
from infra.deploy.kubernetes.description import Description, read
from infra.deploy.kubernetes.manifests import Tree, manifests, secrets_needed, to_yaml
from infra.engine_args.tree import BadArguments
from infra.recipes import catalogue
from infra.recipes.catalogue import RecipeEntry
from infra.terminal import reason

OK, REFUSED = 0, 1
EXAMPLES = Path(__file__).parent / "examples"


def run_render(argv: Sequence[str]) -> int:
    """Print the manifests of a description."""
    parser = Parser(prog="penstock kubernetes render", description="manifests for `kubectl apply -f -`, printed")
    parser.add_argument("file", help=f"YAML; examples: {', '.join(sorted(path.name for path in EXAMPLES.iterdir()))}")
    args = parser.parse_args(argv)
    path = Path(args.file)
    if not path.is_file() and (EXAMPLES / path.name).is_file():
        path = EXAMPLES / path.name
    try:
        given = read(path.read_text(encoding="utf-8"))
        objects = rendered(given)
    except (BadArguments, OSError, UnicodeDecodeError) as error:
        for problem in error.problems if isinstance(error, BadArguments) else (reason(error),):
            print(f"{path.name}: {problem}", file=sys.stderr)
        return REFUSED
    print(to_yaml(objects, secrets_needed(given, objects)), end="")
    return OK


def rendered(given: Description) -> list[Tree]:
    """The objects of a description, with its recipe's files read.

    Raises:
        BadArguments: the recipe or the description cannot be used.
    """
    chosen = catalogue.select(given.recipe, catalogue.members()) if given.recipe else []
    roles: dict[str, RecipeEntry] = {member.header.role: member for member in chosen}
    if not given.workers and {"prefill", "decode"} <= roles.keys():
        roles.pop("aggregated", None)  # a set that offers both is split
    texts = {role: Path(member.path).read_text(encoding="utf-8") for role, member in roles.items()}
    return manifests(given, roles, texts)
