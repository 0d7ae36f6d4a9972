"""How one annotation becomes another: `resolve(source, target)`, its price, its adjoint and its explanation.

`resolve` goes through both tiers, `intermediates` finds what to go through, `lowering` writes it as graph nodes.
"""
