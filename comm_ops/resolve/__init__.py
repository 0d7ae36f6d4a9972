"""How one annotation becomes another: `resolve(source, target)`, its price, its adjoint and its explanation.

`tiers` goes through bottom and top tier, `intermediates` finds what to go through, `lowering` writes it as graph nodes.
"""
