"""The Grafana dashboards and the alert rules as files, from ``penstock/deploy``."""

import json
from pathlib import Path

from penstock.deploy.dashboards import DASHBOARDS
from penstock.deploy.monitoring import ALERTS, GRAFANA, alert_rules
from penstock.deploy.panels import to_grafana
from penstock.deploy.values import Thresholds


def files() -> dict[Path, str]:
    """Each file and its text."""
    boards = {
        GRAFANA / f"{dashboard.name}.json": json.dumps(to_grafana(dashboard), indent=1, ensure_ascii=False) + "\n"
        for dashboard in DASHBOARDS
    }
    return boards | {ALERTS: alert_rules(Thresholds())}
