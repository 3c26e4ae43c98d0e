"""Child processes of a notebook: what they find in their environment, and what it costs them."""

from __future__ import annotations

import decimal
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproxy.kernel import process_settings
from kernelproxy.kernel.activation import children, python_path

ROOT = Path(__file__).resolve().parents[3]
CHILDREN = Path(children.__file__).parent
PARENT = {"SING_CLIENT": "1", "SING_SOCKET": "/nowhere/agent.sock", "SING_SESSION": "s"}

#: Stands for `kernelproxy.kernel.activation`: reports what is called.
ACTIVATION = """
import sys
def activate_child():
    print("activated", "torch" in sys.modules)
"""
SHOW_PATH = "import sys; print([each for each in sys.path if 'bundle' in each])\n"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return a directory of our packages with an activation that only reports."""
    directory = tmp_path / "bundle"
    activation = directory / "kernelproxy" / "kernel" / "activation"
    (activation / "children").mkdir(parents=True)
    (activation / "children" / "sitecustomize.py").symlink_to(CHILDREN / "sitecustomize.py")
    for package in (activation.parents[1], activation.parent):
        (package / "__init__.py").touch()
    (activation / "__init__.py").write_text(ACTIVATION)
    return directory


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a directory with a module that stands for torch, and no `sitecustomize`."""
    directory = tmp_path / "packages"
    directory.mkdir()
    (directory / "torch.py").write_text("print('torch')\n")
    return directory


