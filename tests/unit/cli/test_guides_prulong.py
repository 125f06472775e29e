"""The guide for users of PruLong names only settings and recipes that exist, and every knob of the scripts is in it."""

import re
from pathlib import Path

import pytest
from support.recipe_settings import setting_paths

from headway.train.config import Recipe

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "coming-from-prulong.md").read_text(encoding="utf-8")
NAMES = """
MODEL BSZ SEQ LR STEPS SAVE WARMUP MIN_LR_RATIO SEQ_PARALLEL_SIZE FSDP GC MAX_TOKS START_HEAD_SPARSITY END_HEAD_SPARSITY
MASK_LEARNING_RATE REG_LEARNING_RATE SPARSITY_WARMUP_RATIO WARMUP_TYPE CONTEXT_WINDOW_IF_TOGGLED SINK_SIZE TOGGLE_TYPE
FREEZE_WEIGHTS FREEZE_MASKS LOAD_MASKS_FROM LOAD_MASKS_SPARSITY DATASET DOMAINS OVERRIDES SUFFIX DISABLE_LINEAR_REG_TERM NUM_GPUS
NUM_NODES MASTER_ADDR LOGIT_BLOCK_SIZE WANDB_MODE WANDB_PROJECT OMP_NUM_THREADS SAVE_STEPS RESUME_FROM_CHECKPOINT
DATALOADER_NUM_WORKERS DATALOADER_PIN_MEMORY TORCH_COMPILE BF16 TOKENIZERS_PARALLELISM PYTORCH_CUDA_ALLOC_CONF
CUDA_LAUNCH_BLOCKING NCCL_DEBUG save_total_limit apply_instruct_masks token_scaled_loss
"""


def test_every_setting_the_guide_names_exists() -> None:
    known = {re.sub(r"\[\w+\]", "", path) for path in setting_paths(Recipe)}
    sections = {path.rsplit(".", 1)[0] for path in known if "." in path}
    named = {
        setting
        for text in re.findall(r"`([^`]+)`", re.sub(r"(?s)```.*?```", "", GUIDE))
        for setting in re.findall(r"\b[a-z_]+(?:\.[a-z0-9_]+)+\b", text)
    }
    heads = {path.split(".")[0] for path in known}
    wrong = {
        name
        for name in named
        if name.split(".")[0] in heads
        and name not in known
        and name not in sections
        and not name.endswith((".yaml", ".log", ".out", ".py"))
    }
    assert wrong <= {"parallel.context"}, f"no such setting: {sorted(wrong)}"
    assert len(named & known) > 25


def test_every_recipe_and_test_the_guide_names_exists() -> None:
    for path in re.findall(r"(?:recipes|tests|benchmarks)/[\w/.-]+\.(?:yaml|py|md)", GUIDE):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("knob", NAMES.split())
def test_the_guide_has_every_knob_of_the_scripts(knob: str) -> None:
    assert re.search(rf"\b{knob}\b", GUIDE), (
        f"{knob} has no equivalent in docs/coming-from-prulong.md"
    )
