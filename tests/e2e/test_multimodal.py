"""Phase 2 as a user runs it: trained from tables, resumed bit for bit, loaded, asked, exported; LLaVA's class computes the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fuzzing import run_verb
from support.media_reads import count_media_reads
from support.small_video import film

from headway.config.load import load
from headway.errors import CheckpointError, ConfigError, DataError
from headway.export.huggingface import export_huggingface, export_model
from headway.infer.check_checkpoint import check_checkpoint
from headway.infer.generate import GenerateOptions, PromptMedia, generate_from_ids
from headway.infer.load import load_model
from headway.infer.media import (
    answer_media,
    answer_records,
    place_question,
    question_about,
    question_of,
    read_questions,
)
from headway.media.items import MediaRef
from headway.media.schema import AnswerSchema
from headway.media.synthetic import SyntheticMedia, write_media
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.loading.aligner_file import AlignerHeads, write_aligner
from headway.model.media_shape import MediaInput, MediaShape
from headway.records.encode_media import MediaPositions
from headway.runtime.digests import DIGESTS
from headway.store.media_items import MediaItem
from headway.store.media_table import MediaTableWriter
from headway.text.document import Record
from headway.tokenizer.train import train_bpe
from headway.train import train
from headway.train.config import Recipe
from headway.train.next_steps import next_steps
from headway.workflows.doctor_data import check_data

WIDTH = 6
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
    "vocab_size": 384,
}
SMALL["max_seq_len"] = 128


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated set, a tokenizer, tables of random features and an aligner."""
    folder = tmp_path_factory.mktemp("multimodal")
    write_media(
        folder / "set",
        SyntheticMedia(samples=8, heldout=4, image_size=16, seconds=0.1, missing=0.2),
    )
    texts = [
        turn["content"]
        for line in (folder / "set/chat.jsonl").read_text().splitlines()
        for turn in json.loads(line)["messages"]
    ]
    train_bpe(texts * 9, vocab_size=300, out=folder / "tok")
    for number, (name, kind) in enumerate((("image", "images"), ("audio", "sounds"))):
        files = sorted((folder / "set" / kind).iterdir())
        rows = np.random.default_rng(number).normal(size=(len(files), 1, WIDTH)).astype(np.float32)
        with MediaTableWriter(folder / name, (1, WIDTH), "float32", f"made {name}") as writer:
            writer.add([MediaRef(name, file).content_hash() for file in files], rows)  # pyright: ignore[reportArgumentType]
            writer.finish()
    write_heads(folder / "aligner.safetensors", WIDTH)
    return folder


def write_heads(path: Path, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"norm.weight": (width,), "norm.bias": (width,), "proj.weight": (5, width)}
    heads = {
        f"heads.{name}.{leaf}": torch.randn(*shape, generator=generator)
        for name in ("image", "audio")
        for leaf, shape in shapes.items()
    }
    write_aligner(AlignerHeads(heads, {"image": 2.66, "audio": 2.66}), path)


def recipe_of(workspace: Path, name: str, *more: str) -> Recipe:
    shape = [f"model.{key}={value}" for key, value in SMALL.items()]
    settings = [
        f"run.dir={workspace}/runs", f"run.name={name}", f"tokenizer={workspace}/tok", f"data.cache_dir={workspace}/cache", "data.seq_len=96",
        f"data.train=[{{path: {workspace}/set/chat.jsonl, kind: multimodal}}]", f"multimodal.image.features={workspace}/image",
        f"multimodal.audio.features={workspace}/audio", f"multimodal.aligner={workspace}/aligner.safetensors", "multimodal.image.tokens=2",
        "multimodal.audio.tokens=2", "multimodal.hidden=16", "batch.rows=2", "steps=4", "device=cpu", "optim.schedule.kind=constant",
        "adapter.rank=2", "adapter.dropout=0.1", "optim.groups=[{match: [projector], lr_factor: 5}, {match: [adapter], lr_factor: 0.5}]",
        "checkpoint.every=2",
    ]  # fmt: skip
    return load(Recipe, None, [*shape, *settings, *more])


@pytest.fixture(scope="module")
def run(workspace: Path) -> Path:
    recipe = recipe_of(workspace, "whole")
    train(recipe)
    return recipe.run.folder


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(run).model.named_parameters())


def test_a_stopped_multimodal_run_resumes_bit_for_bit(workspace: Path, run: Path) -> None:
    train(recipe_of(workspace, "stopped", "steps=2"))
    train(recipe_of(workspace, "stopped"))
    whole = weights_of(run / "checkpoints/step-00000004")
    stopped = weights_of(workspace / "runs/stopped/checkpoints/step-00000004")
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run, workspace / "runs/stopped")
    ]
    assert losses[0] == losses[1]


