"""Unequal devices on one machine: CPU quotas, memory limits and slow links for real processes.

`spec` says what to emulate, `emulation_plan` where its limits go, `limits` and `network` set them, `cleanup` takes them
away.
"""

from hetu_fx_emulate.emulate import change_speed as change_speed
from hetu_fx_emulate.emulate import lift_speeds as lift_speeds
from hetu_fx_emulate.emulate import run as run
from hetu_fx_emulate.processes import Output as Output
from hetu_fx_emulate.spec import EmulateSpec as EmulateSpec
