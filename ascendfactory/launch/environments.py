"""One isolated, pinned environment per back end and profile: made, found, checked.

They lie in ~/.cache/ascendfactory/environments (or $ASCENDFACTORY_ENVIRONMENTS), each a virtual environment with the back end's
packages and, where it is no package, its sources. The framework itself is never imported here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.plan import Fact

VARIABLE = "ASCENDFACTORY_ENVIRONMENTS"
MARK = "environment.json"  # written last: an environment without it is not whole


class Checkout(Fact):
    """Sources that a back end runs from."""

    folder: str
    url: str
    ref: str  # tag or commit
    devices: list[str] = Field(default=[])  # that need it; empty: all


class Profile(Fact):
    """One version of a back end, with everything that it needs."""

    backend: str
    name: str
    title: str
    default: bool = False
    python: list[str]  # versions it runs on
    devices: list[str]
    torch: str = ""
    torch_npu: str = ""
    packages: list[str]
    bare_packages: list[str] = Field(default=[])  # installed without their dependencies
    packages_cuda: list[str] = Field(default=[])
    packages_npu: list[str] = Field(default=[])
    variables_npu: dict[str, str] = Field(default={})  # of the environment in which its packages are built
    stubs: list[str] = Field(default=[])  # modules that are imported but never used; empty ones stand in on a CPU
    sources: list[Checkout] = Field(default=[])
    copies: dict[str, str] = Field(default={})  # files of one checkout that take the place of another's
    check: str
    source: str

    @property
    def environment(self) -> str:
        """Name of the environment's folder."""
        return f"{self.backend}-{self.name}"


@cache
def profiles() -> tuple[Profile, ...]:
    """Every profile of every back end, the default of each first."""
    table = tomllib.loads((files("ascendfactory.catalog") / "environments.toml").read_text(encoding="utf-8"))
    found = [
        Profile(backend=backend, name=name, **facts)
        for backend, named in table.items()
        if backend != "torch"
        for name, facts in named.items()
    ]
    return tuple(sorted(found, key=lambda profile: (profile.backend, not profile.default)))


def find_profile(backend: str, name: str = "auto") -> Profile:
    """The profile of that name; `auto` is the back end's default.

    Raises:
        UserError: no such back end or profile, with the nearest.
    """
    of_backend = [profile for profile in profiles() if profile.backend == backend]
    if not of_backend:
        names = sorted({profile.backend for profile in profiles()})
        near = nearest(backend, names) or ", ".join(names)
        raise UserError(
            "backend", f"'{backend}' needs no environment or is not known; write {near}", f"'{backend}' 不需要环境或未知；请写 {near}"
        )
    if name == "auto":
        return of_backend[0]
    for profile in of_backend:
        if profile.name == name:
            return profile
    names = [profile.name for profile in of_backend]
    near = nearest(name, names) or ", ".join(names)
    raise UserError("profile", f"{backend} has no profile '{name}'; write {near}", f"{backend} 没有配置 '{name}'；请写 {near}")


def environment_dir(environment: str) -> Path:
    """Where an environment lies, whether it is there or not."""
    root = os.environ.get(VARIABLE) or "~/.cache/ascendfactory/environments"
    return Path(root).expanduser().absolute() / environment


def require_environment(environment: str) -> Path:
    """The folder of a whole environment.

    Raises:
        UserError: it is not installed, or an installation was broken off.
    """
    folder = environment_dir(environment)
    if (folder / MARK).exists():
        return folder
    backend, _, profile = environment.partition("-")
    state, state_zh = ("is only partly installed", "安装不完整") if folder.exists() else ("is not installed", "尚未安装")
    command = f"ascendfactory install {backend} --profile {profile}"
    raise UserError(backend, f"its environment {state}; run: {command}", f"其环境{state_zh}；请运行：{command}")


def resolve(argv: list[str], env: dict[str, str], environment: str, facts: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """A job's argv and environment variables with every `{...}` filled in; `python` becomes that of the environment.

    Args:
        environment: its name, or "" for the Python that runs AscendFactory.
        facts: what else may stand in braces (nodes, node_rank, master_addr, master_port).
    """
    facts = dict(facts)
    path = {}
    if environment:
        folder = require_environment(environment)
        facts["env"] = str(folder)
        path = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(folder)}
    python = facts["env"] + "/bin/python" if environment else sys.executable
    words = [python, *argv[1:]] if argv and argv[0] == "python" else argv

    def fill(text: str) -> str:
        for name, value in facts.items():
            text = text.replace("{" + name + "}", value)
        return text

    return [fill(word) for word in words], path | {name: fill(value) for name, value in env.items()}


