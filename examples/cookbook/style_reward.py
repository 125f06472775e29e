"""A reward: 1 for an answer in the style of style_examples.py."""


def reward(prompt: str, answer: str, record: dict) -> float:
    """Whether an answer begins and ends as the style asks."""
    text = answer.strip()
    return float(text.startswith("Well:") and text.endswith("Clear?"))
