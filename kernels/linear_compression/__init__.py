"""`linear_compression`: see op.py."""
