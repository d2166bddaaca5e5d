"""Drawing a report; no module here computes a number."""
