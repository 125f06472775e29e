"""PowerSGD: a gradient matrix M [n, m] is sent as two thin ones, P [n, r] and Q [m, r].

Their product approximates the sum over ranks (Vogels et al. 2019, arXiv:1905.13727, algorithm 1):

    M += residual
    P = sum over ranks of M Q, then made orthonormal
    Q = sum over ranks of M^T P
    M' = P Q^T                      the approximation of the sum
    residual = M - M' / ranks       what this rank's M lost

The error of a rank's matrix is added to its next gradient (error feedback). Vectors, matrices that
would hardly shrink and very long ones (embeddings) are sent whole, in the same exchange. Buckets
are exchanged during backward.

In a checkpoint the residual is a tensor [ranks, n, m]: each rank saves its part. A run resumed with
another number of ranks gives every rank an equal share of the sum of the residuals, which is what
enters the summed gradient. A step that is not finite clears the residuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
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

RESIDUAL = "powersgd_residual"
Q = "powersgd_q"


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
        "First Q of a step: that of the last step (warm), one random matrix for the whole run "
        "(fixed), or a new random one (fresh).",
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
        """A residual carries the loss scale it was made with.

        A matrix of which a rank has a part has another approximation.
        """
        if mesh.tensor > 1:
            raise ParallelError(
                f"parallel.hook.kind is powersgd and parallel.tensor is {mesh.tensor}: it would "
                "approximate parts of matrices, not the matrices. Use parallel.tensor=1, or hook "
                "compress."
            )
        if mesh.expert > 1:
            raise ParallelError(
                f"parallel.hook.kind is powersgd and parallel.expert is {mesh.expert}: all ranks "
                "save its residuals, and each has some of the experts. Use parallel.expert=1, or "
                "hook compress."
            )
        if precision == "float16" and self.error_feedback:
            raise ParallelError(
                "parallel.hook.kind is powersgd with precision fp16: its residual would change "
                "with the loss scale. Use bf16, or parallel.hook.error_feedback=false."
            )

    def build(self, device: torch.device) -> PowerSGD:
        return PowerSGD(self, device)


class PowerSGD:
    """Low-rank sums of gradient matrices."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from headway.parallel.background import Background

        self.config = config
        self.background = Background(device)
        self.step = 0
        """Steps so far, counted by their last bucket."""
        self.residuals: dict[str, Tensor] = {}
        """What the approximation of each matrix lost on this rank, [n, m]."""
        self.bases: dict[str, Tensor] = {}
        """Q of every compressed matrix."""

    def __call__(self, bucket: Bucket) -> Handle:
        """Start the exchange of one bucket."""
        step = self.step
        self.step += bucket.is_last
        if step < self.config.start_step:
            return bucket.ranks.reduce.all_reduce(bucket.flat)
        # A residual of a checkpoint counts even if its matrix is now sent whole.
        has_thin = any(
            self.rank_of(slot.shape) or slot.name in self.residuals for slot in bucket.span.slots
        )

        def exchange() -> None:
            if has_thin:
                self._exchange(bucket, step)
            else:
                bucket.ranks.reduce.all_reduce(bucket.flat).wait()

        # Plain sums in the background too: there all exchanges of a step keep their order, which
        # must be the same on every rank.
        return self.background.run(exchange)

    def rank_of(self, shape: tuple[int, ...]) -> int:
        """Rank of the approximation of a gradient of this shape; 0: it is sent whole."""
        if len(shape) < 2:
            return 0
        rows = shape[0]
        columns = prod(shape[1:])
        if max(rows, columns) > self.config.max_dim:
            return 0
        rank = min(rows, columns, self.config.rank)
        if (rows + columns) * rank * self.config.min_compression_rate >= rows * columns:
            return 0
        return rank

    def _exchange(self, bucket: Bucket, step: int) -> None:
        """Replace the gradients of a bucket by their sums, those of matrices approximately."""
        import torch

        with torch.no_grad():
            gradients = bucket.gradients()
            for name, gradient in gradients.items():
                if name in self.residuals:
                    gradient.add_(self.residuals[name].view(gradient.shape))
            ranks = {name: self.rank_of(tuple(g.shape)) for name, g in gradients.items()}
            matrices = {
                name: gradient.view(gradient.shape[0], -1)
                for name, gradient in gradients.items()
                if ranks[name]
            }
            whole = [gradient for name, gradient in gradients.items() if not ranks[name]]
            # The residual of a matrix that is now sent whole has been added above.
            for name in gradients.keys() - matrices.keys():
                self.residuals.pop(name, None)

            p_shapes = {name: (m.shape[0], ranks[name]) for name, m in matrices.items()}
            q_shapes = {name: (m.shape[1], ranks[name]) for name, m in matrices.items()}
            p, p_flat = _flat(p_shapes, bucket.flat)
            q, q_flat = _flat(q_shapes, bucket.flat)
            for name, matrix in matrices.items():
                basis = self._basis(name, q[name].shape, step, matrix.device)
                torch.mm(matrix, basis, out=p[name])

            # What is sent whole travels while P becomes orthonormal.
            group = bucket.ranks.reduce
            p_sum = group.all_reduce(p_flat)
            whole_flat = None
            whole_sum = None
            if whole:
                whole_flat = torch.cat([gradient.flatten() for gradient in whole])
                whole_sum = group.all_reduce(whole_flat)
            p_sum.wait()
            for name, matrix in matrices.items():
                p[name].copy_(orthonormal(p[name]))
                torch.mm(matrix.t(), p[name], out=q[name])
            group.all_reduce(q_flat).wait()

            finite = q_flat.isfinite().all()
            for name, matrix in matrices.items():
                self._finish(name, matrix, p[name], q[name], finite, group.size)
            if whole_flat is not None and whole_sum is not None:
                whole_sum.wait()
                sizes = [gradient.numel() for gradient in whole]
                for gradient, total in zip(whole, whole_flat.split(sizes), strict=True):
                    gradient.copy_(total.view(gradient.shape))

    def _finish(
        self, name: str, matrix: Tensor, p: Tensor, q: Tensor, finite: Tensor, ranks: int
    ) -> None:
        """Replace the matrix by the approximate sum; store its error and the next step's Q."""
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
        basis = self.bases.get(name)
        if basis is None or basis.shape != shape or self.config.q == "fresh":
            basis = self.bases[name] = self.draw(name, shape, step).to(device)
        return orthonormal(basis)

    def draw(self, name: str, shape: torch.Size, step: int) -> Tensor:
        """A random matrix that depends only on the parameter's name and, if fresh, the step."""
        import torch

        from headway.runtime.seed import derive

        if self.config.q != "fresh":
            step = 0
        generator = torch.Generator().manual_seed(derive(0, "powersgd", name, step))
        return torch.randn(tuple(shape), generator=generator)

    def tensors(self, ranks: RankGroup) -> Iterator[StateTensor]:
        """This rank's residuals, and Q once."""
        for name, residual in self.residuals.items():
            row = residual[None]
            shape = (ranks.size, *residual.shape)
            yield StateTensor(name, RESIDUAL, shape, [((ranks.rank, 0, 0), row)])
        for name, basis in self.bases.items():
            boxes = []
            if ranks.rank == 0:
                boxes = [((0, 0), basis)]
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
        """Restore what was saved; on another number of ranks, an equal share of all residuals."""
        if scalars.get("kind") != "powersgd":
            return
        self.step = scalars["step"]
        saved_ranks = scalars["ranks"]
        for name, (rows, columns) in scalars[RESIDUAL].items():
            if saved_ranks == ranks.size:
                value = read(name, RESIDUAL, (ranks.rank, 0, 0), (1, rows, columns))[0]
            else:
                every_rank = read(name, RESIDUAL, (0, 0, 0), (saved_ranks, rows, columns))
                value = every_rank.sum(0) / ranks.size
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
    sizes = [rows * columns for rows, columns in shapes.values()]
    flat = like.new_empty(sum(sizes))
    views: dict[str, Tensor] = {}
    for (name, shape), part in zip(shapes.items(), flat.split(sizes), strict=True):
        views[name] = part.view(shape)
    return views, flat
