"""What changes while a job runs: devices' rates, plans made beside training, homes that follow.

`health` finds rates -> `replanning` asks `background` for a plan -> `adaptation` switches; `rehome` moves state.
"""
