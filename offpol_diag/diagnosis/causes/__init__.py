"""A file per cause, or per few that are recognised in the same way."""
