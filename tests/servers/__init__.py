"""Servers that tests start on loopback and stop again, well-behaved and otherwise."""
