"""What stands below everything: documents on disk, checks of arguments, quotas of processes."""
