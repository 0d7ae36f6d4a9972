"""Everything that outlives a process: checkpoints, weight files, snapshots in memory, recovery.

`checkpoint` and `save` write folders (`folders`: aside, synced, renamed); `snapshot_writer` keeps committed state in
the memory of peers, `heartbeats` sees who is gone, `recovery` and `joining` bring the rest together again.
"""
