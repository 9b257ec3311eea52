"""The models and the measuring behind `ikbo-tree demo` and `ikbo-tree movielens`.

ranker.py     one small ranking model, twice: flat as anyone writes it, and on a tree
traffic.py    generated requests from documented distributions
ratings.py    MovieLens-100K: finding and reading it
movielens.py  its ratings as requests over user -> genre shelf -> movie
movies.py     the movie model: embeddings in front of the ranker
training.py   both models trained in lockstep; how far apart rounding may drive them
cost.py       interleaved times, peak memory
auc.py        AUC, and how far apart two may be
options.py    what both commands take
report.py     tables and results files       pictures.py   what they look like
"""
