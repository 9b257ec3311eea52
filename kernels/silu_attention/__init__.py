"""`silu_attention`: see op.py."""
