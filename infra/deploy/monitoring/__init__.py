"""Prometheus and Grafana: scrape targets, alert rules, dashboards."""
