"""`headway config import`: recipes from configurations of nine systems equal the golden ones, and no key is lost."""

import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from headway.cli import main
from headway.config.load import load
from headway.errors import ConfigError
from headway.train.config import Recipe
from headway.workflows.import_config import SYSTEMS, import_config
from headway.workflows.import_config.literals import Unread, read_python
from headway.workflows.import_config.rules import has_setting, shown

HERE = Path(__file__).parents[2] / "support" / "imported"
FILES = {
    "axolotl-qlora.yml": "axolotl",
    "axolotl-dpo.yml": "axolotl",
    "llamafactory-sft.yaml": "llamafactory",
    "internlm-1b.py.txt": "internlm",
    "flare.json": "flare",
    "flare-command.txt": "flare",
    "purrsight.yaml": "purrsight",
    "purrsight-nested.yaml": "purrsight",
    "prulong-masks.sh": "prulong",
    "prulong-sft.env": "prulong",
    "prulong-sft.sh": "prulong",
    "trl-grpo.yaml": "trl",
    "verl-dapo.sh": "verl",
    "verl-grpo.yaml": "verl",
    "openrlhf-grpo.sh": "openrlhf",
}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def outcomes(name: str) -> dict[str, set[str]]:
    outcomes_of: dict[str, set[str]] = {}
    for entry in import_config(Path(name), FILES[name]).report:
        outcomes_of.setdefault(entry.key, set()).add(entry.outcome)
    return outcomes_of


@pytest.mark.parametrize("name", FILES)
def test_the_recipe_is_the_golden_one(name: str) -> None:
    imported = import_config(Path(name), FILES[name])
    golden = HERE / "golden" / f"{name}.yaml"
    if os.environ.get("HEADWAY_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(imported.as_yaml(), encoding="utf-8")
    assert json.loads(json.dumps(imported.recipe)) == json.loads(
        json.dumps(YAML(typ="safe").load(golden.read_text(encoding="utf-8")))
    )
    load(Recipe, golden)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(("yml", "yaml"))])
def test_every_key_of_the_file_is_in_the_report(name: str) -> None:
    settings = YAML(typ="safe").load((HERE / name).read_text(encoding="utf-8"))
    told = {key.split(".")[0] for key in outcomes(name)}
    assert set(settings) <= told


def test_every_system_has_a_golden_recipe() -> None:
    assert set(FILES.values()) == set(SYSTEMS)


def test_what_has_no_counterpart_is_named_with_a_reason_and_the_nearest_form() -> None:
    imported = import_config(HERE / "axolotl-qlora.yml", "axolotl")
    lost = {entry.key: entry for entry in imported.not_carried_over}
    assert imported.recipe["adapter"]["base"] == "nf4"
    assert lost["my_own_key"].outcome == "unknown"
    assert lost["neftune_noise_alpha"].outcome == "missing"
    assert lost["datasets.1.shards"].headway.startswith("limit")
    assert not {"adapter", "load_in_4bit"} & lost.keys()
    assert all(entry.key in imported.as_yaml() for entry in imported.not_carried_over)


def test_the_other_systems_defaults_are_written_where_they_differ() -> None:
    imported = import_config(HERE / "axolotl-dpo.yml", "axolotl")
    assert imported.recipe["optim"]["weight_decay"] == 0.0
    assert imported.recipe["optim"]["betas"] == [0.9, 0.999]
    assert {entry.key for entry in imported.report if entry.outcome == "assumed"} >= {
        "weight_decay",
        "adam_beta2",
        "lr_scheduler",
    }


def test_internlm_files_are_read_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    config = tmp_path / "config.py"
    config.write_text(
        f"JOB_NAME = 'x'\nopen({str(marker)!r}, 'w')\nbad = __import__('os').system('touch {marker}')\n"
        f"data = dict(seq_len=2048, micro_bsz=1, total_steps=eval('1+1'))\nbig = 9**9**9**9\n"
    )
    imported = import_config(config, "internlm")
    assert not marker.exists()
    told = {entry.key: entry for entry in imported.report}
    assert (
        told["data.total_steps"].outcome == told["bad"].outcome == told["big"].outcome == "unknown"
    )
    assert imported.recipe["data"]["seq_len"] == 2048
    assert outcomes("internlm-1b.py.txt")["UNUSED"] == {"unknown"}
    assert (
        "unknown"
        in outcomes("internlm-1b.py.txt")["BUCKET"] | outcomes("internlm-1b.py.txt")["import os"]
    )


