"""Keys: what callers pass, what the extension gets."""
