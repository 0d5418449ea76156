"""Installing from a clone, and from a wheel, in folders that were empty.

Packages that Gossamer needs are those of the environment of the tests. No image is built of the Dockerfile
beside the docs, because tests cannot count on Docker: the folders of the image are folders of the test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from gossamer.peer import Broker

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "examples" / "Dockerfile"
FOLDERS = ("/device", "/source", "/opt/gossamer")


def instructions() -> list[tuple[str, str]]:
    lines = (line.partition(" ") for line in FILE.read_text("utf-8").splitlines())
    return [(word, rest) for word, _, rest in lines if word not in ("", "#")]


def copy_source(target: Path) -> None:
    """Copy what a clone has, without what tests and tools have left there."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a clone of the repository")
    for name in listed.stdout.splitlines():
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def shared_packages(target: Path) -> Path:
    """Make a folder of links to all packages of the tests' environment but Gossamer itself."""
    target.mkdir()
    for folder in [path for path in sys.path if path.endswith("site-packages")]:
        for one in Path(folder).iterdir():
            if (
                "gossamer" not in one.name
                and one.suffix != ".pth"
                and not (target / one.name).exists()
            ):
                (target / one.name).symlink_to(one)
    return target


def test_the_dockerfile_is_short_and_runs_as_nobody() -> None:
    words = [word for word, _ in instructions()]
    assert len(words) <= 10
    assert words[0] == "FROM"
    assert words[-2:] == ["USER", "ENTRYPOINT"]


