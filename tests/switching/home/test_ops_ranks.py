"""Home tensors on three gloo ranks against one device: uneven, absent and duplicated pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from hetu_fx import PartsStager
from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.errors import StateError
from hetu_fx.switching.home.ops import HomeTensor, gather_whole, home_layout

WORLD = 3
HOMES: dict[str, tuple[tuple[int, ...], Annotation]] = {
    "uneven": ((10, 6), Annotation.on((0, 1, 2), Split(0, (7, 0, 3)))),
    "columns": ((4, 12), Annotation.on((2, 0, 1), Split(1, (1, 2, 1), outer=3))),
    "alone": ((8,), Annotation.on((1,))),
    "copies": ((6, 6), Annotation.on((0, 1, 2), Duplicate(3))),
    "mixed": ((9, 4), Annotation.on((0, 1), Duplicate(2))),
    "scalar": ((), Annotation.on((2,))),
}
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"foreach": False}),
    "adamw_foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True}),
    "adamw_amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adam_tensor_lr": (torch.optim.Adam, {"lr": torch.tensor(1e-2, dtype=torch.float64)}),
    "adam_foreach": (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd_foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "sgd_fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
    "rmsprop_foreach": (torch.optim.RMSprop, {"foreach": True}),
    "rprop": (torch.optim.Rprop, {}),
    "rprop_foreach": (torch.optim.Rprop, {"foreach": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adagrad_foreach": (torch.optim.Adagrad, {"foreach": True}),
    "adagrad_fused": (torch.optim.Adagrad, {"fused": True}),
    "adadelta": (torch.optim.Adadelta, {"foreach": True}),
    "nadam": (torch.optim.NAdam, {}),
    "nadam_foreach": (torch.optim.NAdam, {"foreach": True}),
    "radam": (torch.optim.RAdam, {"foreach": True}),
    "adamax": (torch.optim.Adamax, {}),
    "adamax_foreach": (torch.optim.Adamax, {"foreach": True}),
    "asgd": (torch.optim.ASGD, {"foreach": True}),
}


def value(name: str, seed: int) -> Tensor:
    shape, _ = HOMES[name]
    generator = torch.Generator().manual_seed(seed + 100 * list(HOMES).index(name))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def pairs(rank: int) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Parameter]]:
    """Yield (name, plain parameter, home parameter) with the same values."""
    for name, (shape, annotation) in HOMES.items():
        layout = home_layout(annotation, shape, rank, WORLD)
        plain = torch.nn.Parameter(value(name, 0))
        yield name, plain, torch.nn.Parameter(HomeTensor.from_full(value(name, 0), layout))


def parameters(rank: int) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    _, plains, homes = zip(*pairs(rank), strict=True)
    set_gradients(list(plains), list(homes), 1)
    return list(plains), list(homes)


def set_gradients(plains: list[Any], homes: list[Any], seed: int) -> None:
    for name, plain, home in zip(HOMES, plains, homes, strict=True):
        plain.grad = value(name, seed)
        home.grad = HomeTensor.from_full(value(name, seed), home.home_layout)


def assert_same(plains: list[Any], homes: list[Any], tolerance: float = 0.0) -> None:
    for name, plain, whole in zip(HOMES, plains, gather_whole(homes), strict=True):
        torch.testing.assert_close(whole, plain.detach(), rtol=0, atol=tolerance, msg=name)


def optimize(make: Any, options: dict[str, Any], rank: int) -> tuple[list[Any], list[Any]]:
    """Take three steps on both, with a state round trip after the first."""
    plains, homes = parameters(rank)
    optimizers = [make(plains, **options), make(homes, **options)]
    for step in range(3):
        set_gradients(plains, homes, step + 1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return plains, homes


def check_optimizers_step_as_on_one_device(rank: int, world: int, folder: Path) -> None:
    for make, options in OPTIMIZERS.values():
        assert_same(*optimize(make, options, rank))


def check_adafactor_runs_whole(rank: int, world: int, folder: Path) -> None:
    assert_same(*optimize(torch.optim.Adafactor, {"lr": 0.1}, rank), tolerance=1e-14)


def check_muon_runs_whole(rank: int, world: int, folder: Path) -> None:
    matrices = [position for position, (shape, _) in enumerate(HOMES.values()) if len(shape) == 2]
    plains, homes = parameters(rank)
    for some in (plains, homes):
        optimizer = torch.optim.Muon([some[position] for position in matrices], lr=0.1)
        optimizer.step()
        optimizer.step()
    assert_same(plains, homes, tolerance=1e-2)  # it works in bfloat16


def check_lbfgs_runs_whole(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    for some in (plains, homes):
        torch.optim.LBFGS(some, lr=0.1, max_iter=3).step(lambda: torch.tensor(1.0))
    assert_same(plains, homes, tolerance=1e-12)


def check_clipping_takes_the_norm_of_the_whole_model(rank: int, world: int, folder: Path) -> None:
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        for foreach in (None, True, False):
            plains, homes = parameters(rank)
            expected = clip_grad_norm_(plains, 0.5, norm_type, foreach=foreach)
            found = clip_grad_norm_(homes, 0.5, norm_type, foreach=foreach)
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
            assert type(found) is Tensor
            assert_same([p.grad for p in plains], [p.grad for p in homes], tolerance=1e-15)


def check_clipping_without_torchs_fast_path(rank: int, world: int, folder: Path) -> None:
    from torch.utils import _foreach_utils

    _foreach_utils._foreach_supported_types.remove(HomeTensor)
    plains, homes = parameters(rank)
    expected, found = clip_grad_norm_(plains, 0.5), clip_grad_norm_(homes, 0.5)
    _foreach_utils._foreach_supported_types.append(HomeTensor)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def check_clipping_values_and_nans(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    clip_grad_value_(plains, 0.3)
    clip_grad_value_(homes, 0.3)
    assert_same([p.grad for p in plains], [p.grad for p in homes])
    if rank == 1:
        homes[2].grad.local[3] = float("nan")
    assert clip_grad_norm_(homes, 1.0, float("inf")).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(homes, 1.0, error_if_nonfinite=True)


def check_half_precision_norms_do_not_overflow(rank: int, world: int, folder: Path) -> None:
    layout = home_layout(HOMES["uneven"][1], (10, 6), rank, WORLD)
    home = HomeTensor.from_full(torch.full((10, 6), 1000.0, dtype=torch.float16), layout)
    assert home.norm().dtype == torch.float16
    torch.testing.assert_close(home.norm().item(), 1000.0 * 60**0.5, rtol=1e-3, atol=0)


def check_reductions_give_the_global_value(rank: int, world: int, folder: Path) -> None:
    for name, plain, home in pairs(rank):
        for reduce in (torch.sum, torch.mean, torch.max, torch.amin, torch.norm):
            torch.testing.assert_close(reduce(home) * 1, reduce(plain), rtol=1e-13, atol=1e-13, msg=name)
        assert torch.isfinite(home).all()
        assert not (home > 100).any()
        assert torch.equal(home, home.clone())
        assert not torch.equal(home, home + 1)
        assert torch.allclose(home, plain)
        if plain.dim() == 2:
            torch.testing.assert_close(home.sum(0), plain.sum(0), rtol=1e-13, atol=0)
            torch.testing.assert_close(home.norm(dim=1), plain.norm(dim=1), rtol=1e-13, atol=0)
        if plain.dim() == 1:
            torch.testing.assert_close(torch.dot(home, home), torch.dot(plain, plain), rtol=1e-13, atol=0)


def check_mixed_operands(rank: int, world: int, folder: Path) -> None:
    for name, plain, home in pairs(rank):
        other = value(name, 5)
        with torch.no_grad():
            plain.mul_(other).add_(2.5)
            home.mul_(other).add_(2.5)
            if plain.dim() == 2:
                plain += other[:, :1]
                home += other[:, :1]
        torch.testing.assert_close(home.full_tensor(), plain.detach(), rtol=0, atol=0, msg=name)
        assert isinstance(home * other, HomeTensor) == bool(plain.dim())
        target = torch.zeros_like(plain)
        torch.testing.assert_close(target.copy_(home), plain.detach(), rtol=0, atol=0)


def check_layouts_may_differ_between_operands(rank: int, world: int, folder: Path) -> None:
    first = home_layout(Annotation.on((0, 1, 2), Split(0, (3, 2, 1))), (6, 6), rank, WORLD)
    second = home_layout(Annotation.on((1, 0), Split(1, (1, 1))), (6, 6), rank, WORLD)
    a = HomeTensor.from_full(value("copies", 1), first)
    b = HomeTensor.from_full(value("copies", 2), second)
    torch.testing.assert_close((a + b).full_tensor(), value("copies", 1) + value("copies", 2))
    torch._foreach_mul_([a], [b])
    torch.testing.assert_close(a.full_tensor(), value("copies", 1) * value("copies", 2))
    with pytest.raises(StateError, match="two layouts"):
        torch._fused_sgd_(
            [a], [a], [b], weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        )  # fmt: skip


def check_views_read_and_write_the_whole(rank: int, world: int, folder: Path) -> None:
    for name, plain, home in pairs(rank):
        torch.testing.assert_close(home.view(-1) + 0, plain.view(-1), rtol=0, atol=0)
        if name in ("uneven", "columns"):
            torch.testing.assert_close(home.t()[1:3] @ home, plain.t()[1:3] @ plain)
            with torch.no_grad():
                rows = [parameter[1:3] for parameter in (plain, home)]
                for parameter, row in zip((plain, home), rows, strict=True):
                    parameter[0].zero_()
                    parameter[:, 1] = 3.0
                    parameter.add_(1.0)
                    row.mul_(2.0).t().add_(row.sum())
                torch.testing.assert_close(rows[1] * 1, rows[0], rtol=1e-13, atol=0)
                torch.testing.assert_close(home.full_tensor(), plain.detach(), rtol=1e-13, atol=0)
                home.normal_(generator=torch.Generator().manual_seed(3))
                plain.normal_(generator=torch.Generator().manual_seed(3))
            torch.testing.assert_close(home.full_tensor(), plain.detach(), rtol=0, atol=0)


def check_autograd_accumulates_pieces(rank: int, world: int, folder: Path) -> None:
    for name, plain, home in pairs(rank):
        if not plain.dim():  # the gradient of a scalar is made whole, and comes as a plain tensor
            continue
        for parameter in (plain, home):
            for _ in range(2):
                ((parameter * parameter.detach() * 3).sum() * 2 + parameter.norm()).backward()
                parameter.norm().backward()
        assert isinstance(home.grad, HomeTensor), name
        assert home.grad.home_layout is home.home_layout
        torch.testing.assert_close(home.grad.full_tensor(), plain.grad, rtol=1e-13, atol=0)


def check_grad_scaler_skips_everywhere(rank: int, world: int, folder: Path) -> None:
    plains, homes = parameters(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(homes, lr=1.0)
    scaler.scale(torch.ones(()))
    if rank == 1:
        homes[2].grad.local[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same(plains, homes)


def check_distributed_checkpoint_reshards(rank: int, world: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({name: home.detach() for name, _, home in pairs(rank)}, checkpoint_id=folder / "dcp")
    moved = {name: Annotation.on((2, 1), Split(0, (1, 1))) for name in ("uneven", "columns", "alone")}
    wanted = {}
    for name, (shape, annotation) in HOMES.items():
        layout = home_layout(moved.get(name, annotation), shape, rank, WORLD)
        wanted[name] = HomeTensor.from_full(torch.zeros(shape, dtype=torch.float64), layout)
    dcp.load(wanted, checkpoint_id=folder / "dcp")
    assert_same([value(name, 0) for name in HOMES], list(wanted.values()))


def check_distributed_checkpoint_writes_every_element_once_by_who_counts_it(
    rank: int, world: int, folder: Path
) -> None:
    import torch.distributed.checkpoint as dcp

    homes = {name: home for name, _, home in pairs(rank)}
    under_way: Any = dcp.async_save(dict(homes), checkpoint_id=folder / "dcp", async_stager=PartsStager())
    under_way.result()
    torch.distributed.barrier()
    found = dcp.FileSystemReader(folder / "dcp").read_metadata()
    for name, home in homes.items():
        chunks = {chunk.offsets: chunk.sizes.numel() for chunk in found.state_dict_metadata[name].chunks}
        assert sum(chunks.values()) == home.numel()
        files = {index.offset: kept.relative_path for index, kept in found.storage_data.items() if index.fqn == name}
        mine = sum(chunks[offset] for offset, file in files.items() if file.startswith(f"__{rank}_"))
        assert mine == sum(box.numel for box, _ in home.home_layout.counted_chunks), name


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
