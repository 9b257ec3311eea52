"""`python -m ikbo_tree.cli`."""

from ikbo_tree.cli import main

main()
