"""Where bytes come from and go to: sources, sinks and streams, one module per kind."""
