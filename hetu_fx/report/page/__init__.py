"""The report of a run, as one HTML page and as JSON: a module for each section, and `page`, which lists them."""
