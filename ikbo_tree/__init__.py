"""ikbo-tree."""
