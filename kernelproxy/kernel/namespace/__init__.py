"""Host state of a notebook: its variables, captured in a process and restored in another one.

`capture` pickles the variables as *one* graph, so that what two of them share is shared again after
`restore`. What cannot be saved is left out, and named in one line. Large memory, of NumPy and of
torch, is not copied: the result refers to it, and is valid until the notebook's code continues.

Restoring executes code that the stream contains: functions of cells, constructors, anything a
pickle may contain. The caller of `restore` must be sure that the stream comes from the same user.

Runs in kernels: needs the standard library and cloudpickle, and torch, NumPy and pandas only
where the notebook has imported them.
"""

from __future__ import annotations

from kernelproxy.kernel.namespace.capture import capture
from kernelproxy.kernel.namespace.restore import restore
from kernelproxy.kernel.namespace.types import (
    Captured,
    DevicePart,
    Item,
    Omission,
    RestoredNamespace,
)

__all__ = ["Captured", "DevicePart", "Item", "Omission", "RestoredNamespace", "capture", "restore"]
