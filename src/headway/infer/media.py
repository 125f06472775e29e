"""Questions about pictures and sounds: turns and their files come in, answers go out. Encoders run
when they are asked.

    question -> positions for media in the chat template (records/encode_media.py) -> prompt ids
    files    -> encoder of the model -> features -> media tensors of a batch of prompts

The prompt is that of training: the same template, marks and positions. `answer_records` answers a
file of records in order, and continues where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.config.regular_file import regular_only
from headway.errors import ConfigError, DataError
from headway.infer.batch_files import require_same, settings_file
from headway.infer.content import content_of
from headway.infer.generate import (
    GenerateOptions,
    Generation,
    OnText,
    PromptMedia,
    generate_from_ids,
)
from headway.infer.load import LoadedModel
from headway.media.items import MediaRef
from headway.media.patches import Grid, read_cells
from headway.media.records import VIDEO_FRAMES, MediaRecord, parse_media_record, spread_videos
from headway.media.sources import read_sources
from headway.media.video import SOUND
from headway.model.media_encoders import open_encoder
from headway.records.encode_media import (
    MediaDocument,
    MediaEncoder,
    MediaPositions,
    PlacedMedia,
    place_media,
)
from headway.records.multimodal import turns_of
from headway.runtime.json_file import read_object
from headway.runtime.progress import progress
from headway.runtime.storage import write_atomic
from headway.text.document import Record
from headway.text.record_keys import ANSWERS, LISTS, KeyMap
from headway.tokenizer.chat import ChatTemplate, Turn, answer_end, default_template, find_template

if TYPE_CHECKING:
    from headway.media.schema import AnswerSchema
    from headway.model.encoders.base import FrozenMediaEncoder
    from headway.model.media_shape import MediaInput

ENCODED_AT_ONCE = 32
"""Items in one forward pass of an encoder."""
ROLES = ("role", "from")


@dataclass(frozen=True)
class MediaQuestion:
    """A conversation that waits for an answer, and its media."""

    turns: tuple[Turn, ...]
    media: tuple[MediaRef, ...] = ()
    expected: str | None = None
    """The answer of the data, where it has one."""


def template_of(loaded: LoadedModel, given: str | None) -> str:
    """The chat template for questions: the given one, or the default of the model's tokenizer."""
    return given or default_template(loaded.tokenizer)


def question_about(
    prompt: str, media: Sequence[MediaRef], system: str | None = None
) -> MediaQuestion:
    """A prompt about files, as training would read it: a video stands for pictures and its sound,
    and so does its mark."""
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    record = MediaRecord(Record({"messages": messages}, "--prompt", None), tuple(media))
    if record.of("video"):
        record = spread_videos(record, VIDEO_FRAMES)
    return MediaQuestion(
        tuple(
            Turn(message["role"], message["content"]) for message in record.record.data["messages"]
        ),
        record.media,
    )


def place_question(question: MediaQuestion, positions: MediaPositions) -> PlacedMedia[str]:
    """The question with a mark for every item; a kind of media that the model does not take is an
    error."""
    for ref in question.media:
        if ref.modality not in positions.tokens:
            sound = " Give the video without its sound." if ref.part == SOUND else ""
            raise DataError(
                f"{ref.name}: is {ref.modality}; the model takes {', '.join(positions.tokens)} "
                f"only.{sound}"
            )
    return place_media(
        question.turns,
        [(str(ref.modality), ref.content_hash()) for ref in question.media],
        positions,
    )


def _positions(loaded: LoadedModel) -> MediaPositions:
    if loaded.config.vision is not None:
        return loaded.config.vision.positions
    shape = loaded.config.media
    if shape is None:
        raise ConfigError(
            f"{loaded.path}: takes text alone; --image, --audio, --video and --input need a model "
            "trained with `multimodal`, or one with a vision tower that headway reads."
        )
    return MediaPositions(
        {media_input.modality: media_input.tokens for media_input in shape.inputs}, shape.missing
    )


