"""``python -m infra.docs``: write the pages of docs/ and the Grafana dashboards that come from the code."""

from infra.docs import dashboards, metrics, settings

for page in (metrics, settings):
    page.PAGE.write_text(page.page(), encoding="utf-8")
for path, text in dashboards.files().items():
    path.write_text(text, encoding="utf-8")
