"""What is asked of a scheduler: a plan, the place it runs in, and what the person adds."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan
from ascendfactory.core.recipe import Lora, PolicyGradient

# A rank, its data loader and the thread that writes checkpoints; nodes with eight devices have 96 processors and more.
_CPUS_PER_DEVICE = 8
STOP_S = 300  # from SIGTERM to SIGKILL: the running step ends, and a checkpoint is written
_VOLUME = re.compile(r"([a-z0-9](?:[-a-z0-9.]*[a-z0-9])?):(/[^:]+)")


@dataclass(frozen=True)
class Volume:
    """A persistent volume claim and where it is mounted."""

    claim: str
    path: str


@dataclass(frozen=True)
class Order:
    """One job for a scheduler.

    Args:
        plan: what runs.
        work_dir: where relative paths of the plan begin; absolute.
        options: the person's additions, in the scheduler's own words.
        image: container image (Kubernetes).
        volumes: what is mounted into the containers (Kubernetes).
        env: environment variables of the containers (Kubernetes; Slurm hands on those of the shell).
        stamp: tells submissions of one recipe apart.
    """

    plan: Plan
    work_dir: Path
    options: tuple[str, ...] = ()
    image: str = ""
    volumes: tuple[Volume, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    stamp: str = ""

    @property
    def folder(self) -> Path:
        """The run folder, absolute."""
        return self.absolute(self.plan.run_dir)

    @property
    def cpus(self) -> int:
        """Processors of a node."""
        cluster = self.plan.cluster
        return cluster.nproc if cluster.device.kind == "cpu" else cluster.nproc * _CPUS_PER_DEVICE

    def argv(self, python: str) -> list[str]:
        """What is started once on every node."""
        return [python, "-m", "ascendfactory", "train", str(self.folder / "plan.json")]

    def absolute(self, path: str | Path) -> Path:
        """A path of the plan from the root; links stay, since nodes may resolve them to something else."""
        return Path(os.path.normpath(self.work_dir / path))

    def inputs(self) -> list[tuple[str, str]]:
        """(recipe key, path) of every file and folder that the nodes read."""
        recipe = self.plan.recipe
        data = recipe.data
        found = [("model.path", recipe.model.path)]
        found += [(f"data.train[{i}].path", source.path) for i, source in enumerate(data.train)]
        found += [(f"data.eval[{i}].path", source.path) for i, source in enumerate(data.eval)]
        if data.chat_template:
            found.append(("data.chat_template", data.chat_template))
        if isinstance(recipe.tuning, Lora) and recipe.tuning.adapter:
            found.append(("tuning.adapter", recipe.tuning.adapter))
        if isinstance(recipe.objective, PolicyGradient):
            found += recipe.objective.own_files()
        return found


def read_volumes(texts: Sequence[str]) -> tuple[Volume, ...]:
    """Volumes written as `claim:/path`.

    Raises:
        UserError: one is written otherwise, or two have the same path.
    """
    found: dict[str, Volume] = {}
    for text in texts:
        match = _VOLUME.fullmatch(text)
        path = os.path.normpath(match[2]) if match else ""
        if not match or path in ("/", "/dev/shm"):
            raise UserError(
                "--volume",
                f"'{text}' is not CLAIM:/path, such as --volume datasets:/data",
                f"'{text}' 不符合 CLAIM:/path 的形式，例如 --volume datasets:/data",
            )
        if path in found:
            raise UserError("--volume", f"{path} is mounted twice; leave one out", f"{path} 挂载了两次；请删去其一")
        found[path] = Volume(match[1], path)
    return tuple(found.values())