def install(
    profile: Profile, device: str, wheels: str | None = None, sources: str | None = None, say: Callable[[str], None] = print
) -> Path:
    """Makes the environment of a profile, anew where an earlier attempt was broken off.

    Args:
        device: cpu, cuda or npu.
        wheels: a folder of wheels; nothing is then asked from a package index.
        sources: a folder that holds the checkouts (`MindSpeed-LLM/` ...) instead of cloning them.
        say: told each step.

    Raises:
        UserError: the profile does not run on this device or Python, or a step failed (naming the log).
    """
    folder = environment_dir(profile.environment)
    if (folder / MARK).exists():
        say(f"{folder} is installed")
        return folder
    if device not in profile.devices:
        names = ", ".join(profile.devices)
        raise UserError("device", f"{profile.title} runs on {names}, not on {device}", f"{profile.title} 运行于 {names}，不支持 {device}")
    python = _python_for(profile)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "install.log"
    for title, argv in _steps(profile, device, python, folder, wheels, sources):
        say(title)
        _run(argv, log, title, profile.variables_npu if device == "npu" else {})
    for name in profile.stubs if device == "cpu" else []:
        _stub(folder, name)
    _run([str(folder / "bin/python"), "-c", profile.check], log, f"check: {profile.check}")
    facts = {"backend": profile.backend, "profile": profile.name, "device": device, "title": profile.title}
    (folder / MARK).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return folder


def _python_for(profile: Profile) -> str:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here in profile.python:
        return sys.executable
    for version in profile.python:
        if found := shutil.which(f"python{version}"):
            return found
    wanted = " or ".join(profile.python)
    raise UserError("python", f"{profile.title} needs Python {wanted}; install it first", f"{profile.title} 需要 Python {wanted}；请先安装")


def _steps(
    profile: Profile, device: str, python: str, folder: Path, wheels: str | None, sources: str | None
) -> list[tuple[str, list[str]]]:
    """Titles and commands, in order."""
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    offline = ["--no-index", "--find-links", wheels] if wheels else []
    torch = _torch_packages(profile, device)
    extra = {"cuda": profile.packages_cuda, "npu": profile.packages_npu}.get(device, [])
    steps = [("virtual environment", [python, "-m", "venv", str(folder)])]
    if torch:
        index = [] if wheels or device != "cpu" else ["--extra-index-url", _torch_index()]
        steps.append((" ".join(torch), [*pip, *offline, *index, *torch]))
    if profile.bare_packages:
        steps.append((" ".join(profile.bare_packages), [*pip, *offline, "--no-deps", *profile.bare_packages]))
    wanted = [*profile.packages, *extra]
    if wheels:  # what would be fetched and built has a wheel there too
        wanted = [name.partition(" @ ")[0] for name in wanted]
    steps.append((f"{len(wanted)} packages", [*pip, *offline, *wanted]))
    for checkout in profile.sources:
        if checkout.devices and device not in checkout.devices:
            continue
        target = folder / "src" / checkout.folder
        if sources:
            steps.append((f"copy {checkout.folder}", ["cp", "-r", str(Path(sources) / checkout.folder), str(target)]))
            steps.insert(-1, (f"folder for {checkout.folder}", ["mkdir", "-p", str(target.parent)]))
        else:
            steps.append((f"clone {checkout.url}", ["git", "clone", "--quiet", checkout.url, str(target)]))
            steps.append((f"{checkout.folder} at {checkout.ref}", ["git", "-C", str(target), "checkout", "--quiet", checkout.ref]))
    for ours, theirs in profile.copies.items():
        steps.append((f"{theirs} from {ours}", ["cp", str(folder / "src" / ours), str(folder / "src" / theirs)]))
    return steps


def _torch_packages(profile: Profile, device: str) -> list[str]:
    if device == "npu":
        return [f"torch=={profile.torch_npu}", f"torch_npu=={profile.torch_npu}"] if profile.torch_npu else []
    if not profile.torch:
        return []
    return [f"torch=={profile.torch}{'+cpu' if device == 'cpu' else ''}"]


def _torch_index() -> str:
    table = tomllib.loads((files("ascendfactory.catalog") / "environments.toml").read_text(encoding="utf-8"))
    return str(table["torch"]["cpu_index"])


def _stub(folder: Path, name: str) -> None:
    """An empty module in the place of one that is imported but never used."""
    site = next(folder.glob("lib/python*/site-packages"))
    (site / name).mkdir(exist_ok=True)
    (site / name / "__init__.py").write_text(f'"""Stands in for {name}, which text training never calls."""\n', encoding="utf-8")


def _run(argv: list[str], log: Path, title: str, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")} | dict(variables)
    with log.open("ab") as out:
        out.write(f"$ {' '.join(argv)}\n".encode())
        out.flush()
        try:
            code = subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, check=False).returncode
        except OSError as error:
            raise UserError(argv[0], f"cannot be started: {error.strerror}; install it", f"无法启动：{error.strerror}；请先安装") from None
    if code:
        last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
        raise UserError(
            str(log),
            f"'{title}' failed: {last}; run the same command again after mending it",
            f"“{title}”失败：{last}；修复后请重新运行同一命令",
        )
