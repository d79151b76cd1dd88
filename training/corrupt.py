"""Damages the encoder's output the way a faulty hand-over would, to see what answers reveal.

The rows that travel from encode to prefill are the merger's (main) and one tensor per deepstack
level, all [rows, hidden] per picture. Each corruption edits these lists in place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Rows = list[torch.Tensor]  # one tensor per picture
Corruption = Callable[[Rows, list[Rows]], None]  # (main, levels of deepstack)


def swap_images(main: Rows, deepstack: list[Rows]) -> None:
    """The first two pictures' rows change places, where their sizes allow."""
    for rows in [main, *deepstack]:
        if len(rows) > 1 and rows[0].shape == rows[1].shape:
            rows[0], rows[1] = rows[1], rows[0]


def shift_rows(main: Rows, deepstack: list[Rows]) -> None:
    """Every row lands one place too far."""
    for rows in [main, *deepstack]:
        rows[:] = [one.roll(1, 0) for one in rows]


def lose_tail(main: Rows, deepstack: list[Rows]) -> None:
    """The last tenth of each picture never arrived."""
    for rows in [main, *deepstack]:
        for number, one in enumerate(rows):
            kept = one.clone()
            kept[-max(1, len(one) // 10) :] = 0
            rows[number] = kept


def drop_deepstack(main: Rows, deepstack: list[Rows]) -> None:
    """Only the main rows arrived."""
    for rows in deepstack:
        rows[:] = [torch.zeros_like(one) for one in rows]


def drop_last_level(main: Rows, deepstack: list[Rows]) -> None:
    """The last deepstack level never arrived."""
    deepstack[-1][:] = [torch.zeros_like(one) for one in deepstack[-1]]


def reorder_deepstack(main: Rows, deepstack: list[Rows]) -> None:
    """The deepstack levels arrived in the wrong order."""
    deepstack.reverse()


def swap_deepstack(main: Rows, deepstack: list[Rows]) -> None:
    """The first two pictures' deepstack rows change places; their main rows are right."""
    swap_images([], deepstack)


def shift_deepstack(main: Rows, deepstack: list[Rows]) -> None:
    """Deepstack rows land one place too far; the main rows are right."""
    shift_rows([], deepstack)


def float8(main: Rows, deepstack: list[Rows]) -> None:
    """Rows rounded to eight bits: harmless, it should change nothing."""
    for rows in [main, *deepstack]:
        rows[:] = [one.to(torch.float8_e4m3fn).to(one.dtype) for one in rows]


CORRUPTIONS: dict[str, Corruption] = {
    function.__name__: function
    for function in (
        swap_images, shift_rows, lose_tail, drop_deepstack, drop_last_level, reorder_deepstack,
        swap_deepstack, shift_deepstack, float8,
    )
}  # fmt: skip


@contextmanager
def corrupted(model: Any, name: str) -> Iterator[None]:
    """Within the block, the vision tower's output is damaged; `none` damages nothing."""
    if name == "none":
        yield
        return
    damage = CORRUPTIONS[name]

    def damage_output(visual: Any, args: Any, kwargs: Any, output: Any) -> Any:
        grids = kwargs["grid_thw"]
        counts = (grids.prod(-1) // visual.spatial_merge_size**2).tolist()
        main = list(output.pooler_output.split(counts))
        deepstack = [list(level.split(counts)) for level in output.deepstack_features]
        damage(main, deepstack)
        output.pooler_output = torch.cat(main)
        output.deepstack_features = [torch.cat(level) for level in deepstack]
        return output

    hook = model.model.visual.register_forward_hook(damage_output, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
