"""``stoker schema``: a recipe's schema as TOML, to start a schema of your own from."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["register"]


def _schema(
    recipe: Annotated[str, typer.Argument(help="Recipe name; stoker prepare --list shows them.")],
    preset: Annotated[str | None, typer.Option(help="Preset of the recipe; the first one if left out.")] = None,
) -> None:
    """Print the schema of a recipe as TOML.

    Save it, change it, and prepare with the file in place of the recipe. Keys
    that are left out have their defaults. Where a recipe also derives rows in
    Python, the first lines say what the file does not hold.

    \b
    stoker schema criteo > my_criteo.toml
    stoker schema criteo --preset nvt
    stoker prepare my_criteo.toml 'day_*.gz' --out data/criteo
    """
    from stoker.prep import recipes
    from stoker.prep.draft import schema_toml

    found = recipes.get(recipe, preset)
    lines = [f"# Schema of the recipe {found.name}, preset {found.preset_name}. Left out: keys with their defaults."]
    if found.derive is not None:
        lines += [
            "# The recipe derives its rows from the raw files in Python, which a schema file cannot express.",
            "# This file describes the derived rows. To prepare the raw files, use the recipe itself:",
            f"#   {found.example or found.command}",
        ]
    typer.echo("\n".join(lines) + "\n\n" + schema_toml(found.schema()), nl=False)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("schema")(_schema)
