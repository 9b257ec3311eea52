"""`segment_softmax`: see op.py."""
