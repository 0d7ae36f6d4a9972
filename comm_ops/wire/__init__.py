"""The one place where bytes move: groups, collectives, point-to-point messages, meeting and leaving.

`transport` carries messages between processes, `threads` between ranks of one process. `groups` makes groups, `p2p`
posts messages; `collectives`, `two_level`, `split_run` and `bsr_run` run on them; `consensus` makes ranks agree.
"""
