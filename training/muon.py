"""Muon: momentum whose update is made orthogonal, for the weight matrices of the blocks.

Newton-Schulz iteration drives all singular values of the momentum towards 1 without computing
them. Matrices of one shape go as one batch, in plain tensor operations, so that a whole step can
be recorded in one CUDA graph.
"""

from collections.abc import Sequence

import torch

# The quintic whose slope at zero is steepest while it stays bounded: Keller Jordan's figures.
LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """[batch, rows, columns] with all singular values near 1."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = torch.matmul(x, x.mT)
        x = LINEAR * x + (CUBIC * square + QUINTIC * (square @ square)) @ x
    result: torch.Tensor = x.mT if is_tall else x
    return result


class Muon:
    """Steps the given matrices; a fused matrix (q, k and v in one) counts as its parts."""

    def __init__(
        self,
        parameters: Sequence[tuple[torch.nn.Parameter, int]],
        momentum: float = 0.95,
        weight_decay: float = 0.02,
    ) -> None:
        """`parameters`: (matrix, number of fused parts stacked in its rows)."""
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.groups: dict[tuple[int, int, int], list[torch.nn.Parameter]] = {}
        for matrix, parts in parameters:
            rows, columns = matrix.shape
            self.groups.setdefault((parts, rows // parts, columns), []).append(matrix)
        self.velocity = {
            (parts, rows, columns): matrices[0].new_zeros(len(matrices) * parts, rows, columns)
            for (parts, rows, columns), matrices in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: torch.Tensor) -> None:
        """One update; `rate` is a scalar on the device, so a recorded step can follow it."""
        for shape, matrices in self.groups.items():
            parts, rows, columns = shape
            gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
            assert len(gradients) == len(matrices), "a matrix has no gradient"
            gradient = torch.cat([one.reshape(shape) for one in gradients])
            velocity = self.velocity[shape]
            velocity.mul_(self.momentum).add_(gradient, alpha=1 - self.momentum)
            update = orthogonalized(gradient.lerp(velocity, self.momentum)).float()
            update = update * max(1.0, rows / columns) ** 0.5
            update = update.reshape(len(matrices), parts * rows, columns)
            for matrix, change in zip(matrices, update.unbind(0), strict=True):
                matrix.mul_(1 - rate * self.weight_decay).sub_(change * rate)


def split_parameters(
    module: torch.nn.Module,
) -> tuple[list[tuple[torch.nn.Parameter, int]], list[torch.nn.Parameter]]:
    """(block matrices for Muon with their number of fused parts, all others for AdamW)."""
    matrices: list[tuple[torch.nn.Parameter, int]] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and any(part in name for part in ("blocks.", "layers.", "merger")):
            matrices.append((parameter, 3 if name.endswith("attn.qkv.weight") else 1))
        else:
            others.append(parameter)
    return matrices, others
