"""Published plans, executed by all of their ranks in one process."""
