"""Who may use which device, and for how long: events and the time go in, decisions come out.

Nothing here opens a file, starts a thread, reads a clock or draws an unseeded random number, and
nothing of the rest of the package is imported. The same engine therefore runs in the controller and
in the simulator, and the same events give the same decisions.
"""
