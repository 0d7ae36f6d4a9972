"""One rank of a job over several machines: meets the others, sums, and says where everybody is reached."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hetu_fx.base.addresses import Contact, rank_addresses
from hetu_fx.base.machine import node_name, short_names
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.one_sided import Caller, Listener
from hetu_fx.comm_ops.wire.process_group import create_group, create_world
from hetu_fx.errors import EnvironmentProblem


def main() -> None:
    """Meet, and print one line of JSON."""
    started = time.monotonic()
    try:
        create_world("gloo", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=60))
    except EnvironmentProblem as error:
        print(json.dumps({"error": str(error), "seconds": time.monotonic() - started}))
        sys.exit(3)
    table, total = GroupTable(), torch.ones(1)
    dist.all_reduce(total, group=create_group(list(range(table.size)), "another", timedelta(seconds=60)))
    addresses = rank_addresses(all_gather_object(table, Contact.own()))
    nodes = all_gather_object(table, node_name())
    own, found = torch.full((4,), table.rank, dtype=torch.uint8), torch.empty(4, dtype=torch.uint8)
    listener = Listener(lambda question: own, addresses[table.rank])
    caller = Caller(all_gather_object(table, listener.address), 30)
    caller.ask((table.rank + 1) % table.size, {}, found)
    told = {"sum": float(total), "addresses": addresses, "nodes": len(set(nodes)), "shown": short_names(nodes)}
    print(json.dumps({**told, "read": found.tolist()}))
    dist.barrier()
    caller.close()
    listener.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
