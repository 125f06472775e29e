"""Settings of models of family transformers."""

from headway.errors import ConfigError
from headway.train.config import Recipe
from headway.train.wrapped import wrapped_shape
from support.setting_runs import Row, load

SMALL = "model_type: olmo, hidden_size: 16, intermediate_size: 16, num_attention_heads: 2, vocab_size: 64, pad_token_id: null"


def shape(overrides: tuple[str, ...]) -> object:
    """The model's shape, or why it is refused."""
    try:
        return wrapped_shape(
            load(Recipe, None, ["model.family=transformers", *overrides]), None, 64
        ).num_layers
    except ConfigError as error:
        return str(error)


ROWS: dict[str, Row] = {
    "model.hf_config": (
        (),
        f"{{{SMALL}, num_hidden_layers: 1}}",
        f"{{{SMALL}, num_hidden_layers: 2}}",
        shape,
    ),
    "model.trust_remote_code": (
        ("model.hf_config={model_type: mine, auto_map: {AutoModelForCausalLM: mine.Mine}}",),
        False,
        True,
        shape,
    ),
}
