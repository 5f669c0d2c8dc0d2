"""Models of other libraries, one module for each; nothing here is imported before it is asked for."""