def answer_media(
    loaded: LoadedModel,
    questions: Sequence[MediaQuestion],
    template: str,
    options: GenerateOptions,
    on_text: OnText | None = None,
    known: Mapping[str, np.ndarray] | None = None,
) -> list[Generation]:
    """Answer questions about media. `known`: features by content hash; those that are missing are
    computed."""
    chat_template = find_template(template, loaded.require_tokenizer())
    asked = media_prompts(loaded, questions, chat_template, known)
    # A model that never learned the template may still end its answer there.
    options = replace(
        options,
        stop_ids=(*options.stop_ids, *answer_end(chat_template, loaded.require_tokenizer())),
    )
    return generate_from_ids(
        loaded,
        [(prompt.name, prompt.ids) for prompt in asked],
        options,
        on_text,
        [prompt.media for prompt in asked],
    )


@dataclass(frozen=True)
class MediaPrompt:
    """A question as the model reads it."""

    name: str
    """Made of its text and media, so that questions that differ have different names."""
    ids: list[int]
    media: PromptMedia


def media_prompts(
    loaded: LoadedModel,
    questions: Sequence[MediaQuestion],
    template: ChatTemplate,
    known: Mapping[str, np.ndarray] | None = None,
) -> list[MediaPrompt]:
    """Questions with the features of their media. `known`: features by content hash; those that are
    missing are computed."""
    positions = _positions(loaded)
    refs: dict[str, MediaRef] = {}
    grids: dict[str, Grid] = {}
    prompts: list[tuple[str, MediaDocument]] = []
    for question in questions:
        for ref in question.media:
            grid = positions.grid(ref)
            if grid is not None:
                grids[ref.content_hash()] = grid
        encoder = MediaEncoder(loaded.require_tokenizer(), template, positions, grids=grids)
        document = encoder.prompt(place_question(question, positions))
        refs |= {ref.content_hash(): ref for ref in question.media}
        # The key of its draws: the same text about another picture draws other numbers.
        named = json.dumps(
            [
                [turn.content for turn in question.turns],
                [ref.content_hash() for ref in question.media],
            ]
        )
        prompts.append((named, document))

    # By content: a picture that several questions show is encoded once.
    features = dict(known or {})
    features |= encode_media(
        loaded, {name: ref for name, ref in refs.items() if name not in features}
    )

    media_prompts: list[MediaPrompt] = []
    for name, document in prompts:
        hashes = [item.content_hash for item in document.items if item.content_hash]
        media = PromptMedia(
            document.items,
            {key: features[key] for key in hashes},
            {key: grids[key] for key in hashes if key in grids},
        )
        media_prompts.append(MediaPrompt(name, document.ids.tolist(), media))
    return media_prompts


def encoder_of(loaded: LoadedModel, media_input: MediaInput) -> FrozenMediaEncoder:
    """The encoder of a modality, on the model's device. It is loaded once."""
    folder = loaded.path if isinstance(loaded.path, Path) else None
    encoder = open_encoder(media_input.encoder, media_input.modality, folder).to(loaded.device)
    if (encoder.tokens, encoder.width) != (media_input.vectors, media_input.width):
        raise ConfigError(
            f"{loaded.path}: was trained on {media_input.modality} features of "
            f"{media_input.vectors} x {media_input.width}; its encoder gives {encoder.tokens} x "
            f"{encoder.width}. Put the encoder back that it was trained with."
        )
    return encoder


def encode_media(loaded: LoadedModel, refs: Mapping[str, MediaRef]) -> dict[str, np.ndarray]:
    """The features [vectors, width] of media, by their names."""
    if loaded.config.vision is not None:
        return {name: encode_picture(loaded, ref) for name, ref in refs.items()}
    assert loaded.config.media is not None
    features: dict[str, np.ndarray] = {}
    for media_input in loaded.config.media.inputs:
        names = [name for name, ref in refs.items() if ref.modality == media_input.modality]
        if not names:
            continue
        encoder = encoder_of(loaded, media_input)
        for first in range(0, len(names), ENCODED_AT_ONCE):
            batch = names[first : first + ENCODED_AT_ONCE]
            encoded = encoder.encode(np.stack([encoder.input.read(refs[name]) for name in batch]))
            features |= dict(zip(batch, encoded, strict=True))
    return features


