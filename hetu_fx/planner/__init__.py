"""From a program and a cluster to a plan.

`values` (what is known) -> `count` (what a graph costs) -> `price` (what a plan costs) -> `simulate` (when what
happens), `dispatch` (sequences to pipelines) -> `search` (which plan) -> `api`.
"""
