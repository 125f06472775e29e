"""Models, adapters and masks as options of `headway serve`."""

from pathlib import Path

import pytest

from headway.cli.serve import ServedModels, split_adapter, split_model
from headway.errors import ConfigError
from headway.model.head_masks.choice import MaskChoice


def test_a_model_is_named_by_its_run_its_repository_or_the_user(tmp_path: Path) -> None:
    final = tmp_path / "runs" / "my run" / "final"
    final.mkdir(parents=True)
    assert split_model(str(final))[0] == "my-run"
    assert split_model("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert split_model("small=Qwen/Qwen3-0.6B") == ("small", "Qwen/Qwen3-0.6B")


def test_an_adapter_names_its_model_where_there_are_several() -> None:
    assert split_adapter("law=/x/y", ["a"]) == ("a", "law", "/x/y")
    assert split_adapter("b:law=/x/y", ["a", "b"]) == ("b", "law", "/x/y")


@pytest.mark.parametrize(("option", "models"), [("law", ["a"]), ("law=/x", ["a", "b"])])
def test_an_adapter_without_a_name_or_a_clear_model_is_refused(
    option: str, models: list[str]
) -> None:
    with pytest.raises(ConfigError):
        split_adapter(option, models)


def test_masks_of_all_models_or_of_one() -> None:
    models = ServedModels(["a", "b"], masks=["b=masks.tsv", "none"], adapter=[])
    chosen = models.mask_choices(["a", "b"], MaskChoice(stream_window=64))
    assert chosen == {"a": MaskChoice("none"), "b": MaskChoice("masks.tsv", stream_window=64)}