def test_a_second_start_opens_no_media_file_until_a_setting_of_the_data_changes(
    workspace: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = count_media_reads(monkeypatch)
    train(recipe_of(workspace, "second", "steps=1"))
    assert (looked["parsed"], looked["looked at"]) == (0, 0)
    train(recipe_of(workspace, "other", "steps=1", "data.seq_len=95"))
    assert looked["parsed"] > 0
    assert looked["looked at"] > 0


def test_doctor_data_reads_conversations_with_media(workspace: Path) -> None:
    (report,) = check_data(recipe_of(workspace, "doctor"))
    checks = {check.name: check.state for check in report.checks}
    assert checks[f"round trip of {workspace}/set/chat.jsonl"] == "ok"
    assert "fail" not in checks.values()


def test_the_next_command_of_a_finished_run_asks_about_a_picture_and_a_sound(run: Path) -> None:
    commands = [command for command, _ in next_steps({"run": run, "final": run / "final"})]
    assert (
        commands[0]
        == f"headway generate --model {run} --image picture.png --audio sound.wav --prompt 'What is this?'"
    )


def test_the_final_folder_is_the_checkpoint_and_holds_the_aligner(
    workspace: Path, run: Path
) -> None:
    final = weights_of(run / "final")
    last = weights_of(run / "checkpoints/step-00000004")
    assert final.keys() == last.keys()
    for name in final:
        torch.testing.assert_close(final[name], last[name], rtol=1e-6, atol=1e-7, msg=name)
    from headway.model.loading.aligner_file import read_aligner

    heads = read_aligner(workspace / "aligner.safetensors").tensors
    assert torch.equal(final["aligner.image.fc.weight"], heads["heads.image.proj.weight"])
    export_model(run, workspace / "again", dtype="float32")
    again = weights_of(workspace / "again")
    assert all(torch.equal(again[name], last[name]) for name in last)
    assert check_checkpoint(run).problems == []


def prompts_of(run: Path, present: bool) -> list[torch.Tensor]:
    loaded = load_model(run)
    rng = np.random.default_rng(0)
    features = {
        "a": rng.normal(size=(1, WIDTH)).astype(np.float32),
        "b": rng.normal(size=(1, WIDTH)).astype(np.float32),
    }
    items = (MediaItem(1, "image", "a"), MediaItem(4, "audio", "b"))
    ids = [5, 1, 1, 6, 1, 1, 7, 8]
    media = [PromptMedia(items, features if present else {}), PromptMedia((), {})]
    generations = generate_from_ids(
        loaded,
        [("one", ids), ("two", [5, 6, 7])],
        GenerateOptions(max_new_tokens=4, chunk_tokens=3),
        None,
        media,
    )
    return [torch.tensor(generation.token_ids) for generation in generations]


def test_generation_reads_media_in_chunks_and_text_rows_beside_them(run: Path) -> None:
    loaded = load_model(run)
    with_media = prompts_of(run, True)
    without = prompts_of(run, False)
    assert torch.equal(with_media[1], without[1])  # a text prompt does not depend on its neighbour
    plain = generate_from_ids(loaded, [("two", [5, 6, 7])], GenerateOptions(max_new_tokens=4))
    assert plain[0].token_ids == with_media[1].tolist()


def test_damaged_or_foreign_files_are_refused_by_name(
    workspace: Path, run: Path, tmp_path: Path
) -> None:
    write_heads(tmp_path / "narrow.safetensors", WIDTH - 1)
    with pytest.raises(
        ConfigError, match="its image head takes features of width 5; the image encoder gives 6"
    ):
        train(recipe_of(workspace, "bad", f"multimodal.aligner={tmp_path}/narrow.safetensors"))
    chat = tmp_path / "chat.jsonl"
    chat.write_text(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "ho"},
                ]
            }
        )
        + "\n"
    )
    with pytest.raises(ConfigError, match="no source holds pictures or sounds"):
        train(recipe_of(workspace, "bad", f"data.train=[{{path: {chat}, kind: chat}}]"))
    with pytest.raises(
        ConfigError, match="has kind multimodal, and the recipe has no `multimodal` section"
    ):
        train(
            load(
                Recipe,
                None,
                [
                    f"tokenizer={workspace}/tok",
                    f"data.train=[{{path: {workspace}/set/chat.jsonl, kind: multimodal}}]",
                    f"run.dir={tmp_path}",
                ],
            )
        )
    shutil.copytree(run / "final", tmp_path / "final")
    damaged = (tmp_path / "final/projector.safetensors").read_bytes()
    (tmp_path / "final/projector.safetensors").write_bytes(damaged[:-1] + b"x")
    with pytest.raises(
        DataError, match=r"projector\.safetensors: damaged, or changed since headway wrote it"
    ):
        load_model(tmp_path / "final")
    (tmp_path / "final" / DIGESTS).unlink()
    with pytest.raises(CheckpointError, match=r"projector\.safetensors: damaged"):
        load_model(tmp_path / "final")
    loaded = load_model(run)
    with pytest.raises(ConfigError, match="trained on a table of image features"):
        answer_media(
            loaded,
            [next(question for _, question in read_questions(workspace / "set/chat.jsonl"))],
            "chatml",
            GenerateOptions(),
        )


