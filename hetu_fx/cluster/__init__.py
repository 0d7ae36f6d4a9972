"""Devices and links: what they are (`cluster`, `devices`), and measuring them.

`measure` tells what devices do and what it costs them to meet, `host` what holds on a host, `links` what is between.
"""
