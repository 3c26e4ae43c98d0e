"""The provisioner of kernels that name none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from traitlets.config import Config, Configurable

from jupyter_sing.server.defaults import use_provisioner

ENVIRONMENT = KernelProvisionerFactory.default_provisioner_name_env


@pytest.fixture(autouse=True)
def _new_factory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    KernelProvisionerFactory.clear_instance()
    yield
    KernelProvisionerFactory.clear_instance()


def default_name() -> str:
    return str(KernelProvisionerFactory.instance().default_provisioner_name)


def test_sing_is_the_default_provisioner() -> None:
    assert use_provisioner(Configurable())
    assert default_name() == "sing"


def test_sing_is_the_default_of_an_existing_factory() -> None:
    assert default_name() == "local-provisioner"
    assert use_provisioner(Configurable())
    assert default_name() == "sing"


def test_provisioner_of_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "local-provisioner")
    assert not use_provisioner(Configurable())
    assert default_name() == "local-provisioner"


def test_provisioner_of_the_configuration_is_kept() -> None:
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "other"
    assert not use_provisioner(Configurable(config=config))
    assert default_name() == "other"
