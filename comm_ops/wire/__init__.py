"""The one place where bytes move: groups, collectives, point-to-point messages, meeting and leaving.

`groups` makes process groups, `collectives` and `bsr_run` run plans on them, `consensus` makes ranks agree.
"""
