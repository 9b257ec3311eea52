"""The published article's measurements on the card at hand: what they are, and a report of them.

spec.py              what an item is: panels, claims
compression.py        items, by what they are about:
attention.py inside.py beyond.py;  items.py has all
contenders.py        who is measured, and how it looks
runs.py              which command measures which results file
results.py           values of results files, by cell
counted.py           operations and bytes of workloads
figures.py           plots;  tables.py  the same numbers as tables
report.py            verdicts and one self-contained HTML page (report.html.j2)

`benchmarks/reproduce.py` runs it; the command is `ikbo-tree reproduce`.
"""
