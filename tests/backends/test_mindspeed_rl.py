"""MindSpeed-RL: the reference of a resumed run; Qwen2.5-VL with MindSpeed-MM, and the program that makes its rows."""

from __future__ import annotations

import io
import json
import runpy
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from ascendfactory.backends import BACKENDS
from ascendfactory.core.plan import Job
from ascendfactory.launch.environments import _steps, find_profile
from tests.backends.plans import make_job_plan, make_recipe

RL = BACKENDS["mindspeed_rl"]
PROGRAM = str(files("ascendfactory.backends") / "programs" / "mindspeed_images.py")


def job(model: str, layout: dict[str, Any], nodes: int = 1, **settings: Any) -> Job:
    plan = make_job_plan(make_recipe(model, "mindspeed_rl", "grpo_full", **settings), {"zero": 1, **layout}, nodes)
    assert RL.refuse(plan.recipe, plan.card, plan.layout) == []
    return RL.render(plan)


def grpo(made: Job) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(made.files["job/grpo.yaml"])
    return config


def refused(model: str, layout: dict[str, Any], **settings: Any) -> list[tuple[str, dict[str, Any]]]:
    plan = make_job_plan(make_recipe(model, "mindspeed_rl", "grpo_full", **settings), {"zero": 1, **layout})
    return [(refusal.where, refusal.fix) for refusal in RL.refuse(plan.recipe, plan.card, plan.layout)]


@pytest.mark.parametrize(("model", "layout"), [("qwen2.5-7b", {"tp": 2, "sp": True}), ("qwen2.5-vl-7b", {"pp": 2})])
def test_the_reference_is_what_the_run_began_with(model: str, layout: dict[str, Any]) -> None:
    made = job(model, layout)
    assert grpo(made)["rl_config"]["integrated_mode_config"] == {"ref_model_load_path": "runs/run/weights"}
    assert "actor_config.load=runs/run/checkpoints" in json.loads(made.files["job/start.json"])["resume"]


def test_nodes_share_the_run_folder() -> None:
    assert "no_shared_storage" not in grpo(job("qwen2.5-7b", {"tp": 2, "sp": True}, 4, cluster="4x8 snt9b"))["megatron_training"]


def test_a_model_that_sees_runs_from_mindspeed_mm() -> None:
    made = job("qwen2.5-vl-7b", {"pp": 2, "recompute": "full"})
    config, model = grpo(made), json.loads(made.files["job/model.json"])
    assert made.environment == "mindspeed_rl-2.2.0-mm" and made.env["IS_MULTIMODAL"] == "True"
    assert "{env}/src/MindSpeed-MM/posttrain_vlm_grpo.py" in made.argv
    assert config["model"] == "runs/run/job/model.json" and config["megatron_training"]["variable_seq_lengths"]
    assert [config["rl_config"][name] for name in ("reward_dispatch_size", "adv_dispatch_size", "n_samples_per_prompt")] == [8, 8, 8]
    text, tower = model["text_decoder"], model["image_encoder"]["vision_encoder"]
    assert (text["pipeline_num_layers"], tower["pipeline_num_layers"], tower["freeze"]) == ([13, 15], [32, 0], True)
    assert text["use_remove_padding"] and text["recompute_granularity"] == "full"
    assert [step.name for step in made.before] == ["data", "convert"] and made.before[1].argv[2] == "Qwen2_5_VLConverter"
    assert made.after[0].argv[3] == "mm_to_hf"


@pytest.mark.parametrize(
    ("layout", "where", "fix"),
    [
        ({"tp": 2, "sp": True}, "layout.sp", {"layout.sp": False}),
        ({"ring": 2}, "layout.ring", {"layout.ring": 1}),
        ({"ulysses": 2}, "layout.ulysses", {"layout.ulysses": 1}),
        ({"pp": 2, "stage_layers": (0, 28)}, "layout.stage_layers", {"layout.stage_layers": "auto"}),
        ({"tp": 8}, "layout.tp", {"layout.tp": 4}),
    ],
)
def test_rows_with_images_are_not_cut(layout: dict[str, Any], where: str, fix: dict[str, Any]) -> None:
    assert refused("qwen2.5-vl-7b", layout) == [(where, fix)]


def test_a_profile_is_for_text_or_for_images() -> None:
    assert refused("qwen2.5-vl-7b", {}, profile="2.2.0") == [("profile", {"profile": "2.2.0-mm"})]
    assert refused("qwen2.5-7b", {}, profile="2.2.0-mm") == [("profile", {"profile": "2.2.0"})]
    plan = make_job_plan(make_recipe("internvl3-8b", "mindspeed_rl", "grpo_full"), {"zero": 1})
    assert [r.en for r in RL.refuse(plan.recipe, plan.card, plan.layout) if r.where == "model.path"] == [
        "mindspeed_rl: no configuration for InternVL3-8B; it has qwen2.5, qwen3, qwen3_moe, qwen2.5-vl; for others write backend: verl"
    ]


