"""`broadcast`: see op.py."""
