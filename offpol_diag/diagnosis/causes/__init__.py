"""A file per cause, or per few that are told by one look."""
