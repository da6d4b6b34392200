"""All Grafana dashboards. ``python -m penstock.docs`` writes them to ``grafana/``."""

from penstock.deploy.platform import BROKER
from penstock.deploy.serving import GATEWAYS, HEALTH, ROUTERS
from penstock.deploy.workers import DECODES, HANDOFFS, KV, PREFILLS

DASHBOARDS = (HEALTH, GATEWAYS, ROUTERS, PREFILLS, DECODES, KV, HANDOFFS, BROKER)
