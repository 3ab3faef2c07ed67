"""The dashboard: the process that watches the fleet for it, and the page itself, in `page`."""
