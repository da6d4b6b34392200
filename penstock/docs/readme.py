"""Regenerates the tables of configs/recipes/README.md: ``python -m penstock.docs.readme``."""

from penstock.launch.recipes.catalogue import FOLDER, load, members
from penstock.launch.recipes.command import refreshed


def main() -> None:
    path = FOLDER / "README.md"
    path.write_text(refreshed(path.read_text(encoding="utf-8"), load(), members()), encoding="utf-8")


if __name__ == "__main__":
    main()