def test_records_with_and_without_answers_become_questions(workspace: Path) -> None:
    for data, expected in (
        ({"messages": [{"role": "user", "content": "hi"}]}, None),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            "ho",
        ),
        ({"instruction": "hi"}, None),
        ({"prompt": "hi", "response": "ho"}, "ho"),
    ):
        question = question_of(Record(data, "x.jsonl", 1))
        assert [(turn.role, turn.content) for turn in question.turns] == [("user", "hi")]
        assert question.expected == expected


def test_packed_rows_have_the_loss_of_unpacked_ones(workspace: Path) -> None:
    """The loss of all conversations is the same whether rows hold many of them or one each."""
    losses: list[float] = []
    for packing in ("best_fit", "pad"):
        sets = f"data.valid.sets={{all: {{path: {workspace}/set/chat.jsonl, kind: multimodal}}}}"
        recipe = recipe_of(
            workspace,
            packing,
            f"data.packing={packing}",
            "steps=1",
            "optim.lr=0",
            "eval.rows=1000",
            sets,
            "checkpoint.at_end=false",
        )
        train(recipe)
        lines = [
            json.loads(line)
            for line in (recipe.run.folder / "metrics.jsonl").read_text().splitlines()
        ]
        losses.append(
            next(line["valid"]["all"]["loss"] for line in reversed(lines) if "valid" in line)
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def clip_folder(folder: Path) -> Path:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    CLIPVisionModel(CLIPVisionConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(folder)
    CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    ).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_llava_folder_computes_the_same_logits_with_transformers(
    workspace: Path, run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from transformers import LlavaForConditionalGeneration

    from headway.export.llava import export_llava
    from headway.model.media_encoders import encoder_text, open_encoder

    text = encoder_text(str(clip_folder(tmp_path / "clip")), "image", patches=True)
    encoder = open_encoder(text, "image")
    shape = MediaShape(
        (MediaInput("image", encoder.width, encoder.tokens, encoder.tokens, text),),
        hidden=SMALL["hidden_size"],
    )
    config = ModelConfig(**SMALL, media=shape)
    weights = [(spec.name, initial_value(spec, config, 3)) for spec in param_specs(config)]
    export_huggingface(config, iter(weights), tmp_path / "ours", tokenizer=workspace / "tok")
    export_llava(tmp_path / "ours", tmp_path / "llava")
    exported = LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "llava", attn_implementation="eager"
    ).eval()
    token = (
        exported.config.image_token_index
        if hasattr(exported.config, "image_token_index")
        else exported.config.image_token_id
    )
    picture = next((workspace / "set/images").iterdir())
    pixels = encoder.input.read(MediaRef("image", picture))
    loaded = load_model(tmp_path / "ours")
    ids = torch.tensor([[5, 6, *[int(token)] * encoder.tokens, 7, 8, 9]])
    from headway.model.projector import MediaTensors

    slot = torch.full(ids.shape, -1, dtype=torch.int32)
    slot[0, 2 : 2 + encoder.tokens] = torch.arange(encoder.tokens, dtype=torch.int32)
    features = torch.from_numpy(encoder.encode(pixels[None]))[None]
    media = MediaTensors(slot, {"image": features}, {"image": torch.tensor([[True]])})
    with torch.no_grad():
        ours = loaded.model.logits(
            loaded.model.hidden_states(
                ids.clamp(max=SMALL["vocab_size"] - 1),
                torch.arange(ids.shape[1])[None],
                media,
            )
        )
        values = encoder.module.pixels(torch.from_numpy(pixels[None]))  # pyright: ignore[reportAttributeAccessIssue]
        wanted = exported(input_ids=ids, pixel_values=values).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"a picture is pooled|it takes image, audio"):
        export_llava(run, tmp_path / "other")


