"""On a CUDA device: the sampler has the weights that train, whatever the engine does with its copy of them."""

from pathlib import Path

import pytest
import torch
from support.rollout_runs import rollout_recipe, write_rollout_inputs

from headway.track.metrics_file import read_metrics
from headway.train import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollout_inputs(tmp_path_factory.mktemp("rollouts"))


@pytest.mark.parametrize(
    ("name", "settings", "limit"),
    [
        ("fp32", ("precision=fp32", "kernels.tf32=false"), 1e-4),
        ("bf16", ("precision=bf16",), 3e-2),
        ("lora", ("precision=bf16", "adapter={rank: 4, targets: [q_proj, v_proj]}"), 3e-2),
    ],
)
def test_sampler_and_trainer_agree_after_every_update(
    folder: Path, name: str, settings: tuple[str, ...], limit: float
) -> None:
    # A large rate: weights that stayed behind by one update would show.
    recipe = rollout_recipe(folder, name, "device=cuda", "optim.lr=1e-2", *settings)
    train(recipe)
    records = read_metrics(recipe.run.folder / "metrics.jsonl")
    assert len(records) == 4
    for record in records:
        assert record["agreement/mean"] < limit
