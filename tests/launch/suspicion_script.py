"""A node at the rendezvous that says whom it suspects, and when members are gone: `suspicion_script.py ENDPOINTS`."""

from __future__ import annotations

import logging
import sys
import time

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from hetu_fx.launch.rendezvous_handler import BACKEND, HetuRendezvous

FOR_EVER = 100.0


def main() -> None:
    logging.basicConfig()
    where, nodes = sys.argv[1], 3
    times = {"silent": FOR_EVER, "come": FOR_EVER, "reach": FOR_EVER}
    node = HetuRendezvous(RendezvousParameters(BACKEND, where, "job", 1, nodes, **times))
    while True:
        print(f"round of {node.next_rendezvous().world_size}", flush=True)
        said = None
        while not node.num_nodes_waiting():
            if (suspected := node._at._suspected) != said:
                said = suspected
                print(f"suspects {suspected}", flush=True)
            time.sleep(node.pause)


if __name__ == "__main__":
    main()
