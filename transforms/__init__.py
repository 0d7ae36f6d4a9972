"""Passes from the captured graph to one graph per device.

`rewrites` (the program) -> `layouts` (annotate, deduce) -> `specialize` (one graph per device) -> `lowering` (what is
compiled); `passes` lists and runs all of them, `show` prints what they make.
"""
