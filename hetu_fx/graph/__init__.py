"""Capture of a model as one single-device graph, and what every pass reads and changes in it.

capture -> torch.export -> assemble (regions inlined, writes made functional, cleaned, masks named) -> Graph. Nodes know
their values, lines and modules by `meta`, the one owner of `node.meta`; `calls` reads ops, `edit` adds them.
"""
