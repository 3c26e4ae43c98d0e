"""A notebook's host state: its variables, taken out of one Python process and put into another.

`capture` pickles the variables as *one* graph, so that what two of them share is shared again
after `restore`; what cannot be saved is left out, and named in one line. Big memory, of NumPy and
of torch, is not copied: the result refers to it, and is valid until the notebook's code goes on.

Restoring executes code that the stream holds: functions of cells, constructors, whatever a pickle
may contain. Whoever calls `restore` has made sure that the stream comes from the user himself.

Runs in kernels: needs the standard library and cloudpickle, and torch, NumPy and pandas only
where the notebook has imported them.
"""

from __future__ import annotations

from kernelproxy.kernel.namespace.capture import capture
from kernelproxy.kernel.namespace.restore import restore
from kernelproxy.kernel.namespace.types import Captured, DevicePart, Item, Omission, Restored

__all__ = ["Captured", "DevicePart", "Item", "Omission", "Restored", "capture", "restore"]
