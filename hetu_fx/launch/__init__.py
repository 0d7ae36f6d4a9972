"""`hetu-fx launch`: starts processes, sees them fail, and keeps the rest.

`launcher` runs a `job`: it starts its workers, hears them, and ends those that hang; `worker` is their side. Of several
machines `membership` says which are in the job; `rendezvous_handler` brings it to torchrun, `launch_rounds` to the
launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def torchrun_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a node's side of the rendezvous: the entry point of `torchrun.handlers`.

    torchrun asks every entry point at each start, whatever backend is wanted, so what it takes is imported later.
    """

    def make(parameters: RendezvousParameters) -> RendezvousHandler:
        from hetu_fx.launch.rendezvous_handler import HetuRendezvous

        return HetuRendezvous(parameters)

    return make
