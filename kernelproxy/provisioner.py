"""Alias module: the entry point `sing` of installed versions names it."""

from kernelproxy.provisioning.provisioner import SingProvisioner

__all__ = ["SingProvisioner"]
