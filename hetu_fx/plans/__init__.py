"""What a plan is. No tensors, no devices.

A `plan` has pipelines of `stage`s, a `schedule`, and a `prediction` of what it costs, which also tells it to people.
"""
