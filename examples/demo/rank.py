"""One process of the demo: `python -m examples.demo.rank`, started by the demo under the emulator."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hetu_fx
from examples.demo.data import Text, digest, library_pieces, loss_of, make_model, make_optimizer, num_parameters
from examples.demo.devices import Devices, Quotas
from examples.demo.record import RunRecord, Throughput
from examples.demo.screen import make_screen
from examples.demo.settings import CHECKPOINT, DemoSettings, settings_for
from examples.demo.training import Training, even_shares, rows_of_this_rank
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import all_gather_object, broadcast_from_rank0
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.planner.api import OwnBlocks, measure_on_blocks
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.make_plan import PlanOptions, make_plan
from hetu_fx.planner.simulate.simulate import simulate
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs
from hetu_fx.show.timeline import Timeline

WAIT = timedelta(seconds=120)


class Rank:
    """One rank's way through the demo: read `work` from top to bottom."""

    def __init__(self, folder: Path, settings: DemoSettings, *, quotas: bool) -> None:
        self.folder, self.settings, self.table = folder, settings, GroupTable()
        self.screen = make_screen(shows=dist.get_rank() == 0)
        self.devices = Quotas(settings) if quotas else Devices(settings)
        self.text, self.model = Text(settings, library_pieces()), make_model(settings)

    def work(self) -> None:
        """Measure, plan, train, compare, save."""
        # Measuring and training are the subject: a device of 0.2 cores would take long over a capture.
        self.devices.lift_speeds()
        program, blocks = self._capture()
        self.devices.make_unequal()
        cluster = self._measure(blocks)
        self.devices.lift_speeds()
        plans, predicted = self._plan(program, cluster)
        optimizer = make_optimizer(self.model, self.settings)
        batch = rows_of_this_rank(self.text.batch(0))
        hetu_fx.auto_parallelize(self.model, batch, plan=plans, cluster=cluster, optimizer=optimizer, check=False)
        self.devices.make_unequal()

        self.screen.head(f"Training {num_parameters(self.model) / 1e6:.1f} M parameters")
        training = Training(self.model, optimizer, self.text, self.devices, self.screen)
        training.run()
        self.screen.head("The same batches by DDP with even shares, on the same devices")
        shares = even_shares(self.text, self.devices, self.screen)
        self._save(training, shares, cluster, predicted)

    def _capture(self) -> tuple[CapturedProgram, OwnBlocks]:
        """Capture the model on a usual batch, and make its blocks ready to measure devices on."""
        self.screen.head("Capturing the model")
        program = self._captured(0)
        return program, OwnBlocks.of(program, program.costs(memory=False), torch.device("cpu"), self.table.size)

    def _captured(self, step: int) -> CapturedProgram:
        return CapturedProgram.of(Programs(self.model, None), self.text.batch(step))

    def _measure(self, blocks: OwnBlocks) -> Cluster:
        self.screen.head("Devices, as measured")
        cluster = measure_on_blocks(blocks, Cluster.measure(self.table), self.table)
        self.screen.say(str(cluster))
        return cluster

    def _plan(self, program: CapturedProgram, cluster: Cluster) -> tuple[list[Plan], Timeline]:
        """Plan a variant for usual batches and one for long ones; also return the first plan's simulated timeline.

        Rank 0 plans and tells the others: planning is deterministic, but slow devices would take long.
        """
        self.screen.head("Plans, and why")
        plans, predicted = broadcast_from_rank0(self.table, lambda: self._planned(program, cluster))
        for plan in plans:
            self.screen.say(f"{plan.explain()}\n")
        return plans, predicted

    def _planned(self, program: CapturedProgram, cluster: Cluster) -> tuple[list[Plan], Timeline]:
        costs = [program.costs(), self._captured(self.settings.long_at[0]).costs()]
        options = PlanOptions(name="usual", max_length=self.settings.length), PlanOptions(name="long")
        plans = [make_plan(cost, cluster, options=own) for cost, own in zip(costs, options, strict=True)]
        return plans, simulate(plans[0], costs[0], cluster).timeline

    def _save(
        self, training: Training, shares: Mapping[str, Throughput], cluster: Cluster, predicted: Timeline
    ) -> None:
        self.screen.head("Saving and exporting")
        self.devices.lift_speeds()
        handle, events = training.hetu, all_gather_object(self.table, training.events)
        held_out = loss_of(self.model, rows_of_this_rank(self.text.held_out()))
        weights = {name: hetu_fx.full_tensor(parameter) for name, parameter in self.model.named_parameters()}
        handle.save(self.folder / CHECKPOINT)
        handle.export(self.folder / "export")
        record = RunRecord(
            records=tuple(training.records),
            slowed=training.slowed,
            slowed_rank=self.devices.slowed_rank,
            even_shares=shares,
            plans={name: plan.to_json() for name, plan in handle.variants.items()},
            # Processes of one machine share its clock.
            measured=Timeline(tuple(e for own in events for e in own), "measured on the emulated devices"),
            predicted=predicted,
            held_out_loss=held_out,
            weights=digest(weights),
            num_parameters=num_parameters(self.model),
        )
        if dist.get_rank() == 0:
            cluster.write(self.folder / "cluster.json")
            record.write(self.folder / "run.json")
        self.screen.end()


def main() -> None:
    """Read the command line and work."""
    parser = argparse.ArgumentParser("python -m examples.demo.rank", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--quotas", action="store_true", help="the devices' speeds are CPU quotas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", timeout=WAIT)
    Rank(options.folder, settings_for(quick=options.quick), quotas=options.quotas).work()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
