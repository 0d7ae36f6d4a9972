"""Capture of a model as one single-device graph."""
