"""Settings of rewards that ask a model: a server that judges answers, and a reward model."""

import functools
import os
import threading
import time
from typing import Any
from unittest.mock import patch

from headway.errors import HeadwayError
from headway.eval import reward as eval_reward
from headway.eval.reward_scorer import RewardModelScorer, open_reward_model
from headway.rewards import panel as panel_module
from headway.rewards.base import RewardAnswer
from headway.rewards.panel import RewardPanel, Score
from headway.text.self_instruct import endpoint
from headway.train.config import Recipe
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.chat_endpoint import ChatEndpoint, Handler, chat_endpoint, completion
from support.setting_runs import BASE, Row, data_folder, load

QUESTION = ({"role": "user", "content": "2+2?"},)
NOBODY = ({"role": "nobody", "content": "2+2?"},)
"""No template writes such a conversation, so that the reward model fails on it."""

VERDICTS = {
    "right": "Score: 7, not 3",
    "silent": "I like it.",
    "high": "Score: 12",
    "middling": "Score: 5",
}
SLOW_SECONDS = 0.6
"""What the server takes for the answer `slow`."""
LONG_CHARACTERS = 4_000_000
"""Of the verdict on the answer `long`."""
MEETING_SECONDS = 0.4
"""What a request waits for another one."""


def answers_of(*texts: str) -> list[RewardAnswer]:
    """These answers to one question."""
    return [RewardAnswer(number, QUESTION, text, {}) for number, text in enumerate(texts)]


def seen_scores(scores: list[Score]) -> list[Any]:
    """What is visible of scores."""
    return [(score.total, score.parts, score.problems) for score in scores]


def judge_reply(handler: Handler, number: int) -> bool:
    """A verdict by the last word of the prompt."""
    word = handler.server.seen[number]["body"]["messages"][0]["content"].split()[-1]
    if word == "busy":
        return handler.answer(b"busy", 503)
    if word == "slow":
        time.sleep(SLOW_SECONDS)
    if word == "long":
        return handler.answer(completion("x" * LONG_CHARACTERS + " Score: 4"))
    return handler.answer(completion(VERDICTS.get(word, "Score: 1")))


def judge_scores(overrides: tuple[str, ...], *texts: str) -> tuple[Any, Any]:
    """Scores of these answers and what the server received, or the refusal and nothing."""
    with (
        patch.object(endpoint, "FIRST_PAUSE_SECONDS", 0.01),
        patch.dict(os.environ, {"JUDGE_KEY": "s3cret-s3cret"}),
        chat_endpoint(judge_reply) as server,
    ):
        try:
            with RewardPanel(judge_settings(overrides, server)) as panel:
                scores = panel.score(answers_of(*texts))
        except HeadwayError as refusal:
            return str(refusal).replace(server.url, "SERVER"), []

        # The order of requests and the port differ between equal runs.
        requests = sorted(
            (item["path"], item["headers"].get("Authorization", ""), repr(item["body"]))
            for item in server.seen
        )
        return repr(seen_scores(scores)).replace(server.url, "SERVER"), requests


def judge_settings(overrides: tuple[str, ...], server: ChatEndpoint) -> Any:
    """The rewards of a recipe, with the address of the server."""
    texts = [text.replace("SERVER", server.url) for text in overrides]
    return load(Recipe, None, [*BASE, *texts]).reward


def judged(overrides: tuple[str, ...]) -> Any:
    """Requests and scores for verdicts of every sort."""
    return judge_scores(overrides, *VERDICTS, "busy")


def slowly_judged(overrides: tuple[str, ...]) -> Any:
    """Whether a slow verdict counts."""
    scores, _ = judge_scores(overrides, "slow")
    return "no answer within" in scores


def judged_at_length(overrides: tuple[str, ...]) -> Any:
    """Whether a long verdict is read."""
    scores, _ = judge_scores(overrides, "long")
    return "'judge': 0.4" in scores


def often_silent(overrides: tuple[str, ...]) -> Any:
    """Scores where no answer has a verdict."""
    with patch.object(panel_module, "FEWEST", 2):
        return judge_scores(overrides, *(f"{number} silent" for number in range(3)))


def judged_together(overrides: tuple[str, ...]) -> Any:
    """Whether two requests are at the server at the same time."""
    meeting = threading.Event()
    lock = threading.Lock()
    waiting = 0

    def reply(handler: Handler, number: int) -> bool:
        nonlocal waiting
        with lock:
            waiting += 1
            if waiting == 2:
                meeting.set()
        meeting.wait(MEETING_SECONDS)
        with lock:
            waiting -= 1
        return handler.answer(completion("Score: 1"))

    with chat_endpoint(reply) as server, RewardPanel(judge_settings(overrides, server)) as panel:
        panel.score(answers_of("first", "second"))
    return meeting.is_set()


def judge(name: str, first: object, second: object, *more: str, look: Any = judged) -> Row:
    """The judge with two values of one setting."""
    settings = {"kind": "judge", "url": "SERVER", "model": "m", "prompt": "'Rate {answer}'"}
    settings |= {"retries": "0", "timeout": "20"}
    return pair_of(settings, name, first, second, more, look)


