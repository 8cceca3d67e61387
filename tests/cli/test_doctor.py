"""The doctor: each failing row has a remedy and the exit code says so."""

from __future__ import annotations

from importlib import metadata

import pytest

from ascendfactory import cli
from ascendfactory.cli import doctor


def test_a_healthy_machine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    for name in ("python", "torch", "transformers", "cpu", "free RAM", "local port", "Hugging Face cache"):
        assert name in shown


def test_a_wrong_version_and_a_missing_package_fail_with_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda: {"torch": ">=99,<100"})
    real = metadata.version

    def version(name: str) -> str:
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert cli.run(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "'torch>=99,<100'" in shown
    assert "install 'peft'" in shown


def test_every_failing_row_says_how_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_ram_bytes", lambda: 2**20)
    (row,) = doctor._memory()
    assert (row.state, bool(row.fix)) == ("fail", True)


@pytest.mark.parametrize(
    ("version", "specifier", "good"),
    [
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("2.14.0", ">=2.13,<2.14", False),
        ("2.9.0", ">=2.13", False),
        ("5.24.0.dev1", ">=5.20", True),
        ("1", "", True),
    ],
)
def test_versions_are_compared_as_versions(version: str, specifier: str, good: bool) -> None:
    assert doctor.allowed(version, specifier) is good
