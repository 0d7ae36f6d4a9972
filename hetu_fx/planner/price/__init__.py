"""What a plan costs on a cluster: seconds and bytes, term by term.

`stage` prices stages and pipelines, `step_end` what follows them, and `step` adds them up; `placement` tells what every
device holds, and `fitting` finds what has to be recomputed for it to fit.
"""
