"""All Grafana dashboards. ``python -m infra.docs`` writes them to ``grafana/``."""

from infra.deploy.monitoring.platform import BROKER
from infra.deploy.monitoring.serving import GATEWAYS, HEALTH, ROUTERS
from infra.deploy.monitoring.workers import DECODES, HANDOFFS, KV, PREFILLS

DASHBOARDS = (HEALTH, GATEWAYS, ROUTERS, PREFILLS, DECODES, KV, HANDOFFS, BROKER)
