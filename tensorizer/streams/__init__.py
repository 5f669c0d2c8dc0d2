"""Streams over remote objects: one module per kind of source, imported when it is first needed."""
