"""What is given as callbacks is checked before a run begins: a callback that no run would ever call is an error."""

from pathlib import Path
from typing import Any, cast

import pytest

import headway as hw
from headway.errors import ConfigError
from headway.train.callbacks import HOOKS, HOOKS_OF_OTHERS, check_callbacks, find_callback


class OfAnotherLibrary:
    def on_train_begin(self) -> None: ...


class Both(hw.Callback, OfAnotherLibrary):
    """A class for two libraries."""

    def on_step(self, step: int, metrics: Any) -> None: ...


def with_method(name: str) -> hw.Callback:
    return type("Mine", (hw.Callback,), {name: lambda self, *_: None})()


@pytest.mark.parametrize(
    ("method", "ours"),
    [
        *HOOKS_OF_OTHERS.items(),
        ("on_steps", "on_step"),
        ("on_validation", "on_validate"),
        ("on_epoch_begin", "one of on_step, on_validate, on_save, on_end"),
    ],
)
def test_a_method_that_is_never_called_is_refused_with_the_nearest_one(
    method: str, ours: str
) -> None:
    with pytest.raises(ConfigError, match=rf"Mine has {method}, .* did you mean {ours}\?"):
        check_callbacks([with_method(method)])


@pytest.mark.parametrize("callback", [*(with_method(name) for name in HOOKS), Both()])
def test_methods_of_a_callback_and_those_of_another_library_are_taken(
    callback: hw.Callback,
) -> None:
    check_callbacks([callback])


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Both(), r"callbacks is a Both; give a list: callbacks=\[Both\(\)\]"),
        (Both, "must be a list of objects"),
        ("mine.py:Both", "must be a list of objects"),
        (3, "must be a list of objects"),
        ([print], "callbacks has a builtin_function"),
    ],
)
def test_what_is_no_list_of_callbacks_is_one_line(callbacks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hw.train("laptop/pretrain", callbacks=cast(Any, callbacks))


def test_a_callback_of_a_recipe_is_checked_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_callback.py").write_text(
        "import headway as hw\n\n\nclass Mine(hw.Callback):\n    def on_log(self, *_): ...\n"
    )
    with pytest.raises(ConfigError, match="did you mean on_step"):
        find_callback("./mine_callback.py:Mine")