def encode_picture(loaded: LoadedModel, ref: MediaRef) -> np.ndarray:
    """The features [rows * columns, F] of a picture, by the model's own vision tower
    (model/vision.py)."""
    shape = loaded.config.vision
    assert shape is not None
    grid, cells = read_cells(ref, shape.spec)
    return encode_cells(loaded, grid, cells)


def encode_cells(loaded: LoadedModel, grid: Grid, cells: np.ndarray) -> np.ndarray:
    """The same of the cells of a picture (media/patches.py)."""
    import torch

    from headway.model.transformer import Transformer
    from headway.model.vision import run_tower

    model = loaded.model
    shape = loaded.config.vision
    assert isinstance(model, Transformer) and model.visual is not None and shape is not None
    with torch.inference_mode():
        on_device = torch.from_numpy(cells).to(loaded.device)
        features = run_tower(model.visual, shape, on_device, [grid], model.head_weight.dtype)
        return features.float().cpu().numpy()


def read_questions(path: Path | str) -> Iterator[tuple[Record, MediaQuestion]]:
    """The records of a file as questions; the last answer of a record is what is expected of the
    model."""
    for record in read_sources(path):
        yield record, question_of(record)


def question_of(record: Record) -> MediaQuestion:
    """The question of a record in any shape that training reads; an answer may be missing."""
    media_record = parse_media_record(_with_answer(record))
    turns = turns_of(media_record, KeyMap())
    # Everything before the last answer is the question.
    last = max(
        (number for number, turn in enumerate(turns) if turn.role == "assistant"),
        default=len(turns),
    )
    answer = None
    if last < len(turns):
        answer = turns[last].content
    return MediaQuestion(turns[:last], media_record.media, None if answer == NO_ANSWER else answer)


NO_ANSWER = "\ufffc"
"""Stands where a record has no answer; an object replacement character is no text."""


def _with_answer(record: Record) -> Record:
    """The record with a stand-in where it has no answer: the parsers of training data want one."""
    data: dict[str, Any] = dict(record.data)
    listed = next((key for key in LISTS if isinstance(data.get(key), list) and data[key]), None)
    if listed is not None:
        last = data[listed][-1]
        key = next((name for name in ROLES if isinstance(last, dict) and name in last), None)
        if key is not None and last[key] in ("user", "human"):
            text = "content" if key == "role" else "value"
            data[listed] = [
                *data[listed],
                {key: "assistant" if key == "role" else "gpt", text: NO_ANSWER},
            ]
    elif not any(data.get(key) is not None for key in ANSWERS) and not any(
        data.get(key) for key in ("text", "caption", "txt")
    ):
        data["response"] = NO_ANSWER
    return replace(record, data=data)


@dataclass(frozen=True)
class PredictionReport:
    """What a batch prediction did."""

    output: str
    records: int
    answered: int
    """Now; the others were in the output already."""
    exact: float | None
    """The share of answers equal to those of the data, where it has any."""
    valid: float | None
    """The share of answers that follow the schema, where one is given."""
    failed: int
    """Records that could not be read; their lines say why."""


