"""The dashboard's process: HTTP for browsers, Prometheus and probes."""
