"""Servers that cases of remote sources measure against: on loopback, ended by process id."""
