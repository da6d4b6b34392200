"""Run real clients against a deployment of the demo model, and write the table of what works.

    python -m tests.clients run                      # all, as `make test-clients`
    python -m tests.clients run openai codex         # some; the results are printed and not kept
    python -m tests.clients run --newest             # whatever version is newest now, and keep the results
    python -m tests.clients table                    # docs/clients.md from the results that were kept

Exit status 1 if a check failed.
"""

import argparse
import json
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.clients.catalogue import CLIENTS, RESULTS
from tests.clients.run import run_all
from tests.clients.table import write

FOLDER = Path(__file__).parents[2] / ".venv-clients"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="install the clients and run their checks")
    run.add_argument("clients", nargs="*", metavar="CLIENT", help=f"some of: {', '.join(c.name for c in CLIENTS)}")
    run.add_argument("--newest", action="store_true", help="install the newest versions, not those last tried")
    run.add_argument("--environments", type=Path, default=FOLDER, metavar="FOLDER", help="where they are installed")
    run.add_argument("--keep", action="store_true", help="keep the results of these clients, too, for the table")
    commands.add_parser("table", help="write docs/clients.md")
    asked = parser.parse_args()
    if asked.command == "table":
        write()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the deployment ends, too
    if unknown := set(asked.clients) - {client.name for client in CLIENTS}:
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if not asked.clients or client.name in asked.clients]
    found = run_all(chosen, asked.environments.resolve(), newest=asked.newest)
    if not asked.clients or asked.keep:
        _keep(found)
        write()
    failed = sum(bool(check["problem"]) for each in found.values() for check in each["checks"])
    failed += sum(bool(each.get("problem")) for each in found.values())
    passed = sum(len(each["checks"]) for each in found.values()) - failed
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def _keep(found: dict[str, Any]) -> None:
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["clients"] if RESULTS.exists() else {}
    clients = {client.name: (kept | found)[client.name] for client in CLIENTS if client.name in kept | found}
    results = {"date": datetime.now(UTC).date().isoformat(), "clients": clients}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
