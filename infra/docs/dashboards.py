"""The Grafana dashboards as files, from ``infra/deploy/monitoring``."""

import json
from pathlib import Path

from infra.deploy.monitoring.dashboards import DASHBOARDS
from infra.deploy.monitoring.main import GRAFANA
from infra.deploy.monitoring.panels import to_grafana


def files() -> dict[Path, str]:
    """Each dashboard's file and its text."""
    return {
        GRAFANA / f"{dashboard.name}.json": json.dumps(to_grafana(dashboard), indent=1, ensure_ascii=False) + "\n"
        for dashboard in DASHBOARDS
    }