def test_files_of_one_source_take_the_place_of_anothers(tmp_path: Path) -> None:
    profile = find_profile("mindspeed_rl", "2.2.0-mm")
    last = [argv for _, argv in _steps(profile, "npu", "python3.10", tmp_path, None, None)][-5:]
    src = tmp_path / "src"
    assert [
        "cp",
        str(src / "MindSpeed-MM/examples/rl/code/random.py"),
        str(src / "Megatron-LM/megatron/core/tensor_parallel/random.py"),
    ] in last
    folders = {source.folder for source in profile.sources}
    assert [argv[0] for argv in last] == ["cp"] * 5
    assert {place.split("/")[0] for places in profile.copies.items() for place in places} == folders


class Words:
    """A tokenizer of one token a word."""

    @staticmethod
    def from_pretrained(path: str) -> Words:
        return Words()

    def apply_chat_template(self, chat: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize
        return " ".join(message["content"] for message in chat)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [0] * len(text.split())}


def picture(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "PNG")
    return out.getvalue()


def rewrite(monkeypatch: pytest.MonkeyPatch, folder: Path, records: list[dict[str, Any]], **spec: Any) -> list[dict[str, Any]]:
    """What the program makes of records that lie in a file beside `a.png`."""
    (folder / "a.png").write_bytes(picture(560, 560))
    (folder / "q.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    known = {"path": str(folder / "q.jsonl"), "columns": {}, "model": "m", "prompt_tokens": 1000, **spec}
    (folder / "spec.json").write_text(json.dumps(known))
    monkeypatch.setattr("transformers.AutoTokenizer", Words)
    monkeypatch.setattr("sys.argv", [PROGRAM, str(folder / "spec.json"), str(folder / "out")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(PROGRAM, run_name="__main__")
    if stop.value.code:
        return []
    rows: list[dict[str, Any]] = pq.read_table(folder / "out/train.parquet").to_pylist()
    return rows


def test_questions_about_images_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "<image>How many?"}]
    records = [
        {"problem": "Find x, in \\boxed{}.", "answer": 7, "images": ["a.png"]},
        {"prompt": asked, "reward_model": {"style": "rule", "ground_truth": "3"}, "image": "a.png"},
        {"question": "Which?", "solution": "B", "image": {"path": "a.png"}},
    ]
    rows = rewrite(monkeypatch, tmp_path, records)
    assert [row["prompt"][-1]["content"].split("\n")[0] for row in rows] == [
        "<image>Find x, in \\boxed{}.",
        "<image>How many?",
        "<image>Which?",
    ]
    assert ["<think>" in row["prompt"][-1]["content"] for row in rows] == [False, False, True]
    assert [row["extra_info"] for row in rows] == [{"index": i, "split": "train", "answer": a} for i, a in enumerate("73B")]
    assert {row["images"][0]["bytes"] for row in rows} == {picture(560, 560)}
    named = rewrite(monkeypatch, tmp_path, [{"q": "How \\boxed{}?", "a": "1", "image": "a.png"}], columns={"problem": "q", "answer": "a"})
    assert named[0]["extra_info"]["answer"] == "1"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"problem": "x"}, "record 1: 0 images; it takes one image"),
        ({"problem": "x", "images": ["a.png", "a.png"]}, "record 1: 2 images; it takes one image"),
        ({"problem": "x", "image": "b.png", "answer": "1"}, "record 1: no image at b.png"),
        ({"problem": "<image><image>", "image": "a.png"}, "record 1: 2 places for images"),
        ({"image": "a.png", "answer": "1"}, "record 1: the question is missing"),
        ({"problem": "\\boxed", "image": "a.png"}, "record 1: the answer is missing"),
        # 560 / 28 squared is 400, with two around the image and four words
        ({"problem": "a b c \\boxed", "image": "a.png", "answer": "1"}, "tokens with the image, more than 405"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(
    record: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rewrite(monkeypatch, tmp_path, [record], prompt_tokens=405) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'q.jsonl'}: ") and said in line


@pytest.mark.parametrize(("size", "tokens"), [((560, 560), 400), ((100, 100), 324), ((4096, 4096), 5329), ((1000, 700), 36 * 25)])
def test_tokens_of_an_image(size: tuple[int, int], tokens: int) -> None:
    assert runpy.run_path(PROGRAM)["image_tokens"](picture(*size)) == tokens
