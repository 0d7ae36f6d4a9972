"""Measure a model's blocks on real devices, and fit what the planner prices with."""
