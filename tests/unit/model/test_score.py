"""Reward models of every family: transformers' sequence classification and ours give the same scores, both ways; others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import CASES, build_reference
from support.preference_pairs import pair_batch

from headway.checkpoint.stored_model import find_model
from headway.errors import ConfigError
from headway.export.huggingface import export_huggingface, with_padding
from headway.infer.load import load_model
from headway.model.base import build_frozen_model
from headway.model.config import ModelConfig
from headway.model.families.base import classifier_of, family_names, family_of
from headway.model.layout import HEAD, SCORE, ParamSpec, in_groups, num_parameters, param_specs
from headway.optim.groups import trainable
from headway.runtime.digests import write_digests

SMALL = ModelConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    ffn_size=24,
    vocab_size=32,
    max_seq_len=32,
    tie_embeddings=False,
)
WITHOUT = {
    "cohere2",
    "ernie4_5",
    "ernie4_5_moe",
    "glm4_moe",
    "granite",
    "granitemoehybrid",
    "internlm",
    "lfm2",
    "lfm2_moe",
    "minimax_m2",
    "olmoe",
    "qwen3_5_moe",
    "transformers",
    "z2all",
}
"""Families without such a class, or published as another one; `transformers` wraps causal models alone."""
IDS = torch.randint(1, 96, (2, 11), generator=torch.Generator().manual_seed(3))


def scores(path: Path) -> torch.Tensor:
    """Our scores of the two rows of ids."""
    loaded = load_model(path, scores=True)
    batch = pair_batch(
        [[(IDS[0, :1].tolist(), IDS[0, 1:].tolist(), IDS[1, 1:].tolist())]], seq_len=32
    )
    batch.tokens[0, 11] = IDS[1, 0]
    out = loaded.model.forward_batch(batch)
    assert out.score is not None
    return out.score.of_documents(batch.bounds)[0, :2]


def test_families_name_the_class_that_transformers_has() -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as THEIRS,
    )

    for name in family_names():
        family = family_of(name)
        named = vars(family).get("CLASSIFIER")
        assert named in (None, THEIRS.get(family.MODEL_TYPE)), name
        assert (named is None) == (name in WITHOUT), name


QUICK = ("llama", "gpt2", "gemma2", "qwen3_moe")
SLOW = ("gemma3", "phi3", "glm4", "deepseek_v3", "gpt_oss")
SCORED = [
    name
    for name in CASES
    if "CLASSIFIER" in vars(family_of(name.split()[0])) and name != "phi3 longrope"
]


def marked(case: str) -> Any:
    """A case of the default tests, of the slow ones or of the drills: those that differ most come first."""
    if case in QUICK:
        return case
    if case in SLOW:
        return pytest.param(case, marks=pytest.mark.slow)
    return pytest.param(case, marks=pytest.mark.drill)


@pytest.mark.parametrize("case", [marked(case) for case in SCORED])
def test_scores_are_those_of_transformers_and_an_export_loads_there(
    case: str, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    trunk = build_reference(case)
    trunk.config.num_labels = 1
    classifier = getattr(transformers, vars(family_of(case.split()[0]))["CLASSIFIER"])(
        trunk.config
    ).eval()
    classifier.base_model.load_state_dict(trunk.base_model.state_dict())
    classifier.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        right = torch.cat([classifier(row[None]).logits[0] for row in IDS])
    model = find_model(tmp_path / "theirs")
    assert model.config.score_head
    assert HEAD not in dict(model.weights())
    torch.testing.assert_close(scores(tmp_path / "theirs"), right, rtol=1e-4, atol=1e-5)
    export_huggingface(model.config, model.weights(), tmp_path / "ours", tokenizer=None)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours"
    ).eval()
    assert type(again) is type(classifier)
    assert again.config.num_labels == 1
    with torch.no_grad():
        torch.testing.assert_close(
            torch.cat([again(row[None]).logits[0] for row in IDS]), right, rtol=1e-5, atol=1e-6
        )
    assert torch.equal(scores(tmp_path / "ours"), scores(tmp_path / "theirs"))


def test_a_family_without_such_a_class_and_several_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model.family is granite; a reward model needs one with .*llama, .*qwen3",
    ):
        classifier_of(SMALL.with_(family="granite"))
    config = SMALL.with_(score_head=True)
    export_huggingface(
        config,
        ((spec.name, torch.ones(spec.shape)) for spec in param_specs(config)),
        tmp_path / "hf",
        tokenizer=None,
    )
    path = tmp_path / "hf" / "config.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"id2label": {"0": "bad", "1": "good", "2": "best"}}
        )
    )
    write_digests(tmp_path / "hf")
    with pytest.raises(
        ConfigError,
        match=r"config.json: LlamaForSequenceClassification has 3 labels; headway reads reward models",
    ):
        find_model(tmp_path / "hf")


def test_a_score_head_takes_the_place_of_the_lm_head() -> None:
    for tied in (False, True):
        config = SMALL.with_(score_head=True, tie_embeddings=tied)
        names = [spec.name for spec in param_specs(config)]
        assert names[-1] == SCORE
        assert HEAD not in names
        assert not any(spec.tied_to for spec in param_specs(config))
        model = build_frozen_model(
            config,
            ((spec.name, torch.ones(spec.shape)) for spec in param_specs(config)),
            torch.device("cpu"),
            torch.float32,
        )
        assert [name for name, _ in model.named_parameters()] == names
        assert num_parameters(config) == num_parameters(SMALL) - 32 * 16 + 16


def test_padding_of_an_export_ends_no_answer() -> None:
    from support.chat_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    assert with_padding(tokenizer).roles == {"bos": "<s>", "eos": "</s>", "pad": "<s>"}
    for end_token, ends, wanted in (
        ("</s>", (), "<s>"),
        ("<eoa>", (), "<eoa>"),
        ("<eoa>", (tokenizer.token_to_id("<eoa>"),), "<s>"),
    ):
        tokenizer.roles["pad"] = end_token
        assert (
            with_padding(tokenizer, [end for end in ends if end is not None]).roles["pad"] == wanted
        )
    tokenizer.roles.pop("bos")
    assert (
        "pad"
        not in with_padding(
            tokenizer,
            [token_id for token_id in (tokenizer.token_to_id("<eoa>"),) if token_id is not None],
        ).roles
    )


def test_the_head_trains_beside_an_adapter_unless_it_is_frozen() -> None:
    update = "model.layers.0.mlp.up_proj.lora_A.weight"
    specs = [
        ParamSpec("model.layers.0.mlp.up_proj.weight", (8, 4)),
        ParamSpec(update, (2, 4), groups=in_groups("adapter")),
        ParamSpec(SCORE, (1, 4), groups=in_groups("score")),
    ]
    by_name = {spec.name: spec for spec in specs}
    assert trainable(by_name, (), ()) == {update, SCORE}
    assert trainable(by_name, ("score",), ()) == {update}
