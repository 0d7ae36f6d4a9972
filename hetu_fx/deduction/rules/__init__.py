"""Op rules, one file per family."""
