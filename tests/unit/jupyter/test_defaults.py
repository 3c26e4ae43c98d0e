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


def test_ours_is_the_default() -> None:
    assert use_provisioner(Configurable())
    assert default_name() == "sing"


def test_ours_is_the_default_of_a_factory_that_exists() -> None:
    assert default_name() == "local-provisioner"
    assert use_provisioner(Configurable())
    assert default_name() == "sing"


def test_choice_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "local-provisioner")
    assert not use_provisioner(Configurable())
    assert default_name() == "local-provisioner"


def test_choice_in_the_configuration_stays() -> None:
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "other"
    assert not use_provisioner(Configurable(config=config))
    assert default_name() == "other"
