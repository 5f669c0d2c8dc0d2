"""Describes the content of a file: dtypes, entries, names, the tree of names (docs/format.md)."""
