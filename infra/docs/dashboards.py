"""The Grafana dashboards and the alert rules as files, from ``infra/deploy/monitoring``."""

import json
from pathlib import Path

from penstock.infra.deploy.helm.values import Thresholds
from penstock.infra.deploy.monitoring.dashboards import DASHBOARDS
from penstock.infra.deploy.monitoring.main import ALERTS, GRAFANA, alert_rules
from penstock.infra.deploy.monitoring.panels import to_grafana


def files() -> dict[Path, str]:
    """Each file and its text."""
    boards = {
        GRAFANA / f"{dashboard.name}.json": json.dumps(to_grafana(dashboard), indent=1, ensure_ascii=False) + "\n"
        for dashboard in DASHBOARDS
    }
    return boards | {ALERTS: alert_rules(Thresholds())}
