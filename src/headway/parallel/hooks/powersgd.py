"""PowerSGD: a gradient matrix is sent as two thin ones, P [n, r] and Q [m, r], whose product approximates the sum over ranks.

    M += residual      P = sum M Q      P orthonormal      Q = sum M^T P      M' = P Q^T      residual = M - M' / ranks

The error of a rank's matrix is added to its next gradient (error feedback). Vectors, matrices that would hardly shrink and very long ones
(embeddings) are sent whole, in the same exchange. Buckets are exchanged during backward.

In a checkpoint the residual is a tensor [ranks, n, m]: each rank saves its part. A run resumed with another number of ranks gives every
rank an equal share of the sum of the residuals, which is what enters the summed gradient. A step that is not finite clears the residuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headway.config.section import setting
from headway.errors import ParallelError
from headway.parallel.box import StateTensor
from headway.parallel.hooks.base import HookConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headway.parallel.collectives import Handle, RankGroup
    from headway.parallel.engine import ReadTensor
    from headway.parallel.flat.bucket import Bucket
    from headway.parallel.mesh import Mesh

RESIDUAL, Q = "powersgd_residual", "powersgd_q"


class Config(HookConfig):
    """Settings of PowerSGD."""

    NEEDS_FP32: ClassVar[bool] = True
    kind: str = setting("powersgd", "powersgd.", on_resume="free")
    rank: int = setting(32, "Columns of the thin matrices.", gt=0)
    start_step: int = setting(2, "Steps with plain sums before compression begins.", ge=0)
    error_feedback: bool = setting(
        True, "Add the approximation error of a step to the next gradient."
    )
    q: Literal["warm", "fixed", "fresh"] = setting(
        "warm",
        "First Q of a step: that of the last step (warm), one random matrix for the whole run (fixed), or a new random one (fresh).",
    )
    min_compression_rate: float = setting(
        2.0,
        "A matrix is compressed if it has more than this many times the elements of P and Q.",
        ge=0,
    )
    max_dim: int = setting(
        60_000,
        "Matrices with a longer side are sent whole: embeddings and heads approximate badly.",
        gt=0,
    )

    def check(self, mesh: Mesh, precision: str) -> None:
        """A residual carries the loss scale it was made with; a matrix of which a rank has a part has another approximation."""
        if mesh.tensor > 1:
            raise ParallelError(
                f"parallel.hook.kind is powersgd and parallel.tensor is {mesh.tensor}: it would approximate parts of matrices, "
                "not the matrices. Use parallel.tensor=1, or hook compress."
            )
        if mesh.expert > 1:
            raise ParallelError(
                f"parallel.hook.kind is powersgd and parallel.expert is {mesh.expert}: all ranks save its residuals, and each has some of "
                "the experts. Use parallel.expert=1, or hook compress."
            )
        if precision == "float16" and self.error_feedback:
            raise ParallelError(
                "parallel.hook.kind is powersgd with precision fp16: its residual would change with the loss scale. "
                "Use bf16, or parallel.hook.error_feedback=false."
            )

    def build(self, device: torch.device) -> PowerSGD:
        """Make the hook."""
        return PowerSGD(self, device)


class PowerSGD:
    """Low-rank sums of gradient matrices."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from headway.parallel.background import Background

        self.config = config
        self.background = Background(device)
        self.step = 0
        self.residuals: dict[str, Tensor] = {}
        self.bases: dict[str, Tensor] = {}
        """Q of every compressed matrix."""

    def __call__(self, bucket: Bucket) -> Handle:
        """Start the exchange of one bucket."""
        step = self.step
        self.step += bucket.is_last
        if step < self.config.start_step:
            return bucket.ranks.reduce.all_reduce(bucket.flat)
        thin = any(
            self.columns(slot.shape) or slot.name in self.residuals for slot in bucket.span.slots
        )
        # whole buckets too: in the background all exchanges of a step keep their order, which must be the same on every rank
        return self.background.run(
            lambda: (
                self._exchange(bucket, step)
                if thin
                else bucket.ranks.reduce.all_reduce(bucket.flat).wait()
            )
        )

    def columns(self, shape: tuple[int, ...]) -> int:
        """Rank of the approximation of a gradient of this shape; 0: it is sent whole."""
        if len(shape) < 2:
            return 0
        rows, columns = shape[0], _prod(shape[1:])
        rank = min(rows, columns, self.config.rank)
        pays = (rows + columns) * rank * self.config.min_compression_rate < rows * columns
        return rank if pays and max(rows, columns) <= self.config.max_dim else 0

    def _exchange(self, bucket: Bucket, step: int) -> None:
        import torch

        with torch.no_grad():
            gradients = bucket.gradients()
            for name, gradient in gradients.items():
                if name in self.residuals:
                    gradient.add_(self.residuals[name].view(gradient.shape))
            thin = {
                name: g.view(g.shape[0], -1)
                for name, g in gradients.items()
                if self.columns(tuple(g.shape))
            }
            whole = [gradient for name, gradient in gradients.items() if name not in thin]
            for name in gradients.keys() - thin.keys():
                self.residuals.pop(
                    name, None
                )  # it went in; a matrix that is sent whole leaves none
            data = bucket.ranks.reduce
            rest = torch.cat([gradient.flatten() for gradient in whole]) if whole else None
            left, p_flat = _flat(
                {
                    name: (m.shape[0], self.columns(tuple(gradients[name].shape)))
                    for name, m in thin.items()
                },
                bucket.flat,
            )
            right, q_flat = _flat(
                {
                    name: (m.shape[1], self.columns(tuple(gradients[name].shape)))
                    for name, m in thin.items()
                },
                bucket.flat,
            )
            for name, matrix in thin.items():
                torch.mm(
                    matrix,
                    self._basis(name, right[name].shape, step, matrix.device),
                    out=left[name],
                )
            first = data.all_reduce(p_flat)
            second = data.all_reduce(rest) if rest is not None else None
            first.wait()
            for name, matrix in thin.items():
                left[name].copy_(orthonormal(left[name]))
                torch.mm(matrix.t(), left[name], out=right[name])
            data.all_reduce(q_flat).wait()
            finite = q_flat.isfinite().all()
            for name, matrix in thin.items():
                self._finish(name, matrix, left[name], right[name], finite, data.size)
            if rest is not None and second is not None:
                second.wait()
                for gradient, part in zip(
                    whole, rest.split([g.numel() for g in whole]), strict=True
                ):
                    gradient.copy_(part.view(gradient.shape))

    def _finish(
        self, name: str, matrix: Tensor, p: Tensor, q: Tensor, finite: Tensor, ranks: int
    ) -> None:
        """Replace the matrix by the approximation of the sum; store its error and the next step's Q."""
        import torch

        total = p @ q.t()
        if self.config.error_feedback:
            lost = matrix - total / ranks
            self.residuals[name] = torch.where(finite, lost, torch.zeros_like(lost))
        if self.config.q == "warm":
            self.bases[name] = torch.where(finite, q, self.bases[name])
        matrix.copy_(total)

    def _basis(self, name: str, shape: torch.Size, step: int, device: torch.device) -> Tensor:
        """The orthonormal Q a step begins with, the same on every rank."""
        kept = self.bases.get(name)
        if kept is None or kept.shape != shape or self.config.q == "fresh":
            kept = self.bases[name] = self.draw(name, shape, step).to(device)
        return orthonormal(kept)

    def draw(self, name: str, shape: torch.Size, step: int) -> Tensor:
        """A random matrix that depends on nothing but the parameter's name and, for fresh ones, the step."""
        import torch

        from headway.runtime.seed import derive

        generator = torch.Generator().manual_seed(
            derive(0, "powersgd", name, step if self.config.q == "fresh" else 0)
        )
        return torch.randn(tuple(shape), generator=generator)

    def tensors(self, ranks: RankGroup) -> Iterator[StateTensor]:
        """This rank's residuals, and Q once."""
        for name, residual in self.residuals.items():
            row = residual[None]
            shape = (ranks.size, *residual.shape)
            yield StateTensor(name, RESIDUAL, shape, [((ranks.rank, 0, 0), row)])
        for name, basis in self.bases.items():
            boxes = [((0, 0), basis)] if ranks.rank == 0 else []
            yield StateTensor(name, Q, tuple(basis.shape), boxes)

    def scalars(self, ranks: RankGroup) -> dict[str, Any]:
        """What describes the tensors."""
        return {
            "kind": "powersgd",
            "ranks": ranks.size,
            "step": self.step,
            RESIDUAL: {name: list(value.shape) for name, value in self.residuals.items()},
            Q: {name: list(value.shape) for name, value in self.bases.items()},
        }

    def load(
        self, read: ReadTensor, scalars: dict[str, Any], ranks: RankGroup, device: torch.device
    ) -> None:
        """Take back what was saved; with another number of ranks, an equal share of all residuals."""
        if scalars.get("kind") != "powersgd":
            return
        self.step, before = scalars["step"], scalars["ranks"]
        for name, (rows, columns) in scalars[RESIDUAL].items():
            if before == ranks.size:
                value = read(name, RESIDUAL, (ranks.rank, 0, 0), (1, rows, columns))[0]
            else:
                value = read(name, RESIDUAL, (0, 0, 0), (before, rows, columns)).sum(0) / ranks.size
            self.residuals[name] = value.to(device)
        self.bases = {
            name: read(name, Q, (0, 0), (rows, rank)).to(device)
            for name, (rows, rank) in scalars[Q].items()
        }


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span the same space, in fp32."""
    import torch

    return torch.linalg.qr(matrix).Q


def _flat(shapes: dict[str, tuple[int, int]], like: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Matrices stored one after another in one tensor, so that they are sent together."""
    flat = like.new_empty(sum(rows * columns for rows, columns in shapes.values()))
    parts = flat.split([rows * columns for rows, columns in shapes.values()])
    return {
        name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }, flat


def _prod(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
