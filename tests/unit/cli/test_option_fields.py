"""Options of a verb that are fields of the dataclass it fills."""

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from headway.cli._options import GROUP, Group, flatten
from headway.config.options import inner_options, option, parse_shard
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


def bake(arguments: list[str]) -> Baking:
    """What a verb gets for these words; a message of typer is an assertion error."""
    baked: list[Baking] = []

    def verb(baking: Baking = GROUP) -> None:
        baked.append(baking)

    app = typer.Typer()
    app.command()(flatten(verb))
    result = CliRunner().invoke(app, arguments)
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


@dataclass(frozen=True)
class Menu:
    """A dataclass that holds another one with options."""

    guests: int = option(1, "How many eat.")
    wishes: tuple[str, ...] = option((), "What a guest wants; may be repeated.", "--wish")
    bread: Baking = inner_options(Baking(1))
    table: str = "small"


def serve(given: list[str], chosen: Group) -> Menu:
    """What a verb that takes some options of a menu gets."""
    served: list[Menu] = []

    def verb(menu: Menu = chosen) -> None:  # pyright: ignore[reportArgumentType]
        served.append(menu)

    app = typer.Typer()
    app.command()(flatten(verb))
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    return served[0]


def test_options_of_a_field_stand_among_those_of_its_dataclass() -> None:
    words = ["--guests", "2", "--wish", "salt", "--wish", "milk", "--loaves", "3", "--hot"]
    assert serve(words, Group()) == Menu(2, ("salt", "milk"), Baking(3, is_hot=True))
    assert serve([], Group()) == Menu()


def test_a_verb_may_have_other_defaults() -> None:
    start = Menu(4, ("jam",), Baking(7, "wheat", oven="new"), table="large")
    assert serve([], Group(start)) == start
    assert serve(["--flour", "rye"], Group(start)) == replace(
        start, bread=Baking(7, "rye", oven="new")
    )


def test_a_verb_may_take_some_options_alone() -> None:
    start = Menu(4, table="large")
    assert serve(["--guests", "5"], Group(start, ("guests",))) == replace(start, guests=5)
    with pytest.raises(AssertionError, match="--flour"):
        serve(["--flour", "rye"], Group(start, ("guests",)))
