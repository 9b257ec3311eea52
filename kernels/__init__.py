"""One folder an op; see kernels/README.md for what each file in it does."""

# In a checkout's root `import kernels` would find this folder, and hide any other such package.
if __name__ == "kernels":
    raise ModuleNotFoundError("No module named 'kernels'; this folder is ikbo_tree.kernels")
