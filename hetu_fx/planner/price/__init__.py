"""What a plan costs on a cluster: seconds and bytes, term by term.

`stage` prices one stage, `replica_groups` and `buckets` the end of the step, `homes` updates; `step` adds them up.
"""
