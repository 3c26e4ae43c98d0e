"""Programs that use popular libraries, which run once plainly and once proxied.

Each module is a table of small functions of a device that train, generate or convert something with
random weights, and return what must not depend on where it ran. `tests/programs/libraries.py` runs
one module in one process, `tests/e2e/programs/test_libraries.py` compares. Nothing is downloaded.
"""
