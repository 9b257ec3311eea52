"""`linear`: see op.py."""
