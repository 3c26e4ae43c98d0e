"""Pure scheduler: events and the time go in, decisions come out (who may use which device).

It opens no files, starts no threads, reads no clock, draws no unseeded random numbers and imports
nothing from the rest of the package. The same engine therefore runs in the controller and in the
simulator, and the same events give the same decisions.
"""
