"""`self_target_attention`: see op.py."""
