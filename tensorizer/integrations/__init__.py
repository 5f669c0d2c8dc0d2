"""Models of other libraries, one module for each. A module is imported when you first use it."""
