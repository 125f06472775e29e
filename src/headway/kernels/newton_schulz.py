"""Newton-Schulz: replaces a matrix by a nearby one whose singular values are about 1. [..., n, m]
comes in, the same shape goes out. The step of Muon (Jordan et al. 2024,
kellerjordan.github.io/posts/muon), with its coefficients.

    X = u / |u|      A = X X^T      X = a X + (b A + c A A) X,  `steps` times

    singular values end between about 0.7 and 1.2

The shorter side is multiplied with itself, so a tall matrix is computed transposed. On CUDA a batch
is one call of each product; on the CPU every matrix is computed alone, so that the result of one
does not depend on which others are in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: the steepest at zero that stays bounded."""
EPS = 1e-7
"""In place of the norm of a matrix of zeros."""


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Orthogonalize each matrix of a batch, in the dtype it comes in."""
    if not matrices.is_cuda and matrices.dim() > 2:
        return torch.stack([orthogonalize(matrix, steps) for matrix in matrices.unbind()])
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # The Frobenius norm bounds the largest singular value, so all start in [0, 1].
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    add_product = torch.baddbmm if x.dim() == 3 else torch.addmm
    for _ in range(steps):
        gram = x @ x.mT
        update = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, update, x, beta=a)
    return x.mT if is_tall else x
