"""The one place where bytes move: groups, collectives, point-to-point messages, meeting and leaving.

`transport` carries messages between processes, `threads` between ranks of one process. `groups` makes groups, `p2p`
posts messages; `collectives`, and `peers` (memory that ranks share) are the ways of a collective, of which `algorithms`
takes one; `bsr_run` runs on them; `consensus` makes ranks agree.
"""
