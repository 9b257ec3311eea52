"""`level_norm`: see op.py."""
