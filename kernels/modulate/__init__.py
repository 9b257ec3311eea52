"""`modulate`: see op.py."""
