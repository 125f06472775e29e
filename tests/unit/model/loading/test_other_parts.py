"""The text part of a folder with pictures or sounds computes what the whole model computes on text, and goes back into the whole."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.whole_cases import CASES, CHANGED_LOGITS, OTHER_TEXT, SCALED, TEXT, VISION, build_whole

from headway.checkpoint.stored_model import find_model
from headway.errors import CheckpointError, ConfigError
from headway.export.huggingface import export_huggingface, export_model
from headway.infer.load import load_model
from headway.model.families.transformers import Wrapping
from headway.model.loading.huggingface import read_config
from headway.model.loading.other_parts import KNOWN, has_other_parts, keep_other_parts, kept_parts
from headway.model.paged_rows import PagedRows

pytest.importorskip("transformers", minversion="5.0")
NATIVE = {
    "gemma4": "transformers", "exaone4_5": "transformers", "qwen2_5_vl": "qwen2", "qwen2_vl": "qwen2", "qwen3_vl": "qwen3", "gemma3": "gemma3",
    "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe", "qwen3_vl_moe": "qwen3_moe", "glm4v": "glm4", "glm4v_moe": "glm4_moe",
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = build_whole(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 16}')
    return model, folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def test_every_model_type_that_is_read_is_compared() -> None:
    assert sorted(CASES) == sorted(KNOWN)


@torch.no_grad()
def test_logits_and_greedy_text_are_those_of_the_whole_model_on_text(
    whole: tuple[Any, Path],
) -> None:
    model, folder = whole
    loaded = load_model(folder)
    kind = model.config.model_type
    text_type = CASES[kind]["text_config"].get("model_type")
    assert loaded.config.family == NATIVE.get(kind, text_type)
    tokens = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    wanted = model(input_ids=tokens).logits
    position = torch.arange(12).expand(2, -1)
    ours = loaded.model.logits(loaded.model.hidden_states(tokens, position))
    # Chunks and single steps of the same rule round differently, in transformers too.
    allowed = 1e-5 if loaded.config.linear_attention is None else 1e-4
    assert (ours - wanted).abs().max() < allowed

    # Token by token, without the cache of transformers: the whole model sees text alone.
    text = tokens
    rows = PagedRows(loaded.model, 2, 20)
    hidden = rows.read(tokens)[:, -1]
    for _ in range(8):
        chosen = loaded.model.logits(hidden)[:, :50].argmax(-1)
        assert chosen.tolist() == model(input_ids=text).logits[:, -1, :50].argmax(-1).tolist()
        text = torch.cat([text, chosen[:, None]], 1)
        hidden = rows.step(chosen)


@torch.no_grad()
def test_an_export_is_the_whole_model_again(whole: tuple[Any, Path], tmp_path: Path) -> None:
    import transformers

    model, folder = whole
    export_model(folder, tmp_path / "out")
    before = tensors(folder)
    after = tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoModelForMultimodalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    tokens = torch.randint(3, 50, (1, 9), generator=torch.Generator().manual_seed(2))
    assert type(again) is type(model)
    # The same bytes; where they lie in memory may change the last bit of a product.
    torch.testing.assert_close(
        again.eval()(input_ids=tokens).logits, model(input_ids=tokens).logits, atol=1e-6, rtol=1e-6
    )
    assert (tmp_path / "out/preprocessor_config.json").is_file()


def test_stacked_experts_of_a_whole_model_are_written_stacked_again(tmp_path: Path) -> None:
    """As the files of a whole model may have them; transformers itself writes them one by one."""
    model = build_whole("qwen3_5_moe")
    model.save_pretrained(tmp_path / "whole")
    given = tmp_path / "whole/model.safetensors"
    values = load_file(given)
    kept = {name: value for name, value in values.items() if ".experts." not in name}
    stacked = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if ".experts." in name
    }
    save_file({**kept, **stacked}, given, metadata={"format": "pt"})

    export_model(tmp_path / "whole", tmp_path / "out")
    before = tensors(tmp_path / "whole")
    after = tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_experts_whose_matrices_lie_the_other_way_are_read_and_written_so(tmp_path: Path) -> None:
    """As Qwen3-VL mixtures are published; transformers turns them when it reads them."""
    import transformers

    model = build_whole("qwen3_vl_moe")
    model.save_pretrained(tmp_path / "whole")
    given = tmp_path / "whole/model.safetensors"
    turned = {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in load_file(given).items()
    }
    save_file(turned, given, metadata={"format": "pt"})
    again = transformers.AutoModelForMultimodalLM.from_pretrained(
        tmp_path / "whole", attn_implementation="eager"
    )
    tokens = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    loaded = load_model(tmp_path / "whole")
    with torch.no_grad():
        wanted = again.eval()(input_ids=tokens).logits
        assert torch.equal(wanted, model(input_ids=tokens).logits)
        hidden = loaded.model.hidden_states(tokens, torch.arange(12).expand(2, -1))
        assert (loaded.model.logits(hidden) - wanted).abs().max() < 1e-5

    export_model(tmp_path / "whole", tmp_path / "out")
    after = tensors(tmp_path / "out")
    assert after.keys() == turned.keys()
    assert all(torch.equal(after[name], turned[name]) for name in turned)


def small(tmp_path: Path) -> Path:
    build_whole("qwen2_5_vl").save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.parametrize(
    ("kind", "settings", "family"),
    [("mistral3", OTHER_TEXT, "ministral3"), ("exaone4_5", CASES["exaone4_5"], "transformers")],
)
@torch.no_grad()
def test_a_text_part_is_of_its_own_family_or_computed_by_its_class(
    kind: str, settings: dict[str, Any], family: str, tmp_path: Path
) -> None:
    model = build_whole(kind, settings)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config.family == family
    tokens = torch.randint(3, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    position = torch.arange(40).expand(2, -1)
    ours = loaded.model.logits(loaded.model.hidden_states(tokens, position))
    assert (ours - model(input_ids=tokens).logits).abs().max() < 1e-5


def test_the_other_parts_keep_their_type_and_a_changed_setting_goes_into_the_text_part(
    tmp_path: Path,
) -> None:
    folder = small(tmp_path)
    stored = find_model(folder)
    config = stored.config.with_(max_seq_len=128)
    export_huggingface(
        config,
        stored.weights(),
        tmp_path / "out",
        tokenizer=None,
        dtype="bfloat16",
        parts=stored.parts,
    )
    after = tensors(tmp_path / "out")
    before = tensors(folder)
    for name, value in after.items():
        if "visual" in name:
            assert torch.equal(value, before[name])
        else:
            assert value.dtype == torch.bfloat16
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["text_config"]["max_position_embeddings"] == 128
    assert (
        written["vision_config"]
        == json.loads((folder / "config.json").read_text())["vision_config"]
    )
    assert written["model_type"] == "qwen2_5_vl"


def test_the_names_of_a_folder_stay_as_they_were(tmp_path: Path) -> None:
    folder = small(tmp_path)
    before = tensors(folder)
    # transformers writes the names of earlier versions; folders with those of its classes exist, too.
    newer = {
        name.replace("model.", "model.language_model.").replace("visual.", "model.visual."): value
        for name, value in before.items()
    }
    assert newer.keys() != before.keys()
    save_file(newer, folder / "model.safetensors", metadata={"format": "pt"})
    export_model(folder, tmp_path / "out")
    after = tensors(tmp_path / "out")
    assert after.keys() == newer.keys()
    assert all(torch.equal(after[name], newer[name]) for name in newer)


def test_a_run_keeps_the_parts_and_gives_them_back(tmp_path: Path) -> None:
    folder = small(tmp_path)
    stored = find_model(folder)
    assert stored.parts is not None
    assert kept_parts(tmp_path / "run") is None
    (tmp_path / "run").mkdir()
    keep_other_parts(stored.parts, tmp_path / "run")
    kept = kept_parts(tmp_path / "run")
    assert kept is not None
    values = kept.values()
    assert values.keys() == stored.parts.values().keys()
    assert all(torch.equal(value, values[name]) for name, value in stored.parts.values().items())
    (tmp_path / "run/other_parts/other_parts.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"other_parts.safetensors: cannot be read.*Copy the parts"
    ):
        kept_parts(tmp_path / "run")


def test_one_line_says_which_part_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = small(tmp_path)
    with caplog.at_level(logging.INFO, logger="headway"):
        load_model(folder)
    lines = [record.getMessage() for record in caplog.records if "text part" in record.getMessage()]
    assert len(lines) == 1
    assert (
        "Qwen2_5_VLForConditionalGeneration has parts besides text; headway uses its text part, qwen2"
        in lines[0]
    )


@pytest.mark.parametrize("lost", ["visual.blocks.0.attn.proj.weight", "model.norm.weight"])
def test_a_folder_without_one_of_its_tensors_is_refused(tmp_path: Path, lost: str) -> None:
    folder = small(tmp_path)
    values = tensors(folder)
    del values[lost]
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"not among the weights.*Download the whole model again"
    ) as caught:
        find_model(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_file_of_its_towers_is_refused(tmp_path: Path) -> None:
    folder = small(tmp_path)
    values = tensors(folder)
    files = {
        name: "towers.safetensors" if "visual" in name else "text.safetensors" for name in values
    }
    for file in set(files.values()):
        save_file(
            {name: values[name] for name in values if files[name] == file},
            folder / file,
            metadata={"format": "pt"},
        )
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    find_model(folder)
    (folder / "towers.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"towers.safetensors: no such file, but .*lists it"):
        find_model(folder)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (SCALED, "model_type is 'aya_vision', which has parts besides text. headway reads the text part of exaone4_5"),
        ({"model_type": "qwen2_5_vl", "text_config": {**TEXT, "num_attention_heads": "many"}, "vision_config": VISION},
         "transformers cannot make this model"),
        ({"model_type": "no_such", "vision_config": {}}, "model_type is 'no_such', which has parts"),
        ({"model_type": "llama4", "text_config": {}, "vision_config": {}}, "its text part attends within chunks of the text"),
        ({"model_type": "gemma3n", "text_config": {}, "vision_config": {}}, "its vision tower is a model of timm"),
    ],
)  # fmt: skip
def test_a_model_that_was_not_compared_is_refused(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_other_parts(config)
    with pytest.raises(ConfigError, match=named) as caught:
        find_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", CHANGED_LOGITS)
def test_a_text_part_whose_logits_the_whole_model_does_not_have_is_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for wrapping in (None, Wrapping()):
        with pytest.raises(
            ConfigError,
            match="scales or caps its logits, and the whole model of transformers leaves that out",
        ):
            read_config(tmp_path, wrapping)
