"""Unequal devices on one machine: CPU quotas, memory limits and slow links for real processes.

`spec` says what to emulate, `plan` where its limits go, `limits` and `network` set them, `cleanup` takes them away.
"""

from hetu_fx.launch.emulate.emulate import change_speed as change_speed
from hetu_fx.launch.emulate.emulate import run as run
from hetu_fx.launch.emulate.spec import EmulateSpec as EmulateSpec
