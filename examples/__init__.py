"""Programs to read and run from a checkout; no part of the installed package."""
