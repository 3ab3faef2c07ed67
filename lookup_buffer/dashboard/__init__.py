"""The dashboard: the process that samples the fleet, and the files of the page, in `page`."""
