"""Shared fixtures: no network, one thread, one pool of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", LC_ALL="C.UTF-8", OMP_NUM_THREADS="1")

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes for distributed tests."""
    processes = Pool()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Family → folder of a tiny random model with tokenizer and chat template."""
    from tests.tiny import FAMILIES, write_model

    root = tmp_path_factory.mktemp("models")
    return {family: write_model(root / family, family) for family in FAMILIES}
