"""Passes on the single-device program that make it say the same under every plan.

Means become sums over counts (`global_mean`, `counts`), random numbers come from global indices (`counter_rng`).
"""
