"""Questions that planning and resharding are measured on, and answers that others have published."""
