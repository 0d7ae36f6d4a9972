"""Until a model is parallel: a large model for 8 devices, part by part, and the first steps of a small script."""