def answer_records(
    loaded: LoadedModel,
    path: Path,
    output: Path,
    template: str,
    options: GenerateOptions,
    schema: AnswerSchema | None = None,
) -> PredictionReport:
    """Answer every record of a file; one line of JSON each, in order. Lines that are there already
    are kept, if they are of this input."""
    settings = _settings(loaded, template, options)
    side = settings_file(output)
    if side.is_file() and output.exists() and output.stat().st_size:
        require_same(output, read_object(side, ConfigError), settings)
    done = _lines_of(output)
    write_atomic(side, json.dumps(settings, indent=2) + "\n")
    answered = 0
    with (
        progress(f"answer {path.name}", unit="records") as advance,
        open(output, "a", encoding="utf-8", opener=regular_only) as file,
    ):
        # Lines that are there must belong to the first records of this input.
        records = enumerate(read_sources(path))
        for (number, record), line in zip(islice(records, len(done)), list(done), strict=False):
            if line.get("index") != number or line.get("id") != _name(record):
                raise ConfigError(
                    f"--output is {output}, whose line {number + 1} is of another input. Give "
                    "another file, or remove it."
                )
        if len(done) and sum(1 for _ in zip(done, read_sources(path), strict=False)) < len(done):
            raise ConfigError(
                f"--output is {output}, which has more lines than the input. Give another file, "
                "or remove it."
            )

        # Written batch by batch: a kill loses at most one.
        while chunk := list(islice(records, options.rows)):
            for line in _answered(loaded, chunk, template, options, schema):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                done.append(line)
            file.flush()
            answered += len(chunk)
            advance(len(chunk))

    # Over all lines, those of earlier runs too.
    with_expected = [line for line in done if line.get("expected") is not None and "answer" in line]
    checked = [line for line in done if "valid" in line]
    exact = None
    if with_expected:
        equal = sum(line["answer"].strip() == line["expected"].strip() for line in with_expected)
        exact = equal / len(with_expected)
    valid = None
    if checked:
        valid = sum(line["valid"] for line in checked) / len(checked)
    return PredictionReport(
        str(output),
        records=len(done),
        answered=answered,
        exact=exact,
        valid=valid,
        failed=sum("error" in line for line in done),
    )


def _settings(loaded: LoadedModel, template: str, options: GenerateOptions) -> dict[str, Any]:
    """What decides the answers, as plain values."""
    sampling = options.sampling
    return {
        "model": str(loaded.path),
        "max_new_tokens": options.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "stop": list(options.stop),
        "template": template,
        "masks": json.loads(json.dumps(loaded.describe_masks(), default=str)),
        **content_of(loaded),
    }


def _answered(
    loaded: LoadedModel,
    chunk: Sequence[tuple[int, Record]],
    template: str,
    options: GenerateOptions,
    schema: AnswerSchema | None,
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    asked: list[tuple[dict[str, Any], MediaQuestion]] = []
    known: dict[str, np.ndarray] = {}
    positions = _positions(loaded)
    for number, record in chunk:
        line: dict[str, Any] = {"index": number, "id": _name(record), "place": record.place}
        lines.append(line)
        try:
            question = question_of(record)
            place_question(question, positions)
            # one record at a time: a broken file is one record's
            known |= encode_media(loaded, {ref.content_hash(): ref for ref in question.media})
            asked.append((line, question))
        except DataError as problem:
            text = str(problem)
            if text.startswith(record.place):
                line["error"] = text
            else:
                line["error"] = f"{record.place}: {text}"

    questions = [question for _, question in asked]
    answers = answer_media(loaded, questions, template, options, known=known)
    for (line, question), generation in zip(asked, answers, strict=True):
        line |= {
            "answer": generation.text,
            "expected": question.expected,
            "stopped_by": generation.stopped_by,
        }
        if schema is not None:
            problems = schema.problems(generation.text)
            line |= {"valid": not problems, "problems": problems}
    return lines


def _name(record: Record) -> str:
    """A name of the record's content, by which a continued job knows its lines again."""
    return hashlib.sha256(
        json.dumps(record.data, sort_keys=True, default=str).encode()
    ).hexdigest()[:16]


def _lines_of(output: Path) -> list[dict[str, Any]]:
    """The whole lines of an output; a line that a kill cut short is removed."""
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        return []
    with open(output, "rb", opener=regular_only) as file:
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.decode("utf-8").splitlines() if line.strip()]
        if not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line is no object")
    except ValueError as problem:
        raise ConfigError(
            f"--output is {output}, which holds something else than answers ({problem}). Give "
            "another file."
        ) from None
    if len(whole) < len(content):
        with open(output, "r+b") as file:
            file.truncate(len(whole))
    return lines
