"""Everything that outlives a process: checkpoints, weight files, snapshots in memory, recovery.

`checkpoint` writes folders (`folders`: aside, synced, renamed); `snapshot_store` keeps committed state in the memory of
peers and finds it there, `heartbeats` sees who is gone, `joining` lets others in.
"""
