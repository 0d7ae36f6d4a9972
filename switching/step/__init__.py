"""One step of one variant: rows to where the plan wants them, the schedule, gradients, outputs.

`batches` and `rows` bring rows, `engine` runs the schedule, `stage_p2p` hands over between stages, `gradients` and
`frame` give back what the caller asked for.
"""
