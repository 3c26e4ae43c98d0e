"""Makes ``sing`` the provisioner of kernels that name none, when the server extension is on.

The files that pip installs into ``jupyter_server_config.d`` can switch an extension on and nothing
else, so the extension itself does this.
"""

from __future__ import annotations

import os

from jupyter_client.provisioning.factory import KernelProvisionerFactory
from traitlets.config import Configurable

PROVISIONER = "sing"


def use_provisioner(parent: Configurable) -> bool:
    """Make ours the default provisioner, unless the user has chosen one.

    Parameters
    ----------
    parent : Configurable
        Server application, whose configuration is read.

    Returns
    -------
    bool
        True if ours is the default now.
    """
    factory = KernelProvisionerFactory.instance(parent=parent)
    chosen = (
        KernelProvisionerFactory.default_provisioner_name_env in os.environ
        or "default_provisioner_name" in parent.config.KernelProvisionerFactory
    )
    if not chosen:
        factory.default_provisioner_name = PROVISIONER
    return bool(factory.default_provisioner_name == PROVISIONER)
