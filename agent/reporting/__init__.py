"""Reports: measurements of one device → tables, charts and one self-contained page.

source.py reads a record file or a store into measured.py; winners.py chooses a kernel a shape; data.py (with stats.py,
evidence.py, kernels.py) computes the report of model.py; tables.py turns it into tables for people, charts.py into
figures; html.py and markdown.py render. All but source.py and published.py are pure.
"""