@pytest.mark.timeout(600)
def test_the_lines_of_the_dockerfile_run_in_an_empty_environment(tmp_path: Path) -> None:
    places = {folder: tmp_path / folder.rpartition("/")[2] for folder in FOLDERS}

    def here(text: str) -> str:
        for folder, place in places.items():
            text = text.replace(folder, str(place))
        return text.replace("chown nobody", "chown $(id -u)")

    empty = {
        "PATH": os.pathsep.join([str(Path(sys.executable).resolve().parent), "/usr/bin", "/bin"]),
        "HOME": str(tmp_path), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(shared_packages(tmp_path / "shared")), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip
    entry: list[str] = []
    for word, rest in instructions():
        if word == "WORKDIR":
            places[rest].mkdir()
        elif word == "COPY":
            assert rest == ". /source"
            copy_source(places["/source"])
        elif word == "ENTRYPOINT":
            entry = [here(each) for each in json.loads(rest)]
        elif word == "RUN":
            done = subprocess.run(
                here(rest), shell=True, cwd=places["/device"], env=empty, capture_output=True, text=True
            )  # fmt: skip
            assert done.returncode == 0, f"{rest}: {done.stdout}{done.stderr}"
    assert sorted(path.name for path in places["/device"].iterdir()) == ["my_device.py", "results"]
    assert not places["/source"].exists()
    program = "import gossamer; print(gossamer.__file__)"
    python = places["/opt/gossamer"] / "bin" / "python"
    found = subprocess.run([python, "-c", program], env=empty, capture_output=True, text=True)
    assert str(places["/opt/gossamer"]) in found.stdout, found.stderr
    # Without the device's file it ends with the one line that says so.
    done = subprocess.run(entry, cwd=places["/device"], env=empty, capture_output=True, text=True)
    assert done.returncode == 2
    assert "me.gossamer" in done.stderr
    assert "Traceback" not in done.stderr


# --- the wheel ----------------------------------------------------------------------------------------

SCRIPT = """
from models import make_net
from gossamer.experiments import Arena
from gossamer.experiments.data import load, partition
from gossamer.models import SgdLearner, SlicedNetwork

data = load("digits")
rows = partition.iid(len(data.train), peers=2, size=40, seed=0)
learners = []
for peer in range(2):
    network = SlicedNetwork(make_net(), {"all": 1.0}, example=data.train.x[:2], peer=str(peer), seed=0)
    own = data.train.take(rows[peer])
    learners.append(SgdLearner(network, (own.x, own.y), (data.test.x, data.test.y), seed=peer))
*_, last = Arena(learners).run(2)
print(f"accuracy {last.accuracy:.3f}")
"""
DEVICE = """
name = "ann"
entry = "my_device:make_learner"
rounds = 2
"""


# Runs a command as if no optional package were installed, and prints its errors.
WITHOUT_EXTRAS = """
import sys
for name in ("bokeh", "prometheus_client", "distributed", "ray"):
    sys.modules[name] = None
from gossamer.experiments.cli.app import main
sys.stderr = sys.stdout
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert stop.code not in (0, None)
"""


class Installed:
    """An environment that has nothing of its own but the wheel, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        source, wheels, self.work = (folder / name for name in ("source", "wheels", "work"))
        for each in (source, self.work):
            each.mkdir()
        copy_source(source)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        offline = ["--no-deps", "--no-index"]
        self._run(*pip, "wheel", *offline, "--no-build-isolation", "-w", str(wheels), str(source))
        shutil.rmtree(source)
        (self.wheel,) = wheels.iterdir()
        venv.create(folder / "env")
        self.bin = folder / "env" / "bin"
        self._run(*pip, "--python", str(self.bin / "python"), "install", *offline, str(self.wheel))
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        shared = shared_packages(folder / "shared")
        (packages / "shared.pth").write_text(f"{shared}\n", "utf-8")

    def __call__(self, program: str, *arguments: str) -> str:
        """Run a program of the environment in its folder, and return what it printed."""
        return self._run(str(self.bin / program), *arguments)

    def _run(self, *command: str) -> str:
        env = {
            "PATH": os.pathsep.join(["/usr/bin", "/bin"]), "HOME": str(self.work), "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1", "COLUMNS": "200",
        }  # fmt: skip
        done = subprocess.run(command, cwd=self.work, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_version_of_the_project(installed: Installed) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert installed.wheel.name == f"gossamer-{version}-py3-none-any.whl"
    assert installed("gossamer", "--version") == f"gossamer {version}\n"
    found = installed("python", "-c", "import gossamer; print(gossamer.__file__)")
    assert found.startswith(str(installed.bin.parent))


def test_a_new_project_is_simulated(installed: Installed) -> None:
    assert "mine.toml" in installed("gossamer", "new", "mine", "--like", "cnn")
    config = installed.work / "mine.toml"
    config.write_text(config.read_text("utf-8").replace("rounds = 60", "rounds = 2"), "utf-8")
    assert "metrics.jsonl" in installed("gossamer", "simulate", "mine.toml")
    assert "karate" in installed("gossamer", "examples")


def test_a_script_uses_the_network_beside_it(installed: Installed) -> None:
    project = (installed.work / "mine.py").read_text("utf-8")
    (installed.work / "models.py").write_text(project, "utf-8")
    (installed.work / "script.py").write_text(SCRIPT, "utf-8")
    assert installed("python", "script.py").startswith("accuracy 0.")


def test_a_device_joins(installed: Installed, empty_broker: Broker) -> None:
    (installed.work / "ann.toml").write_text(DEVICE, "utf-8")
    shutil.copy(ROOT / "docs" / "examples" / "my_device.py", installed.work)
    place = ["--broker", empty_broker.url, "--swarm", "garden"]
    installed("gossamer", "join", *place, "--config", "ann.toml", "--out", "device")
    report = json.loads((installed.work / "device" / "ann.report.json").read_text("utf-8"))
    assert (report["ended"], report["rounds"]) == ("finished", 2)


def test_the_demo_runs(installed: Installed) -> None:
    printed = installed("gossamer", "demo", "--rounds", "2", "--out", "demo")
    assert "worst peer" in printed
    assert (installed.work / "demo" / "demo.png").exists()


def test_what_is_optional_names_its_extra(installed: Installed, empty_broker: Broker) -> None:
    """Each command ends with one line where the package that it needs is missing; dp: see test_dp.py."""
    commands = {
        "page": ["lab"],
        "metrics": ["status", empty_broker.url, "garden", "--follow", "--metrics-port", "9464"],
        "dask": ["sweep", "example:sweep", "--on", "dask:tcp://127.0.0.1:1"],
        "ray": ["sweep", "example:sweep", "--on", "ray:auto"],
    }
    for extra, arguments in commands.items():
        last = installed("python", "-c", WITHOUT_EXTRAS, *arguments).splitlines()[-1]
        assert f"pip install 'gossamer[{extra}]'" in last, last
