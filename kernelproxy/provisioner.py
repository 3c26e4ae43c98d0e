"""An alias: the entry point `sing` of installed versions names this module."""

from kernelproxy.provisioning.provisioner import SingProvisioner

__all__ = ["SingProvisioner"]
