"""What is written from the code: pages and tables of docs/, Grafana dashboards, files of the chart."""
