"""``python -m tests.generated``: write what comes from the code: pages, tables, dashboards, the chart's values."""

from tests.generated import chart, dashboards, log_events, metrics, settings, tables, wire

for path, with_table in tables.PAGES.items():
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
for page in (log_events, metrics, settings, wire):
    page.PAGE.write_text(page.page(), encoding="utf-8")
wire.ASYNCAPI.write_text(wire.asyncapi(), encoding="utf-8")
for path, text in (dashboards.files() | chart.files() | chart.compose_files()).items():
    path.write_text(text, encoding="utf-8")
