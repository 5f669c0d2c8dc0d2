"""The process and the machine: environment variables, memory limits, devices, counters."""
