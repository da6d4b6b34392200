"""``python -m penstock.docs.roles_doc``: regenerates docs/roles.md."""

from pathlib import Path

from penstock.infra.broker.roles import table
from penstock.schemas.subjects import Subjects

PAGE = Path(__file__).resolve().parents[2] / "docs" / "roles.md"


def page(old: str) -> str:
    """The page with its table as it must be; what stands before the table is kept."""
    head, _, _ = old.partition("| role |")
    return head + table(Subjects())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