def run(
    code: str, bundle: Path, *packages: Path, option: str = "-s", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a child process of a notebook."""
    search = [str(bundle / "kernelproxy/kernel/activation/children"), *map(str, packages)]
    return subprocess.run(
        [sys.executable, option, "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(search), **env},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_child_is_activated_when_it_imports_torch_and_not_before(
    bundle: Path, packages: Path
) -> None:
    code = SHOW_PATH + "print('begins')\nimport torch\nimport torch\n" + SHOW_PATH
    done = run(code, bundle, packages, **PARENT)
    assert done.stderr == ""
    assert done.stdout.split("\n") == [
        "[]", "begins", "activated False", "torch", "[]", "",
    ]  # fmt: skip


def test_a_child_that_does_not_import_torch_imports_nothing_of_ours(bundle: Path) -> None:
    code = "import sys; print([each for each in sys.modules if 'kernelproxy' in each])"
    assert run(code, bundle, **PARENT, PYTHONNOUSERSITE="1").stdout in ("[]\n", HEADLESS)


#: In an environment that has jupyter_sing, its ``.pth`` file imports this.
HEADLESS = "['kernelproxy', 'kernelproxy.headless']\n"


@pytest.mark.parametrize(
    "changed",
    [
        {"SING_CHILDREN": "0"},
        {"SING_CLIENT": ""},  # a kernel, or a program of `jupyter sing run`
        {"SING_SOCKET": ""},  # the daemon, and what it starts
    ],
)
def test_a_process_that_is_no_child_is_left_alone(
    bundle: Path, packages: Path, changed: dict[str, str]
) -> None:
    done = run("import torch", bundle, packages, **{**PARENT, **changed})
    assert (done.stdout, done.stderr) == ("torch\n", "")


def test_a_process_that_replaces_its_kernel_is_no_child(bundle: Path, packages: Path) -> None:
    code = (
        "import os, sys\n"
        "os.environ['SING_CLIENT'] = str(os.getpid())\n"
        "os.execl(sys.executable, 'python', '-c', 'import torch')"
    )
    assert run(code, bundle, packages, **PARENT).stdout == "torch\n"


def test_a_child_without_torch_is_as_without_us(bundle: Path) -> None:
    code = (
        "import sys\n"
        "sys.path[:] = [each for each in sys.path if 'site-packages' not in each]\n"
        "try:\n    import torch\nexcept ImportError as error:\n    print(error)"
    )
    done = run(code, bundle, **PARENT)
    assert done.stdout.endswith("No module named 'torch'\n")
    assert done.stderr == ""


def test_a_failure_is_one_line_and_leaves_torch_alone(bundle: Path, packages: Path) -> None:
    file = bundle / "kernelproxy" / "kernel" / "activation" / "__init__.py"
    file.write_text("raise RuntimeError('it is broken')\n")
    done = run("import torch", bundle, packages, **PARENT)
    assert done.stdout == "torch\n"
    assert done.stderr == "jupyter_sing: CPU only: RuntimeError: it is broken.\n"


def test_a_packages_directory_that_is_gone_is_no_obstacle(bundle: Path, packages: Path) -> None:
    (bundle / "kernelproxy").rename(bundle / "moved")
    done = run("import torch", bundle, packages, **PARENT)
    assert (done.stdout, done.stderr) == ("torch\n", "")


def test_another_version_of_our_packages_is_forgotten(bundle: Path, packages: Path) -> None:
    """As where an environment has jupyter_sing itself, and its ``.pth`` file imports it."""
    (packages / "kernelproxy").mkdir()
    (packages / "kernelproxy" / "__init__.py").write_text("other = True\n")
    (packages / "kernelproxy" / "headless.py").touch()
    code = (
        "import kernelproxy.headless, torch\n"
        "import kernelproxy; print(hasattr(kernelproxy, 'other'))"
    )
    done = run(code, bundle, packages, option="-S", **PARENT)
    assert "activated" not in done.stdout  # -S: no sitecustomize at all
    done = run("import sitecustomize\n" + code, bundle, packages, option="-S", **PARENT)
    assert done.stdout.endswith("activated False\ntorch\nFalse\n"), done.stderr


# -------------------------------------------------------------------- the next sitecustomize


def test_the_next_sitecustomize_is_imported_under_its_name(bundle: Path, packages: Path) -> None:
    (packages / "sitecustomize.py").write_text("import sys; print('theirs', __name__)\nx = 1\n")
    code = "import sys; m = sys.modules['sitecustomize']; print(m.x, m.__file__)"
    for env in (PARENT, {}):
        done = run(code, bundle, packages, **env)
        assert done.stderr == ""
        assert done.stdout == f"theirs sitecustomize\n1 {packages}/sitecustomize.py\n"


def test_several_of_them_are_chained(bundle: Path, packages: Path, tmp_path: Path) -> None:
    """Another tool of this kind before ours, and one after it; ours twice."""
    first = tmp_path / "first"
    first.mkdir()
    (first / "sitecustomize.py").write_text(
        "import os, sys\nprint('first')\nsys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['sitecustomize']\nimport sitecustomize\n"
    )
    (packages / "sitecustomize.py").write_text("print('last')\n")
    search = [first, bundle / "kernelproxy/kernel/activation/children"] * 2
    done = run("import torch", bundle, *search, packages, **PARENT)
    assert done.stderr == ""
    assert done.stdout == "first\nlast\nactivated False\ntorch\n"


def test_errors_of_the_next_sitecustomize_are_its_own(bundle: Path, packages: Path) -> None:
    theirs = packages / "sitecustomize.py"
    for text, said in (
        ("import missing_module", "No module named 'missing_module'"),
        ("raise ValueError('theirs')", "theirs"),
    ):
        theirs.write_text(text + "\n")
        ours = run("import torch", bundle, packages, **PARENT)
        (bundle / "none").mkdir(exist_ok=True)
        alone = run("import torch", bundle / "none", packages)
        assert said in alone.stderr
        assert ours.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]
        assert ours.stdout == "activated False\ntorch\n"


def test_a_child_imports_no_other_modules_than_without_us(bundle: Path) -> None:
    code = "import sys; print(*sys.modules)"
    (bundle / "none").mkdir()
    ours, alone = (run(code, each, **PARENT).stdout.split() for each in (bundle, bundle / "none"))
    assert set(ours) - set(alone) == {"sitecustomize"}


def test_no_sitecustomize_but_ours_is_no_error(bundle: Path, packages: Path) -> None:
    done = run(SHOW_PATH + "import sitecustomize", bundle, packages, **PARENT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# -------------------------------------------------------------------- PYTHONPATH


def test_our_packages_in_the_path_are_replaced_by_the_directory_for_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for_children = "/b/bundle/kernelproxy/kernel/activation/children"
    monkeypatch.delenv("SING_CHILDREN", raising=False)
    for before, wanted, after in (
        ("/b/bundle", True, for_children),
        ("/b/bundle", False, None),
        ("/b/bundle:/theirs::/more", True, f"{for_children}:/theirs:/more"),
        ("/b/bundle:/theirs", False, "/theirs"),
        # Inherited from the notebook in which it was started.
        (f"/b/bundle:/other{for_children}:/theirs", True, f"{for_children}:/theirs"),
        (f"/b/bundle:/other{for_children}", False, None),
    ):
        monkeypatch.setenv("PYTHONPATH", before)
        python_path.replace("/b/bundle", children=wanted)
        assert os.environ.get("PYTHONPATH") == after
    monkeypatch.setenv("SING_CHILDREN", "0")
    monkeypatch.setenv("PYTHONPATH", "/b/bundle")
    python_path.replace("/b/bundle", children=True)
    assert "PYTHONPATH" not in os.environ


def test_a_checkpoint_has_the_users_part_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = "/b/kernelproxy/kernel/activation/children"
    monkeypatch.setenv("PYTHONPATH", f"{ours}:/added")
    found = process_settings.settings()["environment"]
    assert found["PYTHONPATH"] == "/added"
    elsewhere = "/c/kernelproxy/kernel/activation/children"
    monkeypatch.setenv("PYTHONPATH", f"{elsewhere}:/old")
    monkeypatch.chdir("/")
    changed = {
        "directory": "/",
        "environment": {"PYTHONPATH": "/added"},
        "decimal": decimal.getcontext(),
        "recursion": sys.getrecursionlimit(),
    }
    assert list(process_settings.put_back_settings(changed)) == []
    assert os.environ["PYTHONPATH"] == f"{elsewhere}:/added"
