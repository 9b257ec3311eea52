"""`target_attention`: see op.py."""
