"""How exact ops are, for `python -m benchmarks.align`: in bf16, compiled, and with one of them made wrong."""
