"""The command `ikbo-tree`: one module a sub-command, with a typer function of its name."""

from __future__ import annotations

import importlib
import sys

from ikbo_tree.extras import MissingExtraError, require

COMMANDS = ("demo", "movielens", "fuzz", "tune", "analyze", "serve", "bench-serve", "reproduce")


def main() -> None:
    """Runs `ikbo-tree`; a missing extra is one sentence on stderr and exit code 1."""
    try:
        for module in ("typer", "rich", "matplotlib"):
            require(module, "cli")
        import typer

        app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
        app.callback()(_about)
        for name in COMMANDS:
            module = name.replace("-", "_")
            module_of = importlib.import_module(f"ikbo_tree.cli.{module}")
            app.command(name)(getattr(module_of, module))
        app()
    except MissingExtraError as error:
        print(f"ikbo-tree: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _about() -> None:
    """Broadcast-free recommender models on trees of any depth."""
