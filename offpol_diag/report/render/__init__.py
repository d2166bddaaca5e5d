"""Draw a report; no module here computes numbers."""