def test_domains_of_a_fine_tuning_script_are_sources_below_its_dataset() -> None:
    imported = import_config(HERE / "prulong-sft.sh", "prulong")
    assert imported.recipe["data"]["train"] == [
        {"path": "datasets/sft/ultrachat", "weight": 0.8},
        {"path": "datasets/sft/books", "weight": 0.2},
    ]
    assert imported.recipe["freeze"] == ["gates"]
    assert imported.not_carried_over == []


MASKS_ONLY_SNIPPET = """
model="models/llama"  # any Llama model
dataset="datasets/sample"
NUM_GPUS=4
BSZ=8
STEPS=100
END_HEAD_SPARSITY=0.5  # the target
CONTEXT_WINDOW_IF_TOGGLED=1024
"""


@pytest.mark.parametrize(
    ("name", "content", "frozen"),
    [
        ("prulong_masksonly.sh", MASKS_ONLY_SNIPPET, ["weights"]),
        (
            "custom_config.sh",
            "export MODEL=x\nexport STEPS=5000\nexport START_HEAD_SPARSITY=0.0\n",
            ["weights"],
        ),
        ("prulong_masksandweights.sh", MASKS_ONLY_SNIPPET, None),
        ("any.sh", MASKS_ONLY_SNIPPET + "FREEZE_WEIGHTS=false\nFREEZE_MASKS=false\n", None),
        ("sft.sh", "model=runs/masks\ndataset=datasets/chat\n", ["gates"]),
        (
            "command.sh",
            "torchrun -m training.lh_train_language_model --model_name x --max_steps 10 --tokenized_mds_train a@0.5 b@0.5",
            None,
        ),
    ],
)
def test_variables_for_a_script_of_prulong_keep_what_the_script_freezes(
    tmp_path: Path, name: str, content: str, frozen: list[str] | None
) -> None:
    path = tmp_path / name
    path.write_text(content)
    imported = import_config(path, "prulong")
    assert imported.recipe.get("freeze") == frozen
    if name == "prulong_masksonly.sh":
        # the script shares a sequence between two GPUs
        assert imported.recipe["batch"]["rows"] == 4
        assert imported.recipe["optim"]["schedule"]["floor"] == 0.01
        assert "FREEZE_WEIGHTS" in {
            line.key for line in imported.report if line.outcome == "assumed"
        }
    if name == "command.sh":
        assert imported.recipe["objective"]["target"] == 0.95
        assert [source["path"] for source in imported.recipe["data"]["train"]] == ["a", "b"]


@pytest.mark.parametrize("name", FILES)
def test_the_report_names_the_settings_that_the_recipe_has(name: str) -> None:
    imported = import_config(Path(name), FILES[name])
    for line in imported.report:
        path, _, value = line.headway.partition(": ")
        if line.outcome not in ("set", "assumed") or not re.fullmatch(
            r"[a-z_0-9]+(\.[a-z_0-9]+)+", path
        ):
            continue
        node: Any = imported.recipe
        for part in path.split("."):
            node = node.get(part, "absent") if isinstance(node, dict) else "absent"
        if not isinstance(node, dict | list):
            assert shown(node) == value.split(", ")[0], line


