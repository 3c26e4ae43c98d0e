"""Graphs of ``torch.compile``: described by the notebook, compiled and run by the worker.

    text.py       the description: plain data, as bytes that a digest names
    describe.py   notebook: an FX graph of aten operators becomes such bytes
    rebuild.py    worker: such bytes become an FX graph again; they are believed nothing
    running.py    worker: compiles a graph for its device, and runs it

Needs the standard library and torch alone.
"""
