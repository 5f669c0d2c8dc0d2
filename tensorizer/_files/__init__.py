"""Work on whole files: look into them, verify, compare, convert, copy, encrypt. The command line prints results."""