def pair_of(
    settings: dict[str, str],
    name: str,
    first: object,
    second: object,
    more: tuple[str, ...],
    look: Any,
) -> Row:
    """A row of one reward with two values of a setting."""
    values: list[list[str]] = []
    for value in (first, second):
        texts = [f"{key}: {text}" for key, text in settings.items() if key != name]
        values.append(["{" + ", ".join((*texts, *more, f"{name}: {value}")) + "}"])
    return ((), values[0], values[1], look)


@functools.cache
def write_reward_models() -> None:
    """Two tiny reward models under the data folder."""
    config = CONFIG.with_(score_head=True, tie_embeddings=False, max_seq_len=96)
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    write_model(data_folder() / "reward0", config, tokenizer)
    write_model(data_folder() / "reward1", config.with_(init_std=0.25), tokenizer)


def model_scores(overrides: tuple[str, ...], answers: list[RewardAnswer]) -> Any:
    """Scores, batches, device and dtype of the reward model, or the refusal."""
    write_reward_models()
    scorers: list[RewardModelScorer] = []

    def opened(settings: Any) -> RewardModelScorer:
        scorers.append(open_reward_model(settings))
        return scorers[-1]

    with patch.object(eval_reward, "_score", wraps=eval_reward._score) as batches:
        try:
            settings = load(Recipe, None, [*BASE, *overrides]).reward
            with RewardPanel(settings, None, 1, opened) as panel:
                scores = seen_scores(panel.score(answers))
        except HeadwayError as refusal:
            return str(refusal)
    sizes = [len(call.args[1]) for call in batches.call_args_list]
    weight = scorers[0]._loaded.model.head_weight
    return scores, sizes, str(weight.device), str(weight.dtype)


def scored(overrides: tuple[str, ...]) -> Any:
    """A short, a medium and a long answer, and one that cannot be written."""
    unwritten = RewardAnswer(9, NOBODY, "4", {})
    answers = answers_of("4", "it is four", "4" * 200)
    return model_scores(overrides, [*answers, unwritten])


def scored_batches(overrides: tuple[str, ...]) -> Any:
    """How many answers each batch had."""
    return scored(overrides)[1]


def scored_dtype(overrides: tuple[str, ...]) -> Any:
    """What the model computes in."""
    return scored(overrides)[3]


def often_unwritten(overrides: tuple[str, ...]) -> Any:
    """Scores where no answer can be written."""
    answers = [RewardAnswer(number, NOBODY, str(number), {}) for number in range(3)]
    with patch.object(panel_module, "FEWEST", 2):
        return model_scores(overrides, answers)


def model(name: str, first: object, second: object, *more: str, look: Any = scored) -> Row:
    """The reward model with two values of one setting."""
    settings = {"kind": "model", "path": "$/reward0/out", "device": "cpu", "precision": "fp32"}
    return pair_of(settings, name, first, second, more, look)


ROWS: dict[str, Row] = {
    "reward[judge].kind": ((), ["{kind: judge, url: SERVER, model: m, retries: 0}"], ["{kind: nothing}"], judged),
    "reward[judge].weight": judge("weight", 1.0, 2.0),
    "reward[judge].default": judge("default", 0.0, -1.0),
    "reward[judge].max_failures": judge("max_failures", 1.0, 0.5, look=often_silent),
    "reward[judge].timeout": judge("timeout", 20.0, 0.2, look=slowly_judged),
    "reward[judge].memory_gib": judge("memory_gib", 4.0, 0.001, look=judged_at_length),
    "reward[judge].url": judge("url", "SERVER", "SERVER/other/v1"),
    "reward[judge].model": judge("model", "m", "n"),
    "reward[judge].prompt": judge("prompt", "'Rate {answer}'", "'Grade {answer}'"),
    "reward[judge].pattern": judge("pattern", r"'Score: (\d+)'", r"'not (\d+)'"),
    "reward[judge].low": judge("low", 0.0, 1.0),
    "reward[judge].high": judge("high", 10.0, 20.0),
    "reward[judge].temperature": judge("temperature", 0.0, 0.5),
    "reward[judge].max_tokens": judge("max_tokens", 1024, 9),
    "reward[judge].key_env": judge("key_env", "null", "JUDGE_KEY"),
    "reward[judge].requests": judge("requests", 1, 2, look=judged_together),
    "reward[judge].retries": judge("retries", 0, 2),
    "reward[model].kind": ((), ["{kind: model, path: $/reward0/out, device: cpu}"], ["{kind: nothing}"], scored),
    "reward[model].weight": model("weight", 1.0, 2.0),
    "reward[model].default": model("default", 0.0, -1.0),
    "reward[model].max_failures": model("max_failures", 1.0, 0.5, look=often_unwritten),
    "reward[model].path": model("path", "$/reward0/out", "$/reward1/out"),
    "reward[model].chat_template": model("chat_template", "null", "alpaca"),
    "reward[model].max_length": model("max_length", "null", 40),
    "reward[model].batch_tokens": model("batch_tokens", 8192, 1, look=scored_batches),
    "reward[model].device": model("device", "cpu", "cuda"),
    "reward[model].precision": model("precision", "fp32", "bf16", look=scored_dtype),
    "reward[model].scale": model("scale", 1.0, 2.0),
    "reward[model].bias": model("bias", 0.0, 1.0),
    "reward[model].clip": model("clip", "null", 0.01),
}  # fmt: skip
