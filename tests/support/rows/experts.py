"""Settings of mixtures of experts."""

from support.observe import Row, engine, numbers, shapes

MIXTURE = ("model.experts.num=4", "model.init_std=0.3")

ROWS: dict[str, Row] = {
    "model.experts.num": ((), 4, 6, engine(shapes)),
    "model.experts.per_token": (MIXTURE, 2, 3, numbers),
    "model.experts.ffn_size": (MIXTURE, None, 16, engine(shapes)),
    "model.experts.shared_ffn_size": (MIXTURE, 0, 16, engine(shapes)),
    "model.experts.normalize": (MIXTURE, True, False, numbers),
    "model.experts.router": (MIXTURE, "softmax", "sigmoid", numbers),
    "model.experts.first_dense": (MIXTURE, 0, 1, engine(shapes)),
    "model.experts.every": (MIXTURE, 1, 2, engine(shapes)),
    "model.experts.aux_loss": (MIXTURE, 0.01, 0.0, numbers),
    "model.experts.aux_scope": (MIXTURE, "row", "step", numbers),
    "model.experts.aux_layers": (MIXTURE, "each", "pooled", numbers),
    "model.experts.z_loss": (MIXTURE, 0.0, 0.01, numbers),
    "model.experts.bias_rate": (MIXTURE, None, 0.1, numbers),
}