def test_axes_of_internlm_become_axes_of_a_layout(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    data = "data = dict(seq_len=64, micro_bsz=1)\n"
    config.write_text(
        data
        + "parallel = dict(zero1=dict(size=2), tensor=dict(size=4, mode='mtp'), sequence_parallel=False)\n"
    )
    assert import_config(config, "internlm").recipe["parallel"] == {
        "zero1": {"size": 2},
        "tensor": 4,
        "sequence": False,
    }
    config.write_text(data + "parallel = dict(zero1=1, tensor=2, sequence_parallel=True)\n")
    assert import_config(config, "internlm").recipe["parallel"] == {
        "zero1": {"size": 1},
        "tensor": 2,
        "sequence": True,
    }


@pytest.mark.parametrize(
    ("options", "folder", "loads"),
    [
        (
            "",
            None,
            False,
        ),  # InternLM resumes its own run first: the placeholder of its example is never read
        ("", "llm_ckpts/xxxx", True),
        ("auto_resume=True, ", None, False),
        ("auto_resume=False, ", None, True),
        ("load_given_ckpt=True, ", None, True),
    ],
)
def test_weights_that_internlm_would_not_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, folder: str | None, loads: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if folder is not None:
        Path(folder).mkdir(parents=True)
    Path("config.py").write_text(
        f"ckpt = dict({options}load_ckpt_info=dict(path='local:llm_ckpts/xxxx', content=('model',), ckpt_type='internlm'))\n"
        "model = dict(num_attention_heads=2, vocab_size=128, hidden_size=32, num_layers=1)\n"
        "data = dict(seq_len=32)\n"
    )
    imported = import_config(Path("config.py"), "internlm")
    lost = {line.key: line.note for line in imported.not_carried_over}
    if loads:
        assert imported.recipe["init"] == {"from": "llm_ckpts/xxxx", "content": ["model"]}
        assert "model" not in imported.recipe
    else:
        assert "init" not in imported.recipe
        assert imported.recipe["model"]["hidden_size"] == 32
        assert "random weights" in lost["ckpt.load_ckpt_info.path"]


def test_the_report_on_internlms_checkpoints_is_what_the_recipe_has(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(
        "data = dict(seq_len=64)\nckpt = dict(enable_save_ckpt=False, checkpoint_every=50, oss_snapshot_freq=25)\n"
    )
    imported = import_config(config, "internlm")
    lines = {line.key: line for line in imported.report}
    assert imported.recipe["checkpoint"] == {"every": None, "at_end": False}
    assert lines["ckpt.checkpoint_every"].headway == "checkpoint.every: null"
    assert lines["ckpt.oss_snapshot_freq"].headway == ""


@pytest.mark.parametrize("name", ["muon", "lion_32bit", "adafactor", "schedule_free_adamw"])
def test_other_optimizers_are_imported_with_the_settings_they_have(
    tmp_path: Path, name: str
) -> None:
    config = tmp_path / "theirs.yml"
    config.write_text(
        f"base_model: x\noptimizer: {name}\nlearning_rate: 1e-3\nlr_scheduler: cosine\nadam_beta2: 0.98\n"
    )
    imported = import_config(config, "axolotl")
    assert imported.recipe["optim"]["kind"] in name
    lost = {
        entry.key.split(".")[1]
        for entry in imported.not_carried_over
        if entry.key.startswith("optim.")
    }
    assert {"schedule", "betas"} <= lost | set(imported.recipe["optim"])


AXOLOTL = "base_model: x\ndatasets: [{path: data.jsonl}]\n"
PREFERENCE: list[tuple[str, str, dict[str, Any], str]] = [
    ("axolotl", AXOLOTL + "rl: ipo\nrl_beta: 0.2\n", {"kind": "dpo", "loss_type": "ipo", "beta": 0.2}, "preference"),
    ("axolotl", AXOLOTL + "rl: orpo\norpo_alpha: 0.3\n", {"kind": "orpo", "beta": 0.3}, "preference"),
    ("axolotl", AXOLOTL + "rl: simpo\nrl_beta: 2.5\nsimpo_gamma: 1.4\n", {"kind": "simpo", "beta": 2.5, "gamma": 1.4}, "preference"),
    ("axolotl", AXOLOTL + "rl: simpo\ncpo_alpha: 0\n", {"kind": "simpo", "beta": 0.1, "gamma": 0.5}, "preference"),
    ("axolotl", AXOLOTL + "kto_undesirable_weight: 0.2\nrl: kto\nprecompute_ref_log_probs: true\n",
     {"kind": "kto", "beta": 0.1, "undesirable_weight": 0.2, "reference_logps": "cached"}, "unpaired"),
    ("axolotl", AXOLOTL + "reward_model: true\ncenter_rewards_coefficient: 0.01\n",
     {"kind": "reward", "center_rewards_coefficient": 0.01}, "preference"),
    ("llamafactory", "stage: dpo\ndataset: d\npref_loss: orpo\n", {"kind": "orpo", "beta": 0.1}, "preference"),
    ("llamafactory", "pref_loss: simpo\nstage: dpo\ndataset: d\npref_beta: 2.0\nsimpo_gamma: 0.7\n",
     {"kind": "simpo", "beta": 2.0, "gamma": 0.7}, "preference"),
    ("llamafactory", "stage: kto\ndataset: d\npref_beta: 0.4\nkto_chosen_weight: 1.5\nkto_rejected_weight: 0.5\nref_model: y\n",
     {"kind": "kto", "beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5, "reference": "y"}, "unpaired"),
    ("llamafactory", "stage: rm\ndataset: d\n", {"kind": "reward"}, "preference"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("system", "content", "objective", "kind"),
    PREFERENCE,
    ids=lambda name: name if isinstance(name, str) else "",
)
def test_preference_trainings_are_objectives_with_their_settings(
    tmp_path: Path, system: str, content: str, objective: dict[str, Any], kind: str
) -> None:
    path = tmp_path / "theirs.yml"
    path.write_text(content)
    imported = import_config(path, system)
    assert imported.recipe["objective"] == objective
    assert imported.recipe["data"]["train"][0]["kind"] == kind
    lost = {entry.key for entry in imported.not_carried_over} - {"dataset"}
    assert lost == (
        {"cpo_alpha"} if "rl: simpo" in content and "cpo_alpha" not in content else set()
    )
    (tmp_path / "recipe.yaml").write_text(imported.as_yaml())
    load(Recipe, tmp_path / "recipe.yaml")


def test_keys_of_labelled_records_and_settings_an_objective_lacks(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yml"
    fields = "{field_prompt: q, field_label: good, prompt_format: p}"
    path.write_text(
        f"base_model: x\nrl: kto\nsimpo_gamma: 0.5\ndatasets: [{{path: d.jsonl, type: {fields}}}]\n"
    )
    imported = import_config(path, "axolotl")
    assert imported.recipe["data"]["train"][0]["keys"] == {
        "prompt": "q",
        "label": "good",
        "response": "completion",
    }
    assert {entry.key for entry in imported.not_carried_over} == {
        "simpo_gamma",
        "datasets.0.type.prompt_format",
    }
    info = {
        "d": {
            "file_name": "d.json",
            "columns": {"messages": "turns", "kto_tag": "ok"},
            "formatting": "sharegpt",
        }
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    path.write_text(f"stage: kto\ndataset: d\ndataset_dir: {tmp_path}\n")
    assert import_config(path, "llamafactory").recipe["data"]["train"][0]["keys"] == {
        "messages": "turns",
        "label": "ok",
    }


def test_names_that_double_each_other_are_refused_in_time(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(
        "a0 = [1] * 9\n"
        + "a0 = [1, 2]\n"
        + "\n".join(f"a{n + 1} = [a{n}, a{n}]" for n in range(40))
    )
    with pytest.raises(ConfigError, match="values"):
        import_config(config, "internlm")


EXPRESSIONS = [
    "(" * 300 + "1" + ")" * 300,
    "-" * 5000 + "1",
    "[" * 90 + "]" * 90,
    "'a' * 10**9",
    "f'{1}'",
    "a.b",
    "None[0]",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_no_expression_breaks_the_python_reader(expression: str) -> None:
    try:
        value: Any = read_python(f"x = {expression}", Path("c.py")).values["x"]
    except ConfigError:
        return
    assert isinstance(value, Unread | int | list)


@pytest.mark.parametrize(
    ("content", "system", "wrong"),
    [
        ("rl: grpo\nbase_model: x\n", "axolotl", "grpo"),
        ("stage: ppo\n", "llamafactory", "ppo"),
        ("base_model: x\nlearning_rate: fast\n", "axolotl", "learning_rate"),
        ("base_model: x\nmicro_batch_size: 0\n", "axolotl", "rows_per_rank"),
        ("- 1\n", "axolotl", "mapping"),
        ("", "axolotl", "no keys"),
        ("red: 1\nblue: 2\n", "purrsight", "--from purrsight"),
        ("x = (", "internlm", "not a Python file"),
        ("a: 1\n", "megatron", "--from"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str, system: str, wrong: str
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(content)
    assert main(["config", "import", str(path), "--from", system]) == 2
    told = capfd.readouterr().err
    assert wrong in told and len(told.splitlines()) == 1, told


IMPORT_LLAMAFACTORY = ["config", "import", "llamafactory-sft.yaml", "--from", "llamafactory"]


def test_the_verb_prints_a_recipe_or_writes_it_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a width would fold long keys
    out = tmp_path / "recipe.yaml"
    assert main(IMPORT_LLAMAFACTORY) == 0
    printed = capfd.readouterr().out
    assert main([*IMPORT_LLAMAFACTORY, "--out", str(out)]) == 0
    assert out.read_text() == printed
    assert "loraplus_lr_ratio" in capfd.readouterr().out
    assert main([*IMPORT_LLAMAFACTORY, "--out", str(out)]) == 2
    assert "exists" in capfd.readouterr().err


def test_the_verb_prints_recipe_and_keys_as_json(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a width would fold long keys
    assert main([*IMPORT_LLAMAFACTORY, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["recipe"]["adapter"]["rank"] == 16
    assert answer["recipe"]["data"]["train"][0]["path"] == "llamafactory-data/support.json"
    assert {"key", "value", "outcome", "headway", "note"} == set(answer["keys"][0])


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    assert main(["config", "import", "prulong-sft.sh", "--from", "prulong"]) == 0
    printed = capfd.readouterr()
    assert "wandb" in printed.err
    assert "[wandb]" in printed.err
    assert len(printed.err.splitlines()) == 1
    options = ["--from", "prulong", "--out", str(tmp_path / "recipe.yaml")]
    assert main(["config", "import", "prulong-sft.sh", *options]) == 0
    assert "[wandb]" in capfd.readouterr().err
    assert main(["config", "import", "prulong-masks.sh", "--from", "prulong"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("system", ["axolotl", "llamafactory"])
def test_code_in_a_models_folder_is_named_with_the_setting_that_runs_it(
    tmp_path: Path, system: str
) -> None:
    path = tmp_path / "theirs.yml"
    model = "base_model" if system == "axolotl" else "model_name_or_path"
    path.write_text(f"{model}: x\ntrust_remote_code: true\nlearning_rate: 1e-4\n")
    imported = import_config(path, system)
    (line,) = [line for line in imported.report if line.key == "trust_remote_code"]
    assert "family: transformers, trust_remote_code: true" in line.headway + line.note
    assert has_setting("model.trust_remote_code")
    assert "model" not in imported.recipe, "no recipe runs code that nobody asked for"


def test_an_imported_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(
        "JOB_NAME = 'small'\n"
        "data = dict(seq_len=32, micro_num=2, micro_bsz=2, total_steps=2, valid_every=0, pack_sample_into_one=False)\n"
        "adam = dict(lr=1e-3, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, weight_decay=0.01)\n"
        "lr_scheduler = dict(total_steps=data['total_steps'], init_steps=0, warmup_ratio=0.01, eta_min=1e-5)\n"
        "model = dict(num_attention_heads=2, vocab_size=128, hidden_size=32, num_layers=1, mlp_ratio=8 / 3, dtype='torch.float32')\n"
        "ckpt = dict(save_ckpt_folder='local:ckpts', checkpoint_every=float('inf'),\n"
        "            load_ckpt_info=dict(path='local:llm_ckpts/xxxx', content=('model',), ckpt_type='internlm'))\n"
    )
    assert main(["config", "import", "small.py", "--from", "internlm", "--out", "recipe.yaml"]) == 0
    assert main(["train", "recipe.yaml", "device=cpu", "data.workers=0"]) == 0
    assert (tmp_path / "ckpts" / "small" / "final" / "model.safetensors").exists()


def test_files_of_purrsight_are_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "config/p.yaml").write_text(
        "llm_model_name: m\ndata_dir: data\nbatch_size: 16\nnum_gpus: 4\nsave_every_n_epochs: 2\n"
    )
    (tmp_path / "data/train.jsonl").write_text("{}\n" * 100 + "\n")
    (tmp_path / "data/val.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    recipe = import_config(Path("config/p.yaml"), "purrsight").recipe
    assert recipe["checkpoint"] == {"every": 4}
    assert recipe["data"]["valid"]["sets"]["val"][0]["path"] == "data/val.jsonl"


def test_batches_of_others_become_prompts_and_updates_of_a_rollout() -> None:
    # 8 answers a device x 8 steps per generation = 64 answers = 8 groups of 8, in 2 updates of 4
    # accumulated microbatches each.
    trl = import_config(HERE / "trl-grpo.yaml", "trl").recipe["rollout"]
    assert (trl["prompts"], trl["samples"], trl["updates"], trl["passes"]) == (8, 8, 2, 2)
    verl = import_config(HERE / "verl-dapo.sh", "verl").recipe
    assert (verl["rollout"]["prompts"], verl["rollout"]["updates"]) == (512, 4)
    # Steps of verl and OpenRLHF are rollouts.
    assert (verl["steps"], verl["checkpoint"]["every"], verl["eval"]["every"]) == (800, 80, 20)
    openrlhf = import_config(HERE / "openrlhf-grpo.sh", "openrlhf").recipe
    assert (openrlhf["rollout"]["prompts"], openrlhf["rollout"]["updates"]) == (128, 2)
    assert openrlhf["checkpoint"]["every"] == 40
    assert "ahead" not in openrlhf["rollout"]


def test_openrlhf_that_trains_asynchronously_begins_a_rollout_ahead(tmp_path: Path) -> None:
    path = tmp_path / "async.sh"
    script = (HERE / "openrlhf-grpo.sh").read_text(encoding="utf-8")
    path.write_text(script.replace("--dynamic_filtering \\\n", "--async_train \\\n"))
    imported = import_config(path, "openrlhf")
    assert imported.recipe["rollout"]["ahead"] == 1


def test_an_advantage_that_needs_a_critic_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ppo.sh"
    path.write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.x=1\n")
    with pytest.raises(ConfigError, match="adv_estimator is gae, which headway cannot train"):
        import_config(path, "verl")
    path.write_text("python3 -m openrlhf.cli.train_ppo_ray --pretrain M\n")
    with pytest.raises(ConfigError, match="advantage_estimator is gae"):
        import_config(path, "openrlhf")


def test_a_loss_of_trl_that_is_not_here_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text("loss_type: sapo\nnum_generations: 4\n")
    with pytest.raises(ConfigError, match="loss_type is sapo, which headway cannot train"):
        import_config(path, "trl")


def test_rewards_that_are_functions_of_python_are_named_and_not_dropped() -> None:
    imported = import_config(HERE / "trl-grpo.yaml", "trl")
    lost = {str(entry.value): entry for entry in imported.not_carried_over}
    assert "my_rewards.tone" in lost
    assert "./mine.py" in lost["my_rewards.tone"].headway
    assert imported.recipe["reward"][1]["weight"] == 0.2


def test_overrides_of_a_script_are_read_and_nothing_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "run.sh"
    path.write_text(
        "n=8\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n"
        f"  actor_rollout_ref.rollout.n=$n actor_rollout_ref.model.path=$(touch {marker}) \\\n"
        "  +data.max_response_length=64 trainer.total_epochs=1\n"
    )
    imported = import_config(path, "verl")
    assert not marker.exists()
    assert imported.recipe["rollout"]["samples"] == 8
    assert imported.recipe["rollout"]["max_new_tokens"] == 64
    told = {entry.key: entry.outcome for entry in imported.report}
    assert told["actor_rollout_ref.model.path"] == "unknown"
