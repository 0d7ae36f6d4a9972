"""Devices and links: what they are (`cluster`, `devices`, `chips`), and measuring them.

`measure` asks `speed` (each device), `links` and `collectives` (between devices), meeting through `meeting`.
"""
