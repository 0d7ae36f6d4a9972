"""HSPMD annotations: who holds which part of a tensor."""
