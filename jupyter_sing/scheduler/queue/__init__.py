"""The wait queue: placement, dispatch, preemption."""
