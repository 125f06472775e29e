"""`headway list`."""

from headway.cli._output import JSON_FLAG, print_json, print_table


def command(json: bool = JSON_FLAG) -> None:
    """Show families, presets, objectives and every other kind a recipe can name."""
    from headway.train.catalogue import catalogue

    found = catalogue()
    if json:
        print_json(found)
        return
    print_table(["what", "names"], [(what, ", ".join(names)) for what, names in found.items()])
