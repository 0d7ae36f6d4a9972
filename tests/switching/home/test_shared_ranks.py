"""Whole tensors for whoever asks for memory, on three gloo ranks: on one of them alone, or on all."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.base.torch_private import version
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.home.held import host_part
from hetu_fx.switching.home.ops import HomeTensor, home_layout
from hetu_fx.switching.home.shared import SharedHomes
from hetu_fx.switching.home.tensor import Read

WORLD = 3
HOMES = {
    "uneven": ((10, 6), Annotation.on((0, 1, 2), Split(0, (7, 0, 3)))),
    "columns": ((4, 12), Annotation.on((2, 0, 1), Split(1, (1, 2, 1), outer=3))),
    "alone": ((8,), Annotation.on((1,))),
    "copies": ((6, 6), Annotation.on((0, 1, 2), Duplicate(3))),
    "scalar": ((), Annotation.on((2,))),
}
SECONDS = 1.0


def value(name: str) -> Tensor:
    shape, _ = HOMES[name]
    generator = torch.Generator().manual_seed(list(HOMES).index(name))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


class Run(nn.Module):
    """Home parameters under their names, which the ranks may read of each other as long as it is there."""

    def __init__(self, rank: int, seconds: float = 60.0) -> None:
        super().__init__()
        for name, (shape, annotation) in HOMES.items():
            home = HomeTensor.from_full(value(name), home_layout(annotation, shape, rank, WORLD))
            self.register_parameter(name, nn.Parameter(home))
        self.shared = SharedHomes(GroupTable(), dict(self.named_parameters()), seconds)

    def write(self, factor: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(factor)


def loaded(tensors: Any) -> dict[str, Tensor]:
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    buffer.seek(0)
    found: dict[str, Tensor] = torch.load(buffer)
    return found


def assert_whole(found: dict[str, Tensor], factor: float = 1.0) -> None:
    assert found.keys() == HOMES.keys()
    for name, tensor in found.items():
        assert type(tensor) is Tensor
        assert torch.equal(tensor, value(name) * factor)


def check_one_rank_alone_saves_while_the_others_go_on(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    for saver in range(world):
        if rank == saver:
            assert_whole(loaded(run.state_dict()))
            save_file(run.state_dict(), folder / "whole.safetensors")
            assert_whole(load_file(folder / "whole.safetensors"))
        dist.barrier()


def check_all_ranks_ask_and_write_at_once(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    for turn in range(16):
        assert_whole({name: torch.tensor(p.numpy(force=True)) for name, p in run.named_parameters()}, 2.0**turn)
        run.write(2.0)
    dist.barrier()


def check_what_a_rank_reads_and_writes_while_it_is_asked_is_given(rank: int, world: int, folder: Path) -> None:
    """Between two looks of the thread that answers, this rank reads what is asked for, and goes on."""
    run = Run(rank, SECONDS)
    name = ("uneven", "columns", "scalar")[rank]  # what this rank has a part of
    own, looked = run.get_parameter(name), run.shared._read.part
    question: Read = ((name,), version(own), str(own.home_layout.annotation)), None
    looks = []

    def look(asked: Read) -> Tensor | None:
        found = looked(asked)
        looks.append(found)
        if len(looks) == 1:
            run.shared._read.keep(asked, host_part(own.local, own.home_layout).clone())
            run.write(2.0)
        return found

    run.shared._read.part = look  # type: ignore[method-assign]
    assert torch.equal(run.shared._part(question, rank) * 2, host_part(own.local, own.home_layout))
    dist.barrier()


def check_an_optimizers_state_is_saved_by_one_rank(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    plain = [nn.Parameter(value(name)) for name in HOMES]
    optimizers = [torch.optim.AdamW(parameters) for parameters in (run.parameters(), plain)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    if rank == 0:
        found, wanted = loaded(optimizers[0].state_dict())["state"], optimizers[1].state_dict()["state"]
        assert found.keys() == wanted.keys()
        for number, state in wanted.items():
            assert all(torch.equal(found[number][key], state[key]) for key in state)  # type: ignore[index]
    dist.barrier()


def check_a_rank_that_has_gone_on_refuses(rank: int, world: int, folder: Path) -> None:
    run = Run(rank, SECONDS)
    if rank:
        run.write(2.0)
    dist.barrier()
    if rank == 0:
        with pytest.raises(StateError, match="'uneven' as it was after 0 writes, and this rank has gone on and made 1"):
            run.uneven.detach().numpy()
    dist.barrier()


def check_a_rank_that_does_not_write_is_waited_for_a_bounded_time(rank: int, world: int, folder: Path) -> None:
    run = Run(rank, SECONDS)
    if rank == 0:
        run.write(2.0)
        with pytest.raises(StateError, match=r"'uneven' after 1 writes, and this rank has made 0 in 1 s"):
            run.uneven.detach().numpy()
    dist.barrier()


def check_tensors_without_a_name_are_read_by_all_or_refused(rank: int, world: int, folder: Path) -> None:
    run = Run(rank, SECONDS)
    doubled = {name: HomeTensor(p.local * 2, p.home_layout) for name, p in run.named_parameters()}
    if rank == 0:
        with pytest.raises(StateError, match=r"shape \(10, 6\) that is neither a parameter.*call full_tensor\(\)"):
            doubled["uneven"].tolist()
    dist.barrier()
    assert_whole({name: torch.tensor(tensor.tolist(), dtype=torch.float64) for name, tensor in doubled.items()}, 2.0)
    dist.barrier()


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda p: p.norm(),
    "largest norm": lambda p: p.norm(float("inf")),
    "number of zeros": lambda p: p.norm(0),
    "sum": lambda p: p.sum(),
    "sum in another dtype": lambda p: p.sum(dtype=torch.float32),
    "mean": lambda p: p.mean(),
    "maximum": lambda p: p.max(),
    "deviation": lambda p: p.std(),
    "square": lambda p: (p**2).sum().sqrt(),
    "largest size": lambda p: p.abs().max(),
    "float norm": lambda p: (p.float() / 2).norm(),
    "not finite": lambda p: torch.isnan(p).any(),
    "finite": lambda p: p.isfinite().all(),
    "difference": lambda p: (p - p.detach()).abs().sum(),
    "element": lambda p: p.reshape(-1)[0],
    "row": lambda p: p[0].sum() if p.dim() else p.sum(),
}


def check_one_rank_alone_reads_numbers_while_the_others_go_on(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    for reader in range(world):
        if rank == reader:
            for name, parameter in run.named_parameters():
                for number, read in NUMBERS.items():
                    if number != "deviation" or parameter.numel() > 1:
                        wanted = float(read(value(name) * 2.0**reader))
                        assert float(read(parameter.detach())) == pytest.approx(wanted), f"{number} of {name}"
        dist.barrier()
        run.write(2.0)


def check_all_ranks_read_numbers_and_write_at_once(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    for turn in range(16):
        norms = [(p.detach() * 2).norm().item() + p.detach().norm().item() for p in run.parameters()]
        assert norms == pytest.approx([3 * 2.0**turn * value(name).norm().item() for name in HOMES])
        run.write(2.0)
    dist.barrier()


def check_a_number_that_a_rank_alone_reads_too_late_is_refused_there(rank: int, world: int, folder: Path) -> None:
    run = Run(rank, SECONDS)
    if rank:
        run.write(2.0)
    dist.barrier()
    if rank == 0:
        with pytest.raises(StateError, match="'uneven' as it was after 0 writes, and this rank has gone on and made 1"):
            run.uneven.detach().norm().item()
        run.write(2.0)
        assert run.uneven.detach().norm().item() == pytest.approx(2 * value("uneven").norm().item())
    dist.barrier()


def check_copies_of_what_has_a_name_have_one(rank: int, world: int, folder: Path) -> None:
    run = Run(rank, SECONDS)
    best = copy.deepcopy(run.state_dict())
    average = {name: parameter.detach().clone() for name, parameter in run.named_parameters()}
    halves = {name: parameter.detach().float() for name, parameter in run.named_parameters()}
    run.write(2.0)
    for name, parameter in run.named_parameters():
        average[name].lerp_(parameter.detach(), 0.5)
    again = copy.deepcopy(average)
    if rank == 0:
        private = run.uneven.detach().clone()
        assert_whole(loaded(best))
        assert_whole(loaded(average), 1.5)
        assert_whole(loaded(again), 1.5)
        assert torch.equal(loaded(halves)["columns"], value("columns").float())
        assert torch.equal(torch.tensor(private.tolist()), value("uneven").float() * 2)
        assert torch.equal(torch.tensor(private.clone().half().tolist()), (value("uneven") * 2).half().float())
        with pytest.raises(StateError, match=r"a copy of parameter 'uneven', of which there are 0 here"):
            private.mul_(2).numpy()
    dist.barrier()


def check_two_averages_of_one_parameter_are_read_by_all(rank: int, world: int, folder: Path) -> None:
    run = Run(rank, SECONDS)
    averages = [run.uneven.detach().clone() for _ in range(2)]
    for number, average in enumerate(averages):
        average.mul_(number + 2)
    if rank == 0:
        with pytest.raises(StateError, match="neither a parameter nor"):
            averages[0].numpy()
    dist.barrier()
    for number, average in enumerate(averages):
        assert torch.equal(torch.from_numpy(average.numpy().copy()), value("uneven") * (number + 2))
    dist.barrier()


def check_an_optimizers_loaded_state_is_cut(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    plain = [nn.Parameter(value(name)) for name in HOMES]
    saved = torch.optim.AdamW(plain, lr=0.1)
    for parameter in plain:
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    optimizer = torch.optim.AdamW(run.parameters(), lr=0.1)
    for _ in range(2):  # before its first step, and after
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        for parameter in run.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert all(type(state["exp_avg"]) is HomeTensor for state in optimizer.state.values())
    dist.barrier()


def check_tied_names_share_what_they_are_given(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    first, second = run.uneven.detach(), run.uneven.detach()
    assert first.data_ptr() == second.data_ptr() == first.untyped_storage().data_ptr()
    if rank == 0:
        assert first.view(-1)[-1].data_ptr() == second.data_ptr() + (first.numel() - 1) * first.itemsize
    pair = loaded({"first": first, "second": second})
    assert pair["first"].data_ptr() == pair["second"].data_ptr()
    before = first.data_ptr()
    run.write(2.0)
    assert torch.equal(torch.tensor(first.tolist()), value("uneven").float() * 2)
    assert before  # kept by `second` until it is asked again
    dist.barrier()


def check_parameters_are_pickled_as_plain_ones(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    if rank == 1:
        found = pickle.loads(pickle.dumps(run.uneven))
        assert type(found) is nn.Parameter
        assert torch.equal(found, value("uneven"))
    dist.barrier()


def check_arrays_of_pieces_are_read_only(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    assert not run.uneven.detach().numpy().flags.writeable
    assert np.asarray(run.copies.detach()).flags.writeable
    with pytest.raises(RuntimeError, match="requires grad"):
        run.uneven.numpy()
    assert float(run.scalar) == run.scalar.item() == value("scalar").item()
    with pytest.raises(StateError, match=r"cannot be put into memory that processes share.*full_tensor\(\)"):
        run.uneven.share_memory_()
    dist.barrier()


def check_runs_are_left_in_any_order(rank: int, world: int, folder: Path) -> None:
    runs = [Run(rank), Run(rank)]
    began = monotonic()
    for run in runs if rank else reversed(runs):
        run.shared.finish()
    assert monotonic() - began < 30  # each would wait twice as long for a rank that has not left
    dist.barrier()


def check_ranks_that_leave_answer_who_still_reads(rank: int, world: int, folder: Path) -> None:
    run = Run(rank)
    if rank == 0:
        while not all((folder / f"leaving{other}").exists() for other in range(1, world)):
            sleep(0.01)
        assert_whole(loaded(run.state_dict()))
    (folder / f"leaving{rank}").touch()
    run.shared.finish()
    dist.barrier()


def check_a_rank_that_leaves_waits_for_questions_a_bounded_time(rank: int, world: int, folder: Path) -> None:
    run = Run(rank, SECONDS)
    if rank:
        run.shared.finish()
    dist.barrier()  # the first leaves only now
    run.shared.finish()


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
