"""Index maps of a tree: numpy and numba only, no torch."""

# In a checkout's root `import mapping` would find this folder and hide any other such package.
if __name__ == "mapping":
    raise ModuleNotFoundError("No module named 'mapping'; this folder is ikbo_tree.mapping")
