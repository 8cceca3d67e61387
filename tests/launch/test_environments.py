"""Environments of back ends, and the steps of a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Job, Step
from ascendfactory.launch import environments
from ascendfactory.launch.environments import MARK, VARIABLE, find_profile, install, profiles, require_environment, resolve
from ascendfactory.launch.local import launch
from ascendfactory.launch.steps import is_made, step_fingerprint


def test_profiles_are_found_by_name() -> None:
    assert find_profile("mindspeed_llm").name == "2.2.0"
    assert find_profile("mindspeed_llm", "2.3.0").sources[0].ref == "v2.3.0"
    with pytest.raises(UserError, match=r"no profile '2.3'; write 2.3.0"):
        find_profile("mindspeed_llm", "2.3")
    with pytest.raises(UserError, match="llamafactory"):
        find_profile("llama_factory")


def test_one_default_each() -> None:
    backends = {profile.backend for profile in profiles()}
    assert all(sum(p.default for p in profiles() if p.backend == name) == 1 for name in backends)


def test_a_missing_environment_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"not installed; run: ascendfactory install mindspeed_llm --profile 2.2.0"):
        require_environment("mindspeed_llm-2.2.0")
    (tmp_path / "verl-0.9.1").mkdir()
    with pytest.raises(UserError, match="partly installed"):
        require_environment("verl-0.9.1")


def test_argv_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    folder = tmp_path / "x-1"
    folder.mkdir()
    (folder / MARK).write_text("{}")
    argv, env = resolve(["python", "{env}/a.py", "--nnodes", "{nodes}"], {"PYTHONPATH": "{env}/src/A"}, "x-1", {"nodes": "4"})
    assert argv == [f"{folder}/bin/python", f"{folder}/a.py", "--nnodes", "4"]
    assert env["PYTHONPATH"] == f"{folder}/src/A" and env["PATH"].startswith(f"{folder}/bin")
    assert resolve(["python", "-m", "x"], {}, "", {}) == ([sys.executable, "-m", "x"], {})


def test_a_device_that_does_not_fit_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match="runs on npu, not on cpu"):
        install(find_profile("mindspeed_rl"), "cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_installation_names_its_log_and_is_not_taken_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "wheels").mkdir()
    profile = find_profile("llamafactory").model_copy(update={"torch": "", "bare_packages": [], "packages": ["no-such-package==1"]})
    with pytest.raises(UserError, match=r"install\.log: '1 packages' failed: ERROR"):
        install(profile, "cpu", wheels=str(tmp_path / "wheels"), say=lambda line: None)
    with pytest.raises(UserError, match="partly"):
        require_environment(profile.environment)


def commands_of(profile: str, device: str, monkeypatch: pytest.MonkeyPatch, wheels: str | None = None) -> list[list[str]]:
    """What an installation of verl would run, without its Python; the last word of a step is what its build is told."""
    ran: list[list[str]] = []

    def run(argv: list[str], log: Path, title: str, variables: dict[str, str] | None = None) -> None:
        ran.append([*argv[1:], *(f"{name}={value}" for name, value in (variables or {}).items())])

    monkeypatch.setattr(environments, "_run", run)
    monkeypatch.setattr(environments, "_python_for", lambda profile: sys.executable)
    install(find_profile("verl", profile), device, wheels=wheels, say=lambda line: None)
    return ran


def words_after(name: str, commands: list[list[str]]) -> set[str]:
    """All words of the commands that a word stands in."""
    return {word for argv in commands if name in argv for word in argv}


def test_verl_is_pinned_with_its_rollout_engine_and_both_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    commands = commands_of("auto", "cuda", monkeypatch)
    assert not [argv for argv in commands if argv[0] == "clone"]
    words = words_after("verl==0.9.1", commands)
    assert {"TransferQueue==0.1.11", "vllm==0.24.0", "torch==2.11.0", "transformers==5.9.0", "mbridge==0.15.1"} <= words
    assert {
        "flash-attn==2.8.3",
        "transformer-engine==2.16.1",
        "--extra-index-url=https://verl-project.github.io/verl-wheelhouse/simple/",
    } <= words
    assert "megatron-core @ git+https://github.com/NVIDIA/Megatron-LM.git@core_v0.18.0" in words


def test_verl_on_ascend_has_mindspeed_and_the_vllm_of_vllm_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    commands = commands_of("0.9.1", "npu", monkeypatch)
    words = words_after("verl==0.9.1", commands)
    assert {"vllm-ascend==0.23.0", "vllm @ git+https://github.com/vllm-project/vllm.git@v0.23.0", "mbridge==0.15.1"} <= words
    assert not [word for word in words if word.startswith(("torch==", "vllm==", "megatron-core"))]
    source = str(tmp_path / "verl-0.9.1" / "src")
    assert "VLLM_TARGET_DEVICE=empty" in words
    assert [argv[-2] for argv in commands if argv[:1] == ["-C"]] == ["e4772499f7eb9fa9a68919dd1eaddef00e915b2d", "core_v0.16.1"]
    assert [argv[-2] for argv in commands if argv[:1] == ["clone"]] == [f"{source}/MindSpeed", f"{source}/Megatron-LM"]


def test_without_a_network_what_would_be_built_is_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    words = words_after("verl==0.9.1", commands_of("0.9.1", "npu", monkeypatch, wheels="/wheels"))
    assert {"vllm", "vllm-ascend==0.23.0", "--no-index"} <= words and not [word for word in words if " @ " in word]


def test_verl_with_sglang_is_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    commands = commands_of("0.9.1-sglang", "cuda", monkeypatch)
    words = words_after("verl==0.9.1", commands)
    assert {"sglang==0.5.13", "transformers==5.8.1", "torch==2.11.0"} <= words and not [word for word in words if "vllm" in word]
    order = [next((at for at, argv in enumerate(commands) if word in argv), -1) for word in ("flash-attn==2.8.3", "sglang==0.5.13")]
    assert 0 < order[0] < order[1]  # SGLang's newer files of flash-attn-4 come last
    assert (tmp_path / "verl-0.9.1-sglang" / MARK).exists()
    with pytest.raises(UserError, match=r"verl 0\.9\.1 with SGLang runs on cuda, not on npu"):
        install(find_profile("verl", "0.9.1-sglang").model_copy(update={"name": "other"}), "npu")


def _step(tmp_path: Path, code: str, name: str = "one") -> Step:
    return Step(name=name, argv=["python", "-c", code], inputs=[str(tmp_path / "in.txt")], output=str(tmp_path / name))


def test_steps_run_in_order_once_and_again_for_other_inputs(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a")
    note = f"open({str(tmp_path / 'log')!r}, 'a').write"
    job = Job(
        files={},
        argv=["python", "-c", f"{note}('train ')"],
        before=[_step(tmp_path, f"{note}('before ')")],
        after=[_step(tmp_path, f"{note}('after ')", "two")],
    )
    events: list[str] = []
    for _ in range(2):
        assert launch(job, tmp_path / "run", read_step=lambda line: None, on_event=lambda e: events.append(e["text_en"])) == 0
    assert (tmp_path / "log").read_text() == "before train after train "
    assert events == ["one ...", "two ...", "one: made before", "two: made before"]
    (tmp_path / "in.txt").write_text("changed")
    assert launch(job, tmp_path / "run", read_step=lambda line: None) == 0
    assert (tmp_path / "log").read_text().endswith("before train after ")
    started = json.loads((tmp_path / "run" / "job" / "job.json").read_text())
    assert [step["name"] for step in started["before"]] == ["one"]


def test_a_failing_step_ends_the_job_and_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a")
    step = _step(tmp_path, "import sys; sys.stderr.write('error: no field answer\\n'); sys.exit(2)")
    job = Job(files={}, argv=["python", "-c", "open('never', 'w')"], before=[step])
    events: list[dict[str, object]] = []
    assert launch(job, tmp_path / "run", read_step=lambda line: None, on_event=events.append) == 2
    assert events[-1]["text_en"] == "error: no field answer"
    assert not Path("never").exists() and not is_made(step, step_fingerprint(step))
