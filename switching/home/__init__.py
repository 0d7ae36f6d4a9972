"""Home parameters: what the user's optimizer sees, each rank holding its own piece.

`layout` and `placement` say who owns what; `tensor` is the wrapper, and the other files are what ops do to it.
"""
