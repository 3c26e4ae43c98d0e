"""Collectives of ``torch.distributed`` on tensors of a proxied device, relayed through the host."""
