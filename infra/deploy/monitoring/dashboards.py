"""All Grafana dashboards. ``python -m penstock.infra.docs`` writes them to ``grafana/``."""

from penstock.infra.deploy.monitoring.platform import BROKER
from penstock.infra.deploy.monitoring.serving import GATEWAYS, HEALTH, ROUTERS
from penstock.infra.deploy.monitoring.workers import DECODES, HANDOFFS, KV, PREFILLS

DASHBOARDS = (HEALTH, GATEWAYS, ROUTERS, PREFILLS, DECODES, KV, HANDOFFS, BROKER)
