"""`reduce`: see op.py."""
