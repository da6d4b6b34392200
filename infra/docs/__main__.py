"""``python -m infra.docs``: write the pages of docs/ that come from the code."""

from infra.docs import metrics, settings

for page in (metrics, settings):
    page.PAGE.write_text(page.page(), encoding="utf-8")
