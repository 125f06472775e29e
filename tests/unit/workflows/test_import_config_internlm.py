"""Every key of the configuration in InternLM's training guide is imported, and both pages for its users name each of them."""

import re
from pathlib import Path

import pytest

from headway.config.load import load
from headway.train.config import Recipe
from headway.workflows.import_config import ImportedConfig, import_config

DOCS = Path(__file__).parents[3] / "docs"
CONFIG = """
JOB_NAME = "7b_train"
DO_ALERT = True
model_type = "INTERNLM"
ckpt = dict(
    enable_save_ckpt=True, save_ckpt_folder="local:llm_ckpts", load_ckpt_folder="local:llm_ckpts/",
    load_ckpt_info=dict(path="local:llm_ckpts/49", content=("model",), ckpt_type="internlm"), checkpoint_every=50,
    async_upload=True, async_upload_tmp_folder="/dev/shm/internlm_tmp_ckpt/", oss_snapshot_freq=25,
)
data = dict(
    seq_len=2048, micro_num=4, micro_bsz=2, valid_micro_num=4, valid_every=50, pack_sample_into_one=False, total_steps=50000,
    skip_batches="3-5,9", rampup_batch_size="2 2 3", min_length=50, train_folder="/data/train", valid_folder="/data/valid",
    empty_cache_and_diag_interval=10, diag_outlier_ratio=1.1,
)
grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000), growth_factor=2, backoff_factor=0.5, max_scale=2**24, hysteresis=2
)
hybrid_zero_optimizer = dict(overlap_sync_grad=True, overlap_sync_param=True, reduce_bucket_size=512 * 1024 * 1024, clip_grad_norm=1.0)
loss = dict(label_smoothing=0)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps=data["total_steps"], init_steps=0, warmup_ratio=0.01, eta_min=1e-5, last_epoch=-1)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)
model = dict(
    checkpoint=False, num_attention_heads=32, embed_split_hidden=True, vocab_size=103168, embed_grad_scale=1, parallel_output=True,
    hidden_size=4096, num_layers=32, mlp_ratio=8 / 3, apply_post_layer_norm=False, dtype="torch.float16", norm_type="rmsnorm",
    layer_norm_epsilon=1e-5, use_flash_attn=True, num_chunks=1,
)
parallel = dict(zero1=8, tensor=2, pipeline=dict(size=2, interleaved_overlap=True), sequence_parallel=True)
cudnn_deterministic = False
cudnn_benchmark = False
monitor = dict(alert=dict(enable_feishu_alert=DO_ALERT, feishu_alert_address=None, light_monitor_address="http://monitor"))
"""
LISTED = """
JOB_NAME DO_ALERT model_type ckpt.enable_save_ckpt ckpt.save_ckpt_folder ckpt.load_ckpt_folder ckpt.load_ckpt_info.path
ckpt.load_ckpt_info.content ckpt.load_ckpt_info.ckpt_type ckpt.checkpoint_every ckpt.async_upload ckpt.async_upload_tmp_folder
ckpt.oss_snapshot_freq data.seq_len data.micro_num data.micro_bsz data.valid_micro_num data.valid_every data.pack_sample_into_one
data.total_steps data.skip_batches data.rampup_batch_size data.min_length data.train_folder data.valid_folder
data.empty_cache_and_diag_interval data.diag_outlier_ratio grad_scaler.fp16.initial_scale grad_scaler.fp16.min_scale
grad_scaler.fp16.growth_interval grad_scaler.growth_factor grad_scaler.backoff_factor grad_scaler.max_scale grad_scaler.hysteresis
hybrid_zero_optimizer.overlap_sync_grad hybrid_zero_optimizer.overlap_sync_param hybrid_zero_optimizer.reduce_bucket_size
hybrid_zero_optimizer.clip_grad_norm loss.label_smoothing adam.lr adam.adam_beta1 adam.adam_beta2 adam.adam_beta2_c adam.adam_eps
adam.weight_decay lr_scheduler.total_steps lr_scheduler.init_steps lr_scheduler.warmup_ratio lr_scheduler.eta_min
lr_scheduler.last_epoch beta2_scheduler.init_beta2 beta2_scheduler.c beta2_scheduler.cur_iter model.checkpoint
model.num_attention_heads model.embed_split_hidden model.vocab_size model.embed_grad_scale model.parallel_output model.hidden_size
model.num_layers model.mlp_ratio model.apply_post_layer_norm model.dtype model.norm_type model.layer_norm_epsilon
model.use_flash_attn model.num_chunks parallel.zero1 parallel.tensor parallel.pipeline.size parallel.pipeline.interleaved_overlap
parallel.sequence_parallel cudnn_deterministic cudnn_benchmark monitor.alert.enable_feishu_alert
monitor.alert.feishu_alert_address monitor.alert.light_monitor_address
"""
KEYS = LISTED.split()


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImportedConfig:
    # Weights that are not there would be reported as missing.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llm_ckpts" / "49").mkdir(parents=True)
    config = tmp_path / "7B_sft.py"
    config.write_text(CONFIG)
    return import_config(config, "internlm")


def test_every_key_of_the_guide_has_a_headway_form(imported: ImportedConfig) -> None:
    outcomes: dict[str, set[str]] = {}
    for entry in imported.report:
        outcomes.setdefault(entry.key, set()).add(entry.outcome)
    assert [key for key in KEYS if key not in outcomes] == []
    assert [key for key in KEYS if outcomes[key] & {"missing", "unknown"}] == []
    assert set(outcomes) - set(KEYS) == {"model", "tokenizer"}  # the file names no tokenizer


def test_keys_of_the_guide_become_settings_of_the_recipe(imported: ImportedConfig) -> None:
    recipe = imported.recipe
    assert recipe["batch"] == {
        "accumulate": 4,
        "rows_per_rank": 2,
        "rampup": {"start": 4, "add": 4, "every": 3, "per_rank": True},
    }
    assert recipe["log"] == {"slow_every": 10, "slow_ratio": 1.1}
    assert recipe["data"]["train"] == [{"path": "/data/train", "min_length": 50}]
    assert recipe["parallel"]["tensor"] == 2
    assert recipe["parallel"]["pipeline"] == 2
    assert recipe["parallel"]["sequence"] is True
    assert [tracker["kind"] for tracker in recipe["track"]] == ["tensorboard", "alert", "heartbeat"]


def test_the_recipe_of_the_guides_file_is_loaded(imported: ImportedConfig, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(imported.as_yaml())
    assert load(Recipe, path, []).batch.resolve(2048, ranks=8).rows == 64


@pytest.mark.parametrize("page", ["coming-from-internlm.md", "coming-from-internlm.zh-CN.md"])
def test_both_pages_name_every_key(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    names = {key.rsplit(".", 1)[-1] for key in KEYS}
    assert sorted(name for name in names if not re.search(rf"(?<!\w){name}(?!\w)", text)) == []


def test_a_batch_that_grows_counts_rows_of_a_rank_or_of_all() -> None:
    grown = load(
        Recipe,
        None,
        [
            "batch.rows_per_rank=2",
            "batch.accumulate=4",
            "batch.rampup={start: 2, add: 2, every: 3, per_rank: true}",
        ],
    )
    assert grown.batch.rampup is not None
    over = grown.batch.rampup.over(8)
    assert (over.start, over.add, over.every) == (16, 16, 3)
    assert over.over(8) == over