def test_batch_prediction_keeps_order_and_continues(
    workspace: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders are replaced by the table's features, so that only the prediction is looked at."""
    from headway.infer import media as module
    from headway.store.media_table import open_table

    tables = {name: open_table(workspace / name) for name in ("image", "audio")}

    def encoded(loaded: Any, refs: Any) -> dict[str, np.ndarray]:
        return {
            name: tables[ref.modality].rows(tables[ref.modality].indices_of([name]))[0]
            for name, ref in refs.items()
        }

    monkeypatch.setattr(module, "encode_media", encoded)
    loaded = load_model(run)
    source = workspace / "set/chat.jsonl"
    out = tmp_path / "answers.jsonl"
    schema = AnswerSchema({"type": "object"})
    options = GenerateOptions(max_new_tokens=3, rows=5)
    report = answer_records(loaded, source, out, "chatml", options, schema)
    whole = out.read_text()
    assert report.records == report.answered == len(source.read_text().splitlines())
    assert report.valid == 0
    assert report.exact is not None
    assert [json.loads(line)["index"] for line in whole.splitlines()] == list(range(report.records))
    # killed inside a line
    out.write_text(
        "".join(line + "\n" for line in whole.splitlines()[:7]) + whole.splitlines()[7][:20]
    )
    again = answer_records(loaded, source, out, "chatml", options, schema)
    assert out.read_text() == whole
    assert again.answered == report.records - 7
    with pytest.raises(ConfigError, match="is of another input"):
        answer_records(loaded, workspace / "set/chat_heldout.jsonl", out, "chatml", options)
    side = out.with_name(out.name + ".settings")
    settings = json.loads(side.read_text())
    side.write_text(json.dumps({**settings, "weights_digest": "0" * 64}))
    with pytest.raises(
        ConfigError, match=r"begun with other content of model .*: its weights changed"
    ):
        answer_records(loaded, source, out, "chatml", options)
    side.unlink()  # of an earlier version, which wrote none
    assert answer_records(loaded, source, out, "chatml", options).answered == 0
    assert json.loads(side.read_text()) == settings


def random_features(loaded: Any, refs: Any) -> dict[str, np.ndarray]:
    """In place of encoders: features that depend on the content alone."""
    return {
        name: np.random.default_rng(int(name[:8], 16)).normal(size=(1, WIDTH)).astype(np.float32)
        for name in refs
    }


def test_a_video_is_asked_about_as_training_reads_it(
    workspace: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("av")
    clip = tmp_path / "clip.mp4"
    silent = tmp_path / "silent.mp4"
    records = tmp_path / "records.jsonl"
    clip.write_bytes(film(8))
    silent.write_bytes(film(4, sound=False))
    prompts = ["What is it?", "First <video> then?"]
    asked = [question_about(prompt, [MediaRef("video", clip)]) for prompt in prompts]
    for prompt, question in zip(prompts, asked, strict=True):
        same = question_of(Record({"prompt": prompt, "video": "clip.mp4"}, str(records), 1))
        assert same.turns == question.turns
        assert [ref.content_hash() for ref in same.media] == [
            ref.content_hash() for ref in question.media
        ]
    assert [turn.content for turn in asked[1].turns] == [
        "First <image><image><image><image><audio> then?"
    ]
    monkeypatch.setattr("headway.infer.media.encode_media", random_features)
    lines = [
        {"prompt": prompts[0], "video": "clip.mp4"},
        {"prompt": prompts[1], "video": "silent.mp4"},
        {"prompt": "<image>x"},
    ]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = tmp_path / "answers.jsonl"
    common = [
        "generate",
        "--model",
        str(run),
        "--chat-template",
        "chatml",
        "--max-new-tokens",
        "3",
        "--device",
        "cpu",
        "--json",
    ]
    assert run_verb([*common, "--input", str(records), "--output", str(answers)]) == 0
    predictions = [json.loads(line) for line in answers.read_text().splitlines()]
    assert "1 marks <image> and 0 files" in predictions[2]["error"]
    assert predictions[2]["error"].startswith(str(records))
    capsys.readouterr()
    assert run_verb([*common, "--prompt", prompts[0], "--video", str(clip)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["videos"] == [str(clip)]
    assert said["text"] == predictions[0]["answer"]
    assert run_verb([*common, "--prompt", "<video><video>", "--video", str(clip)]) == 2
    assert "2 <video> marks in the texts, but 1 video files" in capsys.readouterr().err


def test_a_video_with_sound_is_refused_by_a_model_that_does_not_hear(tmp_path: Path) -> None:
    pytest.importorskip("av")
    for name, sound in (("loud.mp4", True), ("silent.mp4", False)):
        (tmp_path / name).write_bytes(film(4, sound=sound))
    sees = MediaPositions({"image": 2}, missing=False)
    place_question(question_about("What?", [MediaRef("video", tmp_path / "silent.mp4")]), sees)
    with pytest.raises(
        DataError,
        match=r"loud\.mp4 \(sound\): is audio; the model takes image only\. Give the video without its sound",
    ):
        place_question(question_about("What?", [MediaRef("video", tmp_path / "loud.mp4")]), sees)
