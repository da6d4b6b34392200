"""Files that deploy Penstock: charts, Compose files, images, dashboards. ``penstock.deploy`` makes them."""
