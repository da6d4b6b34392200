"""``python -m penstock.docs``: write what comes from the code: pages of docs/, Grafana dashboards, the chart's
values.
"""

from penstock.deploy import chart as compose
from penstock.deploy import chart as helm
from penstock.docs import dashboards, engines, log_events, metrics, pages, parsers, wire

for page in (engines, log_events, metrics, parsers, pages, wire):
    page.PAGE.write_text(page.page(), encoding="utf-8")
wire.ASYNCAPI.write_text(wire.asyncapi(), encoding="utf-8")
for path, text in (dashboards.files() | helm.files() | compose.compose_files()).items():
    path.write_text(text, encoding="utf-8")
