"""`headway config reference`."""

import typer


def command() -> None:
    """Print the page of all settings (Markdown), as in docs/settings.md."""
    from headway.train.reference import settings_page

    typer.echo(settings_page(), nl=False)
