"""Options of a verb that are fields of the dataclass it fills."""

from dataclasses import dataclass
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from headway.cli._options import GROUP, flatten, option_of
from headway.config.options import option, parse_shard
from headway.errors import ConfigError


@dataclass(frozen=True)
class Baking:
    """A dataclass that some work takes."""

    loaves: int = option(..., "How many.", min=1)
    flour: Literal["rye", "wheat"] = option("rye", "Which flour.")
    grams: int = option(
        500, "Kilograms of a loaf.", "--kilograms", written=0.5, read=lambda kg: int(kg * 1000)
    )
    part: tuple[int, int] | None = option(
        None, "Which part.", read=lambda text: text and parse_shard(text)
    )
    is_hot: bool = option(False, "Bake at once.", "--hot")
    oven: str = "old"


def bake(given: list[str]) -> Baking:
    """What a verb gets for these words; a message of typer is an assertion error."""
    baked: list[Baking] = []

    def verb(baking: Baking = GROUP) -> None:
        baked.append(baking)

    app = typer.Typer()
    app.command()(flatten(verb))
    result = CliRunner().invoke(app, given)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return baked[0]


def test_fields_are_filled_from_options_and_keep_their_defaults() -> None:
    assert bake(["--loaves", "2"]) == Baking(2)
    words = ["--loaves", "2", "--flour", "wheat", "--kilograms", "0.75", "--part", "1/3", "--hot"]
    assert bake(words) == Baking(2, "wheat", 750, (1, 3), True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--loaves"),
        (["--loaves", "0"], "--loaves"),
        (["--loaves", "2", "--kilograms", "x"], "--kilograms"),
        (["--loaves", "2", "--oven", "new"], "--oven"),
    ],
)
def test_what_typer_refuses_names_the_option(words: list[str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        bake(words)


def test_what_is_read_may_be_refused_in_our_words() -> None:
    with pytest.raises(ConfigError, match="--shard is '3/3'"):
        bake(["--loaves", "2", "--part", "3/3"])


def test_one_field_alone_is_an_option_too() -> None:
    alone = option_of(Baking, "flour")
    assert (alone.default, alone.help) == ("rye", "Which flour.")
