"""An alias: checkpoints of earlier versions name modules of this package."""
