"""The record of which task was done where: append-only, one line a record, at most one `done` of a key."""
