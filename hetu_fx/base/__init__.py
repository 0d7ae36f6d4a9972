"""What stands below everything: documents on disk, checks of arguments, sizes, quotas, and the names of torch's own.

`documents` reads and writes files; `records` says by `json_values` what their JSON objects mean, from dataclass fields.
"""
