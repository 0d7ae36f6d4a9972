"""Communication: what moves between ranks, by value, and what moves it.

`plans` (pure: which slice goes where) -> `wire` (bytes move) -> `ops` (one record per op, registered with torch as
`hetu::name`) -> `resolve` (one annotation becomes another by those ops, and what it costs).
"""
