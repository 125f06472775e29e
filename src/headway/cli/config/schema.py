"""`headway config schema`."""

from headway.cli._output import print_json


def command() -> None:
    """Print the JSON schema of recipes, for editors: `# yaml-language-server: $schema=recipe.schema.json`."""
    from headway.train.config import Recipe

    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema(by_alias=True)})
